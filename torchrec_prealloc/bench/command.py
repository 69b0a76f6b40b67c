"""`torchrec-prealloc bench [NAME...]`: run benchmarks, print and draw their tables, hold them to their targets."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrec_prealloc.errors import CommandError

if TYPE_CHECKING:
    from torchrec_prealloc.bench.table import Table

NAME = "bench"
SUMMARY = "run benchmarks and hold them to their targets"

BENCHMARKS = {
    "modes": "torchrec_prealloc.bench.modes",
    "pipelines": "torchrec_prealloc.bench.pipelines",
    "transfer": "torchrec_prealloc.bench.transfer",
    "threshold": "torchrec_prealloc.bench.threshold",
    "trees": "torchrec_prealloc.bench.trees",
    "codec": "torchrec_prealloc.bench.codec",
    "loader": "torchrec_prealloc.bench.loader",
    "checkpoint": "torchrec_prealloc.bench.checkpoint",
}
"""Each module has `SUMMARY`, `COLUMNS`, `run(full)`, which gives its rows one after the other, and `missed(rows)`,
which says which targets they miss. Among its columns are `baseline`, what a row is compared with, and `on`, where it
was measured (GPU, CPU or simulator). `PICTURE`, if there, has the keys of the columns that are drawn; by default those
of which more or less is better."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"{', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--check", action="store_true", help="fail, and name them, where targets are missed")
    parser.add_argument("--full", action="store_true", help="longer, and with larger batches")
    parser.add_argument("--out", metavar="DIR", type=Path, help="write each table there: JSON, Markdown, PNG")


def run(args: argparse.Namespace) -> None:
    """Run the benchmarks.

    Raises:
        CommandError: a name is unknown, or with `--check` a target is missed.
    """
    unknown = [name for name in args.names if name not in BENCHMARKS]
    if unknown:
        raise CommandError(f"no benchmark {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}")
    said = []
    for name in args.names or BENCHMARKS:
        said += [f"{name}: {one}" for one in _run_one(name, args.full, args.out)]
    for one in said:
        print(f"missed: {one}")
    if said and args.check:
        raise CommandError(f"{len(said)} targets missed")


def _run_one(name: str, full: bool, out: Path | None) -> list[str]:
    import torch
    from tqdm import tqdm

    from torchrec_prealloc.bench.machine import describe_machine
    from torchrec_prealloc.bench.table import Table

    module: Any = importlib.import_module(BENCHMARKS[name])
    started, threads = time.monotonic(), torch.get_num_threads()
    rows = tuple(tqdm(module.run(full), desc=name, unit="row", leave=False))
    torch.set_num_threads(threads)  # some compare the time of one thread; the next one has those that there were
    table, machine = Table(name, module.COLUMNS, rows), describe_machine()
    print(f"\n{name}: {module.SUMMARY}\n\n{table.text()}\n")
    print(f"Machine: {machine.line()}; {time.monotonic() - started:.0f} s\n")
    if out is not None:
        table.write_json(out / f"{name}.json", machine, {"full": full})
        (out / f"{name}.md").write_text(table.markdown() + "\n", encoding="utf-8")
        _draw(module, table, out / f"{name}.png", machine.line())
    return list(module.missed(rows))


def _draw(module: Any, table: Table, path: Path, machine: str) -> None:
    """Draw a table where it can be drawn; where not, one line says so, and the benchmark counts all the same."""
    from torchrec_prealloc.bench.plot import PlotUnavailable, write_plot
    from torchrec_prealloc.bench.table import Row

    keys = getattr(module, "PICTURE", None) or [column.key for column in table.columns if column.better]
    # A row that says why it was not run has nothing to draw.
    rows = [row for row in table.rows if any(row.figures.get(key) is not None for key in keys)]
    drawn = dataclasses.replace(
        table,
        columns=tuple(column for column in table.columns if column.key in keys),
        rows=tuple(Row(row.name, {key: row.figures.get(key) for key in keys}) for row in rows),
    )
    places = sorted({str(row.figures["on"]) for row in rows if row.figures.get("on")})
    footnote = f"measured on: {', '.join(places)}; {machine}" if places else machine
    try:
        write_plot(drawn, path, f"{table.subject}: {module.SUMMARY}", _is_ours, footnote)
    except PlotUnavailable as error:
        print(error)
    except ValueError as error:
        print(f"{path.name}: {error}")


def _is_ours(name: str) -> bool:
    return "ours" in name or "preallocated" in name
