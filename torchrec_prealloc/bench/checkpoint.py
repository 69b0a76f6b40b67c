"""How long a checkpoint stops the training: chunked staging, torch's two stagers, and ours, in turns in one process.

The state is DLRM-like: tables of mixed sizes and 2,000 small tensors. *Stopped* is the time until the state may be
changed again. *Staged* is the time until the copy is complete. The step that follows is a matrix product of fixed size,
measured alone and right behind a save, while whatever the way leaves to the background is still running. Peaks of
memory are those of a child process for each way, over three saves.

`chunked` is what large arrays go through where a fixed buffer is pinned: 128 MiB at a time from the device into the
buffer and from there to their place. `BlockingAsyncStager` is torch's with its defaults, `DefaultStager` torch's with
those that `async_save` gives it (its own defaults need an accelerator, as does the blocking one's cache on the host);
`DefaultStager, thread` copies in the background, and the state may not be changed until it is through. Torch 2.11's
serves one save only, so there each save has a new one.

On a CPU all copies are the host's; bandwidth of a link, and its overlap with the training, is not measured here.

>>> table = Table("stager", COLUMNS, tuple(run(full=False)))  # doctest: +SKIP
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from torchrec_prealloc.bench.machine import measured_on
from torchrec_prealloc.bench.table import Column, Figure, Row
from torchrec_prealloc.checkpoint import PinnedStager
from torchrec_prealloc.demo.measure import watch_memory

NAME = "checkpoint"
SUMMARY = "compare how long ways of staging a checkpoint stop the training"

MIB = 1 << 20
QUICK_BYTES, FULL_BYTES = 256 * MIB, 1024 * MIB
TABLES, SMALL = 8, 2000
CHUNK_BYTES = 128 * MIB
OURS = "ours"

COLUMNS = (
    Column("first", "first save: stopped, ms", digits=1, better="low"),
    Column("later", "later saves: stopped, ms", digits=1, better="low"),
    Column("later_min", "least", digits=1),
    Column("later_max", "most", digits=1),
    Column("staged", "later: staged, ms", digits=1, better="low"),
    Column("against_best", "stopped / best of torch's and chunked", digits=2, better="low"),
    Column("first_against_best", "first / best of theirs", digits=2, better="low"),
    Column("step", "next step / alone", digits=2, better="low"),
    Column("peak", "peak RSS, MiB", absent="not measured", better="low"),
    Column("copies", f"copies a save of {SMALL + TABLES} tensors", better="low"),
    Column("baseline", "baseline"),
    Column("on", "measured on"),
)
PICTURE = ("first", "later", "step", "peak")


@dataclasses.dataclass(frozen=True)
class Targets:
    """What the last way's figures are held to."""

    later: float = 0.9
    """Of the shortest stop of the others, second and later saves."""
    first: float = 1.05
    peak_mib: float = 1.0
    """Above DefaultStager's; less is noise from one process to the next."""

    def missed(self, rows: Iterable[Row]) -> list[str]:
        """What the rows do not hold to, in words."""
        by_name = {row.name: row.figures for row in rows}
        ours, default = by_name[OURS], by_name["DefaultStager"]
        said = []
        for key, what, most in (
            ("against_best", "later saves", self.later),
            ("first_against_best", "the first save", self.first),
        ):
            if float(ours[key] or 0) > most:
                said.append(f"{what}: stopped {float(ours[key] or 0):.2f} of the best other way's time, not {most}")
        if default.get("peak") and _peak_of(ours) > _peak_of(default) + self.peak_mib:
            said.append(f"peak RSS {_peak_of(ours):.0f} MiB, above DefaultStager's {_peak_of(default):.0f}")
        return said


def _peak_of(figures: Mapping[str, Figure | None]) -> float:
    return float(figures.get("peak") or 0)


TARGETS = Targets()
missed = TARGETS.missed


def a_state(nbytes: int, device: torch.device) -> dict[str, Tensor]:
    """`nbytes` in tables, each half as large as the one before, and `SMALL` tensors of up to 2 KiB."""
    state = {}
    rest = nbytes // 512
    for number in range(TABLES):
        rows = rest // 2 if number < TABLES - 1 else rest
        state[f"tables.{number}.weight"] = torch.rand(rows, 128, device=device)
        rest -= rows
    for number in range(SMALL):
        state[f"dense.{number}"] = torch.rand(number % 16 + 1, 32, device=device)
    return state


