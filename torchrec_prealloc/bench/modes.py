"""What copies hold of a device's memory, in the three ways of the original report.

First the report's own case: one tensor of 16 MiB, copied while the main stream works with tensors of that size. Then
TorchRec's two usual pipelines with a blocking copy, as they are, and in our version; batch sizes wobble, and the host
is one step ahead of the device. Shown are the peaks, and what side streams hold, which the main stream cannot use.

Without a GPU the device is simulated, and its caching allocator has PyTorch's rules. Nothing here is a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from torchrec_prealloc.bench.table import Column, Row
from torchrec_prealloc.estimation.estimate import run_way, simulated_device
from torchrec_prealloc.estimation.footprint import COLUMNS as FIGURES
from torchrec_prealloc.estimation.footprint import MIB, Footprint, footprint
from torchrec_prealloc.estimation.stand_in import stand_in
from torchrec_prealloc.one_batch import to_device
from torchrec_prealloc.ways import BLOCKING, NON_BLOCKING, OURS, PREALLOCATED, Way, three_ways

SUMMARY = "peak memory of the three ways to copy: one tensor, and two pipelines"

COLUMNS = (*FIGURES, Column("baseline", "baseline"))

BATCH_MIB = 32
"""Of the largest batch."""

COARSE = "size_rounding 1"
"""With powers of two for sizes, batches that wobble fit each other's memory, at up to twice the bytes for each."""
ONE_TENSOR = "one tensor"
SIDE = 2048
"""Rows and columns of the one tensor, float32: 16 MiB, as in the original report."""
BEFORE = 8
"""Such tensors that the main stream works with before the copy, so that a blocking copy reserves what it did there,
0.13 GB; the other two figures there were 0.15 and 0.13 GB."""

__all__ = ["COLUMNS", "SUMMARY", "missed", "run"]


def missed(rows: Iterable[Row]) -> list[str]:
    """Ours holds nothing on side streams, and no more in all than the blocking copy and one batch. For the one tensor
    the report's figures: nothing more than the blocking copy, which a non-blocking one exceeds by the tensor."""
    by_name = {row.name: row.figures for row in rows}
    said = []
    for name, figures in by_name.items():
        what, _, way = name.partition(": ")
        reserved, blocking = (float(by_name[key]["reserved"] or 0) for key in (name, f"{what}: {BLOCKING}"))
        if way == PREALLOCATED:
            if figures["side"]:
                said.append(f"{name}: side streams hold {figures['side']} MiB")
            if reserved > blocking + (BATCH_MIB if what != ONE_TENSOR else 0):
                said.append(f"{name}: {reserved} MiB are too many over {BLOCKING}'s {blocking}")
        if what == ONE_TENSOR and way == NON_BLOCKING and reserved != blocking + SIDE * SIDE * 4 / MIB:
            said.append(f"{name}: {reserved} MiB are not one tensor over {BLOCKING}'s {blocking}")
    return said


def run(full: bool = False) -> Iterator[Row]:
    """One row for each case and way, on a GPU where there is one, otherwise on the simulator.

    Args:
        full: 100 steps instead of 30.

    Raises:
        CommandError: there is no GPU, and the simulator cannot be built.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else simulated_device()
    steps = 100 if full else 30
    for way in _COPIES:
        yield _row(_one_tensor(way, device), f"{ONE_TENSOR}: {way}", SIDE * SIDE * 4)
    for target in OURS.values():
        pipeline = target.rpartition(".")[2].removeprefix("Prealloc")
        for how in three_ways({"_target_": target}):
            yield _pipeline_row(f"{pipeline}: {how.name}", how, device, steps)
        coarse = three_ways({"_target_": target, "prealloc": {"size_rounding": 1}})[-1]
        yield _pipeline_row(f"{pipeline}: {PREALLOCATED}, {COARSE}", coarse, device, steps)


def _pipeline_row(name: str, how: Way, device: torch.device, steps: int) -> Row:
    strict = how.name == PREALLOCATED
    return _row(run_way(how, stand_in, _batches(steps), device, steps, strict=strict), name, BATCH_MIB * MIB)


def _row(found: Footprint, name: str, batch_bytes: int) -> Row:
    row = found.row(name, batch_bytes)
    return Row(row.name, {**row.figures, "baseline": BLOCKING})


def _batches(steps: int) -> Iterator[Batch]:
    """Pinned batches of floats, of three quarters to all of `BATCH_MIB`."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = int(torch.randint(BATCH_MIB * 3 // 4, BATCH_MIB + 1, (), generator=generator)) * MIB // 4 // 64
        sparse = KeyedJaggedTensor(["f"], torch.zeros(8, dtype=torch.int64), lengths=torch.ones(8, dtype=torch.int64))
        yield Batch(torch.zeros(rows, 64), sparse, torch.zeros(8)).pin_memory()


def _one_tensor(way: str, device: torch.device) -> Footprint:
    host = torch.zeros(SIDE, SIDE).pin_memory()
    side = torch.get_device_module(device).Stream()

    def step() -> None:
        _work(BEFORE, host, device)
        moved = _COPIES[way](host, device, side)
        # The batch takes the place of one of them.
        _work(BEFORE - 1, host, device)
        moved.add_(1)

    return footprint(step, device, steps=5, ahead=False, strict=True)


def _work(count: int, like: Tensor, device: torch.device) -> None:
    """The main stream writes `count` tensors, all there at the same time."""
    for tensor in [torch.empty_like(like, device=device) for _ in range(count)]:
        tensor.zero_()


def _blocking(host: Tensor, device: torch.device, side: Any) -> Tensor:
    return host.to(device)


def _non_blocking(host: Tensor, device: torch.device, side: Any) -> Tensor:
    module = torch.get_device_module(device)
    with module.stream(side):
        moved = host.to(device, non_blocking=True)
    module.current_stream().wait_stream(side)
    moved.record_stream(module.current_stream())
    return moved


def _preallocated(host: Tensor, device: torch.device, side: Any) -> Tensor:
    moved: Tensor = to_device(host, device, side).wait()
    return moved


_COPIES: dict[str, Callable[[Tensor, torch.device, Any], Tensor]] = {
    BLOCKING: _blocking,
    NON_BLOCKING: _non_blocking,
    PREALLOCATED: _preallocated,
}
