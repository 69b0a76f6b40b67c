"""`torchrec-prealloc demo`: the flags, the three runs, the table."""

import argparse
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrec_prealloc.bench.table import Table
    from torchrec_prealloc.demo.train import Run
    from torchrec_prealloc.demo.ways import Way

NAME = "demo"
SUMMARY = "train a DLRM on MovieLens-100K three ways and compare them"

SEED = 20
STEPS = 700
BATCH_SIZE = 256
TEST_BATCH_SIZE = 1024
MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's flags to `parser`."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--pipeline", choices=("base", "sparse_dist"), default="sparse_dist", help="which of TorchRec's pipelines"
    )
    which.add_argument("--config", metavar="FILE", type=Path, help="YAML that names one of our pipelines with options")
    parser.add_argument("--steps", metavar="N", type=_positive, default=STEPS, help="batches to train on (%(default)s)")
    parser.add_argument(
        "--batch-size", metavar="N", type=_positive, default=BATCH_SIZE, help="samples a batch and rank (%(default)s)"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("demo-results"), help="for demo.json and demo.png (%(default)s)"
    )


def run(args: argparse.Namespace) -> None:
    """Run the demo; rank 0 prints the table and writes the files.

    Raises:
        CommandError: the data set is missing, the config does not fit, or losses are not equal bit for bit.
    """
    _silence_third_parties()
    import torch
    import torch.distributed as dist

    from torchrec_prealloc.demo.batches import Share, TestBatches, TrainBatches
    from torchrec_prealloc.demo.movielens import read_movielens
    from torchrec_prealloc.demo.process_group import process_group
    from torchrec_prealloc.demo.samples import make_samples
    from torchrec_prealloc.demo.ways import OURS, read_section, three_ways

    # The model is small: a second thread gives little, and on a machine with other work it costs many times that.
    torch.set_num_threads(1)
    section = read_section(args.config) if args.config else {"_target_": OURS[args.pipeline]}
    ways = three_ways(section)
    samples = make_samples(read_movielens())
    with process_group() as device:
        share = Share(dist.get_rank(), dist.get_world_size())
        pin = device.type == "cuda"
        runs = run_all(
            ways,
            TrainBatches(samples, args.batch_size, args.steps, SEED, share, pin),
            TestBatches(samples, TEST_BATCH_SIZE, share, pin),
            device,
        )
        table = summarise(runs)
        if share.rank == 0:
            settings = {
                "pipeline": section,
                "steps": len(runs[0].losses),
                "batch_size": args.batch_size,
                "ranks": share.ranks,
                "seed": SEED,
                "device": device.type,
                "last_loss": float(runs[0].losses[-1]),
            }
            report(table, settings, args.out)


def run_all(ways: "tuple[Way, ...]", train: Any, test: Any, device: Any) -> "list[Run]":
    """Run every way, and check on every rank that they trained the same model.

    Raises:
        UnequalLosses: first weights or losses of two ways differ, on whichever rank. It is raised on all ranks.
    """
    from torchrec_prealloc.demo.losses import UnequalLosses, explain_difference, first_difference
    from torchrec_prealloc.demo.process_group import gather
    from torchrec_prealloc.demo.train import run_way

    runs: list[Run] = []
    for way in ways:
        runs.append(run_way(way, train, test, device))
        reference, latest = runs[0], runs[-1]
        problem = ""
        if latest.first_weights != reference.first_weights:
            problem = f"{latest.way} did not start from the weights of {reference.way}"
        elif difference := first_difference(reference.losses, latest.losses):
            problem = explain_difference(reference.way, latest.way, difference)
        for rank, found in enumerate(gather(problem)):
            if found:
                raise UnequalLosses(f"rank {rank}: {found}")
    return runs


def summarise(runs: "list[Run]") -> "Table":
    """The table of the runs. Speed is the slowest rank's, memory the largest rank's. All ranks call it together."""
    from torchrec_prealloc.bench.machine import NO_GPU
    from torchrec_prealloc.bench.table import Column, Row, Table
    from torchrec_prealloc.demo.process_group import gather

    columns = (
        Column("steps_per_second", "steps/s", 1, better="high"),
        Column("copies", "H2D copies per batch", 0, better="low"),
        Column("allocations", "device allocations per batch", 0, better="low"),
        Column("gpu_allocated_mib", "GPU peak allocated, MiB", 1, absent=NO_GPU, better="low"),
        Column("gpu_reserved_mib", "GPU peak reserved, MiB", 1, absent=NO_GPU, better="low"),
        Column("host_peak_mib", "CPU peak RSS, MiB", 0, better="low"),
        Column("auc", "test AUC", 4, better="high"),
    )
    rows = []
    for ranks in zip(*gather([_figures(run) for run in runs]), strict=True):
        figures = dict(ranks[0])
        figures["steps_per_second"] = min(rank["steps_per_second"] for rank in ranks)
        for key in ("gpu_allocated_mib", "gpu_reserved_mib", "host_peak_mib"):
            measured = [rank[key] for rank in ranks if rank[key] is not None]
            figures[key] = max(measured) if measured else None
        rows.append(Row(str(figures.pop("way")), figures))
    return Table("way", columns, tuple(rows))


def report(table: "Table", settings: Mapping[str, Any], out: Path) -> None:
    """Print the table and what it means; write `demo.json` and `demo.png` into `out`."""
    from torchrec_prealloc.bench.machine import describe_machine
    from torchrec_prealloc.bench.plot import PlotUnavailable, write_plot
    from torchrec_prealloc.demo.ways import PREALLOCATED

    machine = describe_machine()
    where = "GPU" if settings["device"] == "cuda" else "CPU"
    print(
        f"\nMovieLens-100K, DLRM, {settings['pipeline']['_target_'].rpartition('.')[2]} and TorchRec's own, on a {where}"
    )
    print(f"\n{table.text()}\n")
    print(f"Losses of all {settings['steps']} steps are equal bit for bit in the three ways.")
    if where == "CPU":
        print("On a CPU nothing has to be copied: copies and allocations are those that a device would see,")
        print("speed and memory are shown to be complete. On a GPU they are what to look at.")
    print(machine.line())
    table.write_json(out / "demo.json", machine, settings)
    written = [out / "demo.json"]
    try:
        write_plot(table, out / "demo.png", "Three ways to the device", PREALLOCATED, machine.line())
        written.append(out / "demo.png")
    except PlotUnavailable as error:
        print(error)
    print("Written:", ", ".join(map(str, written)))


def _figures(run: "Run") -> dict[str, Any]:
    def mib(size: int | None) -> float | None:
        return None if size is None else size / MIB

    return {
        "way": run.way,
        "steps_per_second": run.steps_per_second,
        "copies": run.copies,
        "allocations": run.allocations,
        "gpu_allocated_mib": mib(run.peaks.gpu_allocated),
        "gpu_reserved_mib": mib(run.peaks.gpu_reserved),
        "host_peak_mib": mib(run.peaks.host),
        "auc": run.auc,
    }


def _silence_third_parties() -> None:
    """Hide what TorchRec logs and warns about: advice to its developers, which a reader of the demo cannot follow."""
    for name in ("torchrec", "torch.fx._symbolic_trace", "root"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value
