"""What a trainer has: functions that make batches, a loader, a model. Named by the configs of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from recsys import make_batches
from torchrec.datasets.utils import Batch

from torchrec_prealloc.estimation.stand_in import stand_in

calls: list[Any] = []


def make_batch(rows: int = 8, seed: int = 1) -> Batch:
    calls.append((rows, seed))
    return make_batches(1, seed, rows)[0]


def make_loader(count: int = 2) -> list[Batch]:
    return list(make_batches(count, wobble=True))


def make_generator() -> Iterator[Batch]:
    yield from make_batches(3)


def fails(**options: Any) -> Any:
    raise FileNotFoundError("no shard\n/0")


def build(device: torch.device, width: int = 1) -> Any:
    calls.append((device.type, width))
    return stand_in(device)


def no_pair(device: torch.device) -> int:
    return 3


NOTHING: tuple[int, ...] = ()


def nothing() -> Any:
    return NOTHING
