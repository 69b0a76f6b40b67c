"""Memory snapshots of small trainings on the simulator, in PyTorch's format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from torchrec_prealloc import simulator

MIB = 1 << 20


class Model(nn.Module):
    """A loss that reads the whole batch, and needs little memory itself, or `layers` times a batch's."""

    def __init__(self, layers: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.layers = layers

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = batch.dense_features
        for _ in range(self.layers):
            hidden = hidden * self.weight
        loss = (hidden.sum(0) * self.weight).sum().reshape(1)
        return loss, loss.detach()


def batches(steps: int, largest: int) -> Iterator[Batch]:
    """Pinned batches of three quarters to all of `largest` MiB."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = int(torch.randint(largest * 3 // 4, largest + 1, (), generator=generator)) * MIB // 4 // 64
        sparse = KeyedJaggedTensor(["f"], torch.zeros(8, dtype=torch.int64), lengths=torch.ones(8, dtype=torch.int64))
        yield Batch(torch.zeros(rows, 64), sparse, torch.zeros(8)).pin_memory()


def train(
    pipeline_class: Any, device: torch.device, steps: int = 12, largest: int = 16, layers: int = 0, **options: Any
) -> tuple[Any, int]:
    """Train on an empty device, with the host a step ahead. The pipeline, and the peak of what it reserved, bytes.

    The memory history is being recorded afterwards, for `simulator.dump_snapshot`.
    """
    simulator.empty_cache()
    simulator.reset_peak_stats()
    devices = simulator.stats().devices
    before = devices[0].reserved if 0 in devices else 0
    simulator.record_memory_history(True, **options)
    model = Model(layers).to(device)
    pipeline = pipeline_class(model, torch.optim.SGD(model.parameters(), lr=0.1), device)
    iterator = batches(steps, largest)
    module = torch.get_device_module(device)
    with simulator.checked(schedule="lazy", raise_on_report=False):
        earlier = module.Event()
        for _ in range(steps):
            done = module.Event()
            pipeline.progress(iterator)
            done.record()
            earlier.synchronize()
            earlier = done
    return pipeline, simulator.stats().devices[0].peak_reserved - before


def snapshot_of(pipeline_class: Any, device: torch.device, path: Path, **how: Any) -> int:
    """Write a snapshot of such a training to `path`. The peak of what it reserved, bytes."""
    pipeline, reserved = train(pipeline_class, device, **how)
    simulator.dump_snapshot(path)
    simulator.record_memory_history(False)
    del pipeline
    return reserved
