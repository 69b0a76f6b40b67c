"""Pinned host memory in which small tensors are gathered."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def pinned(nbytes: int) -> Tensor:
    """`nbytes` of pinned host memory (uint8, 1-D, uninitialised); where none is had ordinary memory, and a warning."""
    try:
        # torch's own host allocator: it keeps a block from being used again until the copies from it have run.
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        warnings.warn(f"cannot pin {nbytes} bytes of host memory ({error}); copies will block the host", stacklevel=2)
        return torch.empty(nbytes, dtype=torch.uint8)
