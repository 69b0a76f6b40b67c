from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import pytest
import torch

from torchrec_prealloc.simulator.testing import simulated_accelerator

__all__ = ["simulated_accelerator"]


@pytest.fixture
def device(simulated_accelerator: torch.device) -> torch.device:
    return simulated_accelerator


@pytest.fixture
def bytes_now() -> Callable[[torch.Tensor], torch.Tensor]:
    """What lies in a tensor's memory at this moment, read past all streams."""

    def read(tensor: torch.Tensor) -> torch.Tensor:
        raw = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        return torch.frombuffer(bytearray(raw), dtype=tensor.dtype).reshape(tensor.shape)

    return read


@pytest.fixture
def environment() -> dict[str, str]:
    """For Python subprocesses: this checkout first on the path."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
