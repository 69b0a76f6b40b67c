"""`torchrec-prealloc headroom SNAPSHOT`: where a job's device memory is, and what preallocation would give back."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrec_prealloc.errors import CommandError

if TYPE_CHECKING:
    from torchrec_prealloc.headroom.analysis import Headroom
    from torchrec_prealloc.headroom.estimate import Move, Replay

NAME = "headroom"
SUMMARY = "say from a memory snapshot where memory is, and what preallocation would give back"

_SUFFIXES = (".pickle", ".pkl", ".pickle.gz", ".pkl.gz")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument(
        "snapshot",
        metavar="SNAPSHOT",
        type=Path,
        help="a file of torch.cuda.memory._dump_snapshot (.pickle, .pickle.gz), or a folder with one for each rank",
    )
    parser.add_argument("--main-stream", metavar="N", type=int, help="the stream that computes; 0 by default")
    parser.add_argument("--no-replay", action="store_true", help="do not run the history again for the estimate")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw it as a PNG; of a folder, the worst rank")
    parser.add_argument("--out", metavar="DIR", type=Path, help="write headroom.json there, and a PNG for each rank")


def run(args: argparse.Namespace) -> None:
    """Print the report; of a folder the table of its ranks and the report on the worst.

    Raises:
        CommandError: there is no such file; it is no whole snapshot, or is hostile; there is no matplotlib.
    """
    replay, remark = (None, "") if args.no_replay else _replay()
    if args.snapshot.is_dir():
        found, written = _folder(args, replay)
    else:
        found = _analyse(args.snapshot, args, replay)
        written = [_write_out(one, args.out) for one in found]
    from torchrec_prealloc.headroom import report

    for one in found:
        print(report.text(one))
        print()
    if remark and any(one.estimate.copies_alive and one.has_history for one in found):
        print(f"Nothing was run again: {remark}")
    if args.plot is not None:
        _draw(max(found, key=lambda one: one.estimate.now), args.plot)
        print(f"Written: {args.plot}")
    if args.out is not None:
        path = args.out / "headroom.json"
        path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        print(f"Written: {path}, and beside it {', '.join(one['picture'] for one in written)}")


def _replay() -> tuple[Replay | None, str]:
    """How a history is run again, or why it cannot be."""
    from torchrec_prealloc.headroom import replay

    if reason := replay.unavailable():
        return None, reason
    from tqdm import tqdm

    def with_progress(moves: Iterable[Move], size_rounding: int | None) -> int | None:
        return replay.reserved(tqdm(moves, desc="replay", unit="", leave=False, delay=1), size_rounding)

    return with_progress, ""


def _analyse(path: Path, args: argparse.Namespace, replay: Replay | None) -> list[Headroom]:
    from tqdm import tqdm

    from torchrec_prealloc.headroom.analysis import analyse

    size = path.stat().st_size if path.is_file() else 0
    with tqdm(total=size, desc=path.name, unit="B", unit_scale=True, leave=False, delay=1) as bar:
        return analyse(path, args.main_stream, replay, bar.update)


def _folder(args: argparse.Namespace, replay: Replay | None) -> tuple[list[Headroom], list[dict[str, Any]]]:
    """Print a row for each rank. The worst rank's results, and what is to be written of all."""
    from torchrec_prealloc.bench.table import Row
    from torchrec_prealloc.headroom import report

    paths = sorted((path for path in args.snapshot.iterdir() if path.name.endswith(_SUFFIXES)), key=_by_number)
    if not paths:
        raise CommandError(f"{args.snapshot} has no snapshot in it: no file that ends in {', '.join(_SUFFIXES)}")
    rows, written, worst, reserved, failures = [], [], None, -1, 0
    for path in paths:
        try:
            found = _analyse(path, args, replay)
        except CommandError as error:
            failures += 1
            rows.append(Row(path.name, {"failed": str(error).removeprefix(f"{path} ")}))
            continue
        rows += [report.rank_row(one) for one in found]
        written += [_write_out(one, args.out) for one in found]
        most = max(one.estimate.now for one in found)
        if most > reserved:
            worst, reserved = path, most
    print(report.ranks_table(rows).text())
    print()
    if worst is None:
        raise CommandError(f"none of the {len(paths)} files in {args.snapshot} is a snapshot")
    if failures:
        print(f"{failures} of {len(paths)} files could not be read.")
    if len(paths) > 1:
        print(f"The rank that reserves most is {worst.name}.\n")
    # Only one snapshot at a time is kept; the worst is read again.
    return _analyse(worst, args, replay), written


def _by_number(path: Path) -> list[tuple[int, str]]:
    """rank2 before rank10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _write_out(found: Headroom, folder: Path | None) -> dict[str, Any]:
    """All figures; with a folder also the picture there."""
    from torchrec_prealloc.headroom import report

    figures = report.as_json(found)
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"{folder} cannot be made: {error.strerror}") from None
        figures["picture"] = f"{found.name.replace(', device ', '-device')}.png"
        _draw(found, folder / figures["picture"])
    return figures


def _draw(found: Headroom, path: Path) -> None:
    from torchrec_prealloc.bench.plot import PlotUnavailable
    from torchrec_prealloc.headroom.plot import write_plot

    try:
        write_plot(found, path)
    except PlotUnavailable as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror or error}") from None
