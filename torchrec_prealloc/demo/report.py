"""What the runs come to: the table, in the terminal and in files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrec_prealloc.bench.machine import NO_GPU, describe_machine
from torchrec_prealloc.bench.plot import PlotUnavailable, write_plot
from torchrec_prealloc.bench.table import Column, Figure, Row, Table
from torchrec_prealloc.demo.process_group import gather
from torchrec_prealloc.demo.simulated import STEPS, Simulated
from torchrec_prealloc.demo.train import Run
from torchrec_prealloc.ways import PREALLOCATED

_SPEED = (
    Column("steps_per_second", "steps/s", 1, better="high"),
    Column("copies", "H2D copies per batch", 0, better="low"),
    Column("allocations", "device allocations per batch", 0, better="low"),
)
_GPU = (
    Column("gpu_allocated_mib", "GPU peak allocated, MiB", 1, absent=NO_GPU, better="low"),
    Column("gpu_reserved_mib", "GPU peak reserved, MiB", 1, absent=NO_GPU, better="low"),
    Column("gpu_side_mib", "of it side streams, MiB", 1, absent=NO_GPU, better="low"),
)
_SIMULATED = (
    Column("simulated_allocated_mib", "peak allocated, MiB (simulated)", 1, better="low"),
    Column("simulated_reserved_mib", "peak reserved, MiB (simulated)", 1, better="low"),
    Column("simulated_side_mib", "of it side streams, MiB (simulated)", 1, better="low"),
)
_REST = (Column("host_peak_mib", "CPU peak RSS, MiB", 0, better="low"), Column("auc", "test AUC", 4, better="high"))
COLUMNS = (*_SPEED, *_GPU, *_REST)

_ON_A_CPU = """\
On a CPU a batch is where it has to be: TorchRec copies nothing there, ours copies all the same, since the same code
runs. Copies and allocations are those that a device would see; they and the memory of a device are what to look at."""

_ON_THE_SIMULATOR = f"""\
Simulated: {STEPS} steps of each way in one rank, PyTorch's allocator rules on a simulated device; no GPU was measured.
What side streams hold, the main stream cannot use."""


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


def with_simulated(table: Table, simulated: Simulated) -> Table:
    """The table with the simulator's memory in place of the GPU's, where there is some."""
    if not simulated.ways:
        return table
    rows = []
    for row in table.rows:
        found = simulated.ways[row.name]
        figures = {key: figure for key, figure in row.figures.items() if not key.startswith("gpu_")}
        for column, size in zip(_SIMULATED, (found.allocated, found.reserved, found.side), strict=True):
            figures[column.key] = _mib(size)
        rows.append(Row(row.name, figures))
    return Table(table.subject, (*_SPEED, *_SIMULATED, *_REST), tuple(rows))


def report(table: Table, settings: Mapping[str, Any], out: Path, problem: str = "") -> None:
    """Print the table and what it means; write `demo.json` and, where matplotlib is installed, `demo.png` into `out`.

    Args:
        table: of the runs
        settings: that they had in common: pipeline (its section of the config), device, ranks, steps, batch_size and
            whatever else is worth keeping; they go into the JSON
        out: the folder; made where it is missing
        problem: why there is no simulated memory, if that was wanted
    """
    machine = describe_machine()
    where = "GPU" if settings["device"] == "cuda" else "CPU"
    pipeline = settings["pipeline"]["_target_"].rpartition(".")[2]
    print(f"\nDLRM on MovieLens-100K, {pipeline} and TorchRec's own, {settings['ranks']} x {where}")
    print(f"\n{table.text()}\n")
    print(f"The losses of all {settings['steps']} steps are equal bit for bit in the three ways.")
    if where == "CPU":
        print(_ON_A_CPU)
    if any(column in table.columns for column in _SIMULATED):
        print(_ON_THE_SIMULATOR)
    if problem:
        print(f"No simulated memory: {problem}")
    print(f"Machine: {machine.line()}")
    table.write_json(out / "demo.json", machine, settings)
    written = [out / "demo.json"]
    try:
        write_plot(table, out / "demo.png", "Three ways of copying batches", PREALLOCATED, machine.line())
        written.append(out / "demo.png")
    except PlotUnavailable as error:
        print(error)
    print("Written:", ", ".join(map(str, written)))


_OVER_RANKS = {
    "steps_per_second": min,
    **{column.key: max for column in _GPU},
    "host_peak_mib": max,
}


def _figures(run: Run) -> dict[str, Figure | None]:
    return {
        "steps_per_second": run.steps_per_second,
        "copies": run.copies,
        "allocations": run.allocations,
        "gpu_allocated_mib": _mib(run.peaks.gpu_allocated),
        "gpu_reserved_mib": _mib(run.peaks.gpu_reserved),
        "gpu_side_mib": _mib(run.peaks.gpu_side),
        "host_peak_mib": _mib(run.peaks.host),
        "auc": run.auc,
    }


def _mib(size: int | None) -> float | None:
    return None if size is None else size / (1 << 20)