class Chunked:
    """Staging through one buffer of a fixed size."""

    def __init__(self, device: torch.device) -> None:
        self.copies = 0
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=device.type != "cpu")

    def stage(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy each tensor, a piece of the buffer's size at a time."""
        return {name: self._copy(tensor) for name, tensor in state.items()}

    def _copy(self, tensor: Tensor) -> Tensor:
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        sources, targets = (one.view(-1).view(torch.uint8).split(CHUNK_BYTES) for one in (tensor, result))
        for source, target in zip(sources, targets, strict=True):
            piece = self._buffer[: source.numel()]
            piece.copy_(source)
            target.copy_(piece)
            self.copies += 2
        return result

    def close(self) -> None:
        """As stagers have it."""


class NewEachTime:
    """A stager that makes another one for each save."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def stage(self, state: dict[str, Tensor]) -> Any:
        """As the new one does."""
        self.close()
        self._stager = self._make()
        return self._stager.stage(state)

    def close(self) -> None:
        """Close the last one."""
        stager = vars(self).pop("_stager", None)
        if stager is not None:
            stager.close()


def _default(in_background: bool) -> Callable[[], Any]:
    """A maker of torch's `DefaultStager`, as `async_save` makes it."""

    def make() -> DefaultStager:
        return DefaultStager(StagingOptions(False, False, in_background, False))

    return make if _serves_again(make()) else lambda: NewEachTime(make)


def _serves_again(stager: DefaultStager) -> bool:
    """Whether a stager can be used twice: torch 2.11's is closed by its first save."""
    try:
        for _ in range(2):
            staged = stager.stage({"a": torch.zeros(1)})
            if isinstance(staged, concurrent.futures.Future):
                staged.result()
    except KeyError:
        return False
    finally:
        stager.close()
    return True


def ways(device: torch.device) -> dict[str, Callable[[], Any]]:
    """A maker of a stager for each row."""
    return {
        "chunked": lambda: Chunked(device),
        "BlockingAsyncStager": BlockingAsyncStager,
        "DefaultStager": _default(in_background=False),
        "DefaultStager, thread": _default(in_background=True),
        OURS: PinnedStager,
    }


def run(full: bool = False) -> list[Row]:
    """One row for each way.

    Args:
        full: a state of 1 GiB instead of 256 MiB, and more rounds.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nbytes, firsts, laters = (FULL_BYTES, 5, 11) if full else (QUICK_BYTES, 5, 11)
    state = a_state(nbytes, device)
    seen: dict[str, _Seen] = {name: _Seen() for name in ways(device)}
    work = torch.rand(768, 768, device=device)
    makers = list(ways(device).items())
    for turn in range(firsts):
        for name, make in makers[turn:] + makers[:turn]:
            with watch_memory(device):  # gives back what the way before has left in the C library's heap
                stager = make()
                seen[name].first.append(_save(stager, state, device)[0])
                stager.close()
    stagers = {name: make() for name, make in ways(device).items()}
    for name, stager in stagers.items():
        _save(stager, state, device)
        seen[name].copies = _copies(stager)
    for _ in range(laters):
        for name, stager in stagers.items():
            stopped, staged = _save(stager, state, device)
            seen[name].later.append(stopped)
            seen[name].staged.append(staged)
            alone = _step(work, device)
            seen[name].step.append(_step_beside(stager, state, work, device) / alone)
    for stager in stagers.values():
        stager.close()
    del state, stagers
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name, peak in zip(seen, pool.map(lambda name: _peak_in_child(name, nbytes), seen), strict=True):
            seen[name].peak = peak
    return list(_rows(seen, measured_on(device)))


@dataclasses.dataclass
class _Seen:
    first: list[float] = dataclasses.field(default_factory=list)
    later: list[float] = dataclasses.field(default_factory=list)
    staged: list[float] = dataclasses.field(default_factory=list)
    step: list[float] = dataclasses.field(default_factory=list)
    copies: int = 0
    peak: int | None = None


def _rows(seen: dict[str, _Seen], on: str) -> Iterator[Row]:
    others = [of for name, of in seen.items() if name != OURS]
    best_later = min(statistics.median(of.later) for of in others)
    best_first = min(statistics.median(of.first) for of in others)
    for name, of in seen.items():
        first, later = statistics.median(of.first), statistics.median(of.later)
        yield Row(
            name,
            {
                "first": first * 1e3,
                "later": later * 1e3,
                "later_min": min(of.later) * 1e3,
                "later_max": max(of.later) * 1e3,
                "staged": statistics.median(of.staged) * 1e3,
                "against_best": later / best_later,
                "first_against_best": first / best_first,
                "step": statistics.median(of.step),
                "peak": of.peak / MIB if of.peak is not None else None,
                "copies": of.copies,
                "baseline": "best of the others",
                "on": on,
            },
        )


def _save(stager: Any, state: Any, device: torch.device) -> tuple[float, float]:
    """Seconds until the state may be changed, and until it is staged."""
    _synchronize(device)
    start = time.perf_counter()
    staged = stager.stage(state)
    stopped = time.perf_counter() - start
    if not isinstance(staged, concurrent.futures.Future):
        return stopped, stopped
    staged.result()
    whole = time.perf_counter() - start
    # Ours orders the device's stream behind the copies before it returns; torch's thread has to be waited for.
    return (stopped if isinstance(stager, PinnedStager) else whole), whole


def _step_beside(stager: Any, state: Any, work: Tensor, device: torch.device) -> float:
    """Seconds of the step right behind a save."""
    staged = stager.stage(state)
    step = _step(work, device)
    if isinstance(staged, concurrent.futures.Future):
        staged.result()
    return step


def _step(work: Tensor, device: torch.device) -> float:
    start = time.perf_counter()
    torch.mm(work, work)
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def _copies(stager: Any) -> int:
    if isinstance(stager, Chunked):
        return stager.copies
    return stager.transfers if isinstance(stager, PinnedStager) else TABLES + SMALL


def _peak_in_child(name: str, nbytes: int) -> int | None:
    """Most resident memory of a process that saves three times."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak, name, nbytes).result()


def _peak(name: str, nbytes: int) -> int | None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    state = a_state(nbytes, device)
    with watch_memory(device) as peaks:
        stager = ways(device)[name]()
        for _ in range(3):
            _save(stager, state, device)
        stager.close()
    return peaks.host
