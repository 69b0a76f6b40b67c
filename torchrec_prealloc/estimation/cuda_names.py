"""Classes that name `torch.cuda` whatever their device, on a simulated one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

_NAMES = ("Event", "stream", "current_stream", "default_stream", "set_device", "current_device", "synchronize")


@contextlib.contextmanager
def cuda_means(device: torch.device) -> Iterator[None]:
    """While the block runs, `torch.cuda`'s names for streams and events are those of the simulated device's module.

    A pipeline of TorchRec's that asks for `torch.cuda.current_stream()` then gets the stream that it means. On a CUDA
    device nothing changes. All threads see it.
    """
    if device.type == "cuda":
        yield
        return
    module: Any = torch.get_device_module(device)

    def stream(device: object = None, priority: int = 0) -> Any:
        return module.Stream()

    with contextlib.ExitStack() as patches:
        for name in _NAMES:
            patches.enter_context(mock.patch.object(torch.cuda, name, getattr(module, name)))
        patches.enter_context(mock.patch.object(torch.cuda, "Stream", stream))
        yield
