"""Pinned host memory in which tensors are gathered, and the thread that fills it where that takes long.

The memory is torch's own: its host allocator keeps blocks for reuse, and none is used again before the copies from it
have run.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

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


class Background:
    """One thread, started when it is first needed, that does what the caller should not wait for, in its order."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._process = 0

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Have `work` done; the future gives its result, or raises what it raised."""
        if self._executor is None or self._process != os.getpid():  # a forked child has the object, not the thread
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="torchrec-prealloc")
            self._process = os.getpid()
        return self._executor.submit(work)

    def close(self) -> None:
        """Wait until all is done, and let the thread end. The next `submit` starts another."""
        if self._executor is not None and self._process == os.getpid():
            self._executor.shutdown(wait=True)
        self._executor = None
