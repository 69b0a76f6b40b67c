"""From which size on a tensor should travel by itself (`direct_bytes`).

Gathering a tensor costs the main thread a copy in host memory, and the larger it is the more. Travelling by itself
costs an allocation, a view and a copy more on the device, whatever its size, for the device reads it where it is. From
the size on where the first is more than the second, tensors should travel by themselves.

On a device without streams (the CPU) a copy takes the main thread's time too, so there the price of travelling by
itself is measured with tensors of a few bytes; what a driver takes for each copy is not in it.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from torchrec_prealloc.bench.table import Column, Row
from torchrec_prealloc.config import PreallocConfig
from torchrec_prealloc.transfer import TransferEngine

SUMMARY = "the size from which a tensor should travel by itself"

KIB = 1 << 10
SIZES = tuple(KIB << power for power in range(3, 12))
"""8 KiB to 2 MiB."""
COUNT = 32
"""Tensors of a batch."""
POOL_BYTES = 256 << 20
"""Host tensors come from so much memory in turns, for a loader's batch is not in a cache."""

COLUMNS = (
    Column("gather", "gathered, µs a tensor", digits=1, better="low"),
    Column("alone", "by itself, µs a tensor", digits=1, better="low"),
    Column("ratio", "gathered / by itself", digits=2),
    Column("baseline", "baseline"),
    Column("on", "measured on"),
)


def missed(rows: Iterable[Row]) -> list[str]:
    """Tensors of the default's size are no cheaper to gather; those of a sixteenth of it are."""
    ratios = {row.name: float(row.figures["ratio"] or 0) for row in rows}
    default = PreallocConfig.direct_bytes
    said = []
    if ratios[_name(default)] < 1:
        said.append(f"direct_bytes {default}: tensors of that size are cheaper to gather: {ratios[_name(default)]:.2f}")
    if ratios[_name(default // 16)] > 1:
        said.append(f"direct_bytes {default}: tensors of a sixteenth of it are dearer to gather, and are gathered")
    return said


def run(full: bool = False) -> Iterator[Row]:
    """One row for each size.

    Args:
        full: more rounds.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    rounds = 200 if full else 40
    alone = _price_of_travelling_alone(device, rounds)
    pool = torch.zeros(POOL_BYTES, dtype=torch.uint8)
    for size in SIZES:
        gather = _price_of_gathering(pool, size, rounds)
        yield Row(
            _name(size),
            {
                "gather": gather * 1e6,
                "alone": alone * 1e6,
                "ratio": gather / alone,
                "baseline": "by itself",
                "on": "GPU" if device.type == "cuda" else "CPU",
            },
        )


def _name(nbytes: int) -> str:
    return f"{nbytes // KIB} KiB"


def _price_of_travelling_alone(device: torch.device, rounds: int) -> float:
    """Seconds more for each of some small tensors of different sizes, if it does not share an arena."""
    batch: list[Tensor] = [torch.zeros(16 + number) for number in range(COUNT)]
    if device.type == "cuda":
        batch = [tensor.pin_memory() for tensor in batch]
    engines = [TransferEngine(device, config=PreallocConfig(direct_bytes=limit)) for limit in (1, 1 << 40)]
    times: list[list[float]] = [[], []]
    gc.collect()
    gc.freeze()
    for _ in range(3 + rounds):
        for engine, seconds in zip(engines, times, strict=True):
            start = time.perf_counter()
            engine.start(batch).wait()
            seconds.append(time.perf_counter() - start)
            if device.type == "cuda":
                torch.cuda.synchronize()
    gc.unfreeze()
    by_itself, together = (statistics.median(seconds[3:]) for seconds in times)
    return (by_itself - together) / COUNT


def _price_of_gathering(pool: Tensor, size: int, rounds: int) -> float:
    """Seconds for the copy of one tensor's bytes into memory that is kept."""
    into = list(torch.zeros(COUNT * size, dtype=torch.uint8).split(size))
    places = itertools.cycle(range(0, POOL_BYTES - COUNT * size + 1, COUNT * size))
    seconds = []
    for _ in range(rounds):
        place = next(places)
        sources = list(pool[place : place + COUNT * size].split(size))
        start = time.perf_counter()
        torch._foreach_copy_(into, sources)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / COUNT

