"""Batches that the tests of the doctor share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor


def jagged(keys: int = 26, rows: int = 100) -> KeyedJaggedTensor:
    lengths = torch.ones(keys * rows, dtype=torch.int32)
    return KeyedJaggedTensor([f"f{index}" for index in range(keys)], torch.arange(keys * rows), lengths=lengths)


class LeavesOne:
    """Its `to` leaves a field on the host."""

    def __init__(self, moved: Tensor, left: Any) -> None:
        self.moved, self.left = moved, left

    def to(self, device: torch.device, non_blocking: bool = False) -> LeavesOne:
        return LeavesOne(self.moved.to(device, non_blocking=non_blocking), self.left)


class Opaque:
    """Its `to` fails while it is observed."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device, non_blocking: bool = False) -> Opaque:
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("I am being watched")
        return Opaque(self.x.to(device, non_blocking=non_blocking))


class Plain:
    """Not understood."""

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden
