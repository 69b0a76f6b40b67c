"""Batches a second through a DataLoader's workers, packed and not, and the descriptors that they need.

Both ways run in turns, with workers of their own that are started once; the main process only takes the batches. The
batches are made beforehand, in ordinary memory, and passed on by the workers again and again: what is measured is the
way between processes. The ratio is that of each way's best round: what else runs on a machine slows rounds down, and
never speeds one up. Open descriptors are counted in the main process while it holds the batches that are on their
way, as a pipeline does.

With `full`, tensors that already are in shared memory, too: by size, as they are packed, and if all of them were copied
(`packing.SHARED_BYTES` is chosen from these rows).

What comes after, the main thread's time to send a packed batch on, is in `bench transfer`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torchrec import KeyedJaggedTensor
from torchrec.distributed.test_utils.model_input import ModelInput

from torchrec_prealloc import packing
from torchrec_prealloc.bench.machine import CPU
from torchrec_prealloc.bench.table import Column, Row
from torchrec_prealloc.loader import pack

NAME = "loader"
SUMMARY = "Batches a second through DataLoader workers, packed and not, and open descriptors."

HELD = 3
"""Batches that a pipeline holds at once."""
ROUNDS, FULL_ROUNDS = 5, 20
SECONDS = 0.2
"""That each way runs in each round, at least."""
MIN_BATCHES, MAX_BATCHES = 6, 40
"""In one round."""

COLUMNS = (
    Column("plain", "batches/s plain", digits=1),
    Column("packed", "batches/s packed", digits=1),
    Column("ratio", "packed / plain", digits=2, better="high"),
    Column("ratio_min", "packed / plain min", digits=2),
    Column("ratio_max", "packed / plain max", digits=2),
    Column("plain_files", "descriptors a batch, plain", digits=1, better="low"),
    Column("packed_files", "descriptors a batch, packed", digits=1, better="low"),
    Column("baseline", "baseline"),
    Column("on", "measured on"),
)
PICTURE = ("ratio",)

STRESS, MANY, LARGE, JAGGED = "600 × 16 floats + 2 KJTs", "100 × 400 KB", "5 × 20 MB", "one KJT of 64 MB"
SHARED, IF_COPIED = "in shared memory", "if copied"
SHARED_SIZES = (16 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 4 << 20)
SHARED_COUNT, SHARED_SETS = 8, 6


@dataclasses.dataclass(frozen=True)
class Targets:
    """What the figures are held to."""

    stress: float = 20.0
    many: float = 1.2
    others: float = 0.95
    shared: float = 0.85
    """Nothing is copied, packed or not: the little that packing itself costs shows."""
    descriptors: float = 2.0

    def missed(self, rows: Iterable[Row]) -> list[str]:
        """What the rows do not hold to, in words."""
        said = []
        for row in rows:
            ratio = float(row.figures["ratio"] or 0)
            if row.name.endswith(IF_COPIED):
                continue
            wanted = {STRESS: self.stress, MANY: self.many}.get(row.name.partition(", ")[0], self.others)
            wanted = self.shared if SHARED in row.name else wanted
            if ratio < wanted:
                said.append(f"{row.name}: {ratio:.2f} times as fast, not {wanted}")
            files = float(row.figures["packed_files"] or 0)
            if files > self.descriptors and SHARED not in row.name:
                said.append(f"{row.name}: {files:.1f} descriptors a batch, over {self.descriptors}")
        return said


TARGETS = Targets()
missed = TARGETS.missed


def _stress() -> ModelInput:
    return ModelInput(
        float_features=torch.randn(32, 8),
        idlist_features=_kjt(1 << 6),
        idscore_features=_kjt(1 << 6),
        label=torch.rand(32),
        dummy=[torch.randn(16) for _ in range(600)],
    )


def _kjt(values: int) -> KeyedJaggedTensor:
    lengths = torch.full((4 * 16,), values // 64)
    return KeyedJaggedTensor([f"f{i}" for i in range(4)], torch.arange(values), lengths=lengths)


BATCHES: dict[str, Callable[[], Any]] = {
    STRESS: _stress,
    MANY: lambda: [torch.ones(100_000) for _ in range(100)],
    LARGE: lambda: [torch.ones(5_000_000) for _ in range(5)],
    JAGGED: lambda: _kjt(8 << 20),
}


class _Again(IterableDataset[Any]):
    """The same batch without end. Its tensors are ordinary memory: what the queue has shared is another one's."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        batch = self._make()
        while True:
            yield batch


