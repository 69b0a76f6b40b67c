"""What a pipeline holds of a device's memory, in the three ways of the original report, on the simulator.

A small model is trained for some steps by TorchRec's pipeline with a blocking copy, by TorchRec's pipeline as it is,
and by ours. Batch sizes wobble, and the host is one step ahead of the device. Shown are the peaks of reserved memory:
all of it, and what the pipeline's copy stream holds, which no other stream can use. The caching allocator's rules are
PyTorch's, the device is simulated; nothing here is a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from torchrec_prealloc import simulator
from torchrec_prealloc.bench.table import Column, Row
from torchrec_prealloc.errors import CommandError

SUMMARY = "peak reserved memory of the three ways to copy (simulated)"

BLOCKING, NON_BLOCKING, OURS = "blocking_copy", "non_blocking_copy", "preallocated_non_blocking_copy"
MIB = 1 << 20
BATCH_MIB = 32
"""Of the largest batch."""

COLUMNS = (
    Column("allocated", "peak allocated, MiB", better="low"),
    Column("reserved", "peak reserved, MiB", better="low"),
    Column("copy_stream", "of it the copy stream, MiB", better="low"),
    Column("batches", "peak reserved, in batches", digits=2, better="low"),
    Column("on", "measured on"),
)


def missed(rows: Iterable[Row]) -> list[str]:
    """Ours holds nothing on the copy stream, and no more in all than the blocking copy and one batch."""
    by_name = {row.name: row.figures for row in rows}
    said = []
    for name, figures in by_name.items():
        pipeline, _, way = name.partition(": ")
        if way != OURS:
            continue
        if figures["copy_stream"]:
            said.append(f"{name}: the copy stream holds {figures['copy_stream']} MiB")
        blocking = by_name[f"{pipeline}: {BLOCKING}"]["reserved"]
        if float(figures["reserved"] or 0) > float(blocking or 0) + BATCH_MIB:
            said.append(f"{name}: {figures['reserved']} MiB are more than a batch over blocking_copy's {blocking}")
    return said


def run(full: bool = False) -> Iterator[Row]:
    """One row for each pipeline and way.

    Args:
        full: 100 steps instead of 30.

    Raises:
        CommandError: the simulator cannot be built.
    """
    usable, reason = simulator.available()
    if not usable:
        raise CommandError(f"the simulator is not to be had: {reason}")
    device = simulator.device()
    steps = 100 if full else 30
    for pipeline, make in (("TrainPipelineBase", _base), ("TrainPipelineSparseDist", _sparse_dist)):
        for way in (BLOCKING, NON_BLOCKING, OURS):
            simulator.empty_cache()
            simulator.reset_peak_stats()
            before = _reserved()
            copy_stream = _train(make(way, device), way, device, steps)
            stats = simulator.stats()
            total = stats.devices[0]
            copied = stats.streams.get((0, copy_stream))
            yield Row(
                f"{pipeline}: {way}",
                {
                    "allocated": total.peak_allocated / MIB,
                    "reserved": (total.peak_reserved - before) / MIB,
                    "copy_stream": copied.peak_reserved / MIB if copied is not None and copy_stream else 0,
                    "batches": (total.peak_reserved - before) / MIB / BATCH_MIB,
                    "on": "simulator",
                },
            )


def _reserved() -> int:
    device = simulator.stats().devices.get(0)
    return device.reserved if device is not None else 0


def _train(pipeline: Any, way: str, device: torch.device, steps: int) -> int:
    """Train, and return the number of the pipeline's copy stream."""
    batches = _batches(steps)
    iterator = _moved(batches, device) if way == BLOCKING else batches
    # Lazily, and waiting for the step before: the host is one step ahead, as it is of a busy GPU.
    with simulator.checked(schedule="lazy", raise_on_report=way == OURS):
        before = torch.get_device_module(device).Event()
        for _ in range(steps):
            done = torch.get_device_module(device).Event()
            pipeline.progress(iterator)
            done.record()
            before.synchronize()
            before = done
    return int(pipeline._memcpy_stream.stream_id)


def _moved(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Batches moved by a blocking copy on the main stream: TorchRec asks for them on its copy stream."""
    module = torch.get_device_module(device)
    for batch in batches:
        with module.stream(module.default_stream(device)):
            moved = batch.to(device)
        yield moved


def _batches(steps: int) -> Iterator[Batch]:
    """Pinned batches of floats, of three quarters to all of `BATCH_MIB`."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = int(torch.randint(BATCH_MIB * 3 // 4, BATCH_MIB + 1, (), generator=generator)) * MIB // 4 // 64
        sparse = KeyedJaggedTensor(["f"], torch.zeros(8, dtype=torch.int64), lengths=torch.ones(8, dtype=torch.int64))
        yield Batch(torch.zeros(rows, 64), sparse, torch.zeros(8)).pin_memory()


class _Model(nn.Module):
    """A loss that reads the whole batch, and needs little memory itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss = (batch.dense_features.sum(0) * self.weight).sum().reshape(1)
        return loss, loss.detach()


def _pipeline(theirs: Any, ours: Any, way: str, device: torch.device) -> Any:
    model = _Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (ours if way == OURS else theirs)(model, optimizer, device)


def _base(way: str, device: torch.device) -> Any:
    from torchrec.distributed.train_pipeline import TrainPipelineBase

    from torchrec_prealloc import PreallocTrainPipelineBase

    return _pipeline(TrainPipelineBase, PreallocTrainPipelineBase, way, device)


def _sparse_dist(way: str, device: torch.device) -> Any:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    from torchrec_prealloc import PreallocTrainPipelineSparseDist

    return _pipeline(TrainPipelineSparseDist, PreallocTrainPipelineSparseDist, way, device)
