"""What the runs come to: the table, in the terminal and in files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrec_prealloc.bench.machine import NO_GPU, describe_machine
from torchrec_prealloc.bench.plot import PlotUnavailable, write_plot
from torchrec_prealloc.bench.table import Column, Figure, Row, Table
from torchrec_prealloc.demo.process_group import gather
from torchrec_prealloc.demo.train import Run
from torchrec_prealloc.ways import PREALLOCATED

COLUMNS = (
    Column("steps_per_second", "steps/s", 1, better="high"),
    Column("copies", "H2D copies per batch", 0, better="low"),
    Column("allocations", "device allocations per batch", 0, better="low"),
    Column("gpu_allocated_mib", "GPU peak allocated, MiB", 1, absent=NO_GPU, better="low"),
    Column("gpu_reserved_mib", "GPU peak reserved, MiB", 1, absent=NO_GPU, better="low"),
    Column("host_peak_mib", "CPU peak RSS, MiB", 0, better="low"),
    Column("auc", "test AUC", 4, better="high"),
)

_ON_A_CPU = """\
On a CPU a batch is where it has to be: TorchRec copies nothing there, ours copies all the same, since the same code
runs. Copies and allocations are those that a device would see; they and the memory of a GPU are what to look at."""


def summarise(runs: Sequence[Run]) -> Table:
    """The table of the runs of all ranks, which call it together: speed of the slowest rank, memory of the largest."""
    rows = []
    for ranks in zip(*gather([(run.way, _figures(run)) for run in runs]), strict=True):
        name, figures = ranks[0]
        for key, choose in _OVER_RANKS.items():
            measured = [value for _, rank in ranks if isinstance(value := rank[key], int | float)]
            figures[key] = choose(measured) if measured else None
        rows.append(Row(name, figures))
    return Table("way", COLUMNS, tuple(rows))


def report(table: Table, settings: Mapping[str, Any], out: Path) -> None:
    """Print the table and what it means; write `demo.json` and, where matplotlib is installed, `demo.png` into `out`.

    Args:
        table: of the runs
        settings: that they had in common: pipeline (its section of the config), device, ranks, steps, batch_size and
            whatever else is worth keeping; they go into the JSON
        out: the folder; made where it is missing
    """
    machine = describe_machine()
    where = "GPU" if settings["device"] == "cuda" else "CPU"
    pipeline = settings["pipeline"]["_target_"].rpartition(".")[2]
    print(f"\nDLRM on MovieLens-100K, {pipeline} and TorchRec's own, {settings['ranks']} x {where}")
    print(f"\n{table.text()}\n")
    print(f"The losses of all {settings['steps']} steps are equal bit for bit in the three ways.")
    if where == "CPU":
        print(_ON_A_CPU)
    print(f"Machine: {machine.line()}")
    table.write_json(out / "demo.json", machine, settings)
    written = [out / "demo.json"]
    try:
        write_plot(table, out / "demo.png", "Three ways of copying batches", PREALLOCATED, machine.line())
        written.append(out / "demo.png")
    except PlotUnavailable as error:
        print(error)
    print("Written:", ", ".join(map(str, written)))


_OVER_RANKS = {"steps_per_second": min, "gpu_allocated_mib": max, "gpu_reserved_mib": max, "host_peak_mib": max}


def _figures(run: Run) -> dict[str, Figure | None]:
    return {
        "steps_per_second": run.steps_per_second,
        "copies": run.copies,
        "allocations": run.allocations,
        "gpu_allocated_mib": _mib(run.peaks.gpu_allocated),
        "gpu_reserved_mib": _mib(run.peaks.gpu_reserved),
        "host_peak_mib": _mib(run.peaks.host),
        "auc": run.auc,
    }


def _mib(size: int | None) -> float | None:
    return None if size is None else size / (1 << 20)