def _copied(batch: Any) -> Any:
    """New tensors: sharing a tensor moves it to shared memory for good, and a dataset's are new in each batch."""
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, list):
        return [_copied(item) for item in batch]
    if isinstance(batch, KeyedJaggedTensor):
        return KeyedJaggedTensor(batch.keys(), batch.values().clone(), lengths=batch.lengths().clone())
    new = object.__new__(type(batch))
    vars(new).update({name: _copied(value) if value is not None else None for name, value in vars(batch).items()})
    return new


def _copied_and_packed(batch: Any) -> Any:
    return pack(_copied(batch))


class _SharedSets(IterableDataset[Any]):
    """Batches of tensors in shared memory without end, a few in turn."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __iter__(self) -> Iterator[Any]:
        sets = [
            [torch.ones(self._nbytes // 4).share_memory_() for _ in range(SHARED_COUNT)] for _ in range(SHARED_SETS)
        ]
        yield from itertools.cycle(sets)


def _as_it_is(batch: Any) -> Any:
    return batch


def _all_copied(batch: Any) -> Any:
    packing.SHARED_BYTES = sys.maxsize  # in the worker, which does nothing else
    return pack(batch)


def run(full: bool = False) -> list[Row]:
    """One row for each batch and number of workers; with `full` also for tensors that are in shared memory already."""
    rounds = FULL_ROUNDS if full else ROUNDS
    rows = []
    for workers in (1, 2):
        name = f"{workers} worker{'s' * (workers > 1)}"
        for batch, make in BATCHES.items():
            collates = {"plain": _copied, "packed": _copied_and_packed}
            rows.append(_row(f"{batch}, {name}", functools.partial(_Again, make), collates, workers, rounds))
    return [*rows, *(_shared_rows(rounds) if full else ())]


def _shared_rows(rounds: int) -> Iterator[Row]:
    for nbytes in SHARED_SIZES:
        for suffix, collate in (("", pack), (f", {IF_COPIED}", _all_copied)):
            name = f"{SHARED_COUNT} × {nbytes >> 10} KB {SHARED}, 1 worker{suffix}"
            collates = {"plain": _as_it_is, "packed": collate}
            yield _row(name, functools.partial(_SharedSets, nbytes), collates, 1, rounds)


def _row(
    name: str,
    dataset: Callable[[], IterableDataset[Any]],
    collates: Mapping[str, Callable[[Any], Any]],
    workers: int,
    rounds: int,
) -> Row:
    ways = {
        key: iter(DataLoader(dataset(), batch_size=None, collate_fn=collate, num_workers=workers))
        for key, collate in collates.items()
    }
    speeds: dict[str, list[float]] = {key: [] for key in ways}
    files: dict[str, float] = {}
    for key, loader in ways.items():
        files[key] = _descriptors(loader)
    for number in range(rounds):
        for key in sorted(ways, reverse=number % 2 == 0):  # each is the first in every other round
            speeds[key].append(_speed(ways[key], 2 * workers + 1))
    ratios = [packed / plain for packed, plain in zip(speeds["packed"], speeds["plain"], strict=True)]
    return Row(
        name,
        {
            **{key: statistics.median(values) for key, values in speeds.items()},
            **{f"{key}_files": count for key, count in files.items()},
            "ratio": max(speeds["packed"]) / max(speeds["plain"]),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "baseline": "the same batch, plain",
            "on": CPU,
        },
    )


def _speed(loader: Iterator[Any], ahead: int) -> float:
    for _ in range(ahead):  # made while the other way ran
        next(loader)
    start, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - start) < SECONDS or count < MIN_BATCHES:
        if count == MAX_BATCHES:
            break
        next(loader)
        count += 1
    return count / seconds


def _descriptors(loader: Iterator[Any]) -> float:
    """Descriptors that each held batch keeps open."""
    next(loader)
    before = _open_files()
    held = deque(next(loader) for _ in range(HELD))
    return max(0, _open_files() - before) / len(held)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
