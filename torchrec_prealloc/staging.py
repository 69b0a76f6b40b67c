"""Host memory on its way to a device: pinned memory in which tensors are gathered, and what queued copies still read.

Pinned memory comes from torch's own host allocator, and is kept from batch to batch: asking for it again costs a look
at every event that guards a freed block. A block is filled again only when the copies from it have run; one that was
not needed for `PATIENCE` batches is given back. So what is kept is what the last batches needed.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_prealloc.ordering import Ordering
from torchrec_prealloc.pinned_memory import give_back_cached, pinned_block

PATIENCE = 64
"""Batches after which a kept block that none of them needed is given back."""
MAX_UNREAD = 16
"""Batches whose copies may be queued and not have run. Before the next one the host waits: it is that far ahead."""
MIN_BLOCK = 1 << 12
"""Bytes. Blocks have the sizes that torch's allocator of pinned memory gives: powers of two."""
WORTH_UNPINNING = 64 << 20
"""Bytes from which a block that is given back goes to the system. Smaller ones stay with torch's allocator, for
others: the system takes them back only when the device is idle."""


@dataclass(eq=False)
class _Block:
    memory: Tensor
    used: int
    """The number of the batch that it was last used for."""


class _Reading(NamedTuple):
    """What the copies before an event read."""

    copied: Any
    number: int
    """Of the batch."""
    sources: list[Any]
    """The batch's own memory, kept until then."""
    blocks: list[Tensor]


class Staging:
    """The host memory of one engine's batches. One thread takes, another may have copied.

    Args:
        order: what the host has to wait for.
    """

    def __init__(self, order: Ordering) -> None:
        self._order = order
        self._idle: list[_Block] = []
        self._reading: deque[_Reading] = deque()
        self._number = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the kept blocks, those that copies read included."""
        with self._lock:
            idle = [block.memory for block in self._idle]
            return sum(block.numel() for block in idle + [one for entry in self._reading for one in entry.blocks])

    @property
    def reading(self) -> list[Tensor]:
        """Host memory that is kept for copies which have not run, as far as is known."""
        with self._lock:
            return [one for entry in self._reading for one in entry.sources + entry.blocks]

    def next_batch(self) -> None:
        """Take back what copies have read. The host waits if it is `MAX_UNREAD` batches ahead of the device."""
        self._number += 1
        with self._lock:
            ahead = [entry.copied for entry in self._reading if entry.number <= self._number - MAX_UNREAD]
        for copied in ahead[-1:]:  # copies run in order
            self._order.host_after_copy(copied)
        self.take_back()
        given_back = []
        with self._lock:
            for block in self._idle[:]:
                if block.used < self._number - PATIENCE:
                    self._idle.remove(block)
                    given_back.append(block.memory.numel())
        if sum(given_back) >= WORTH_UNPINNING:
            give_back_cached()

    def take(self, nbytes: int) -> Tensor:
        """At least `nbytes` of pinned memory (uint8, 1-D, uninitialised).

        Where none is had: ordinary memory, and a warning.
        """
        size = max(1 << (nbytes - 1).bit_length(), MIN_BLOCK)
        with self._lock:
            # Not a far larger one: that would never be given back.
            fitting = [block for block in self._idle if size <= block.memory.numel() <= 4 * size]
            if fitting:
                smallest = min(fitting, key=lambda block: block.memory.numel())
                self._idle.remove(smallest)
                return smallest.memory
        return pinned(size)

    def read_until(self, copied: Any, sources: list[Any], blocks: list[Tensor]) -> None:
        """Keep `sources` and `blocks` until the copies before the event `copied`, which read them, have run.

        Args:
            blocks: what `take` gave.
        """
        with self._lock:
            self._reading.append(_Reading(copied, self._number, self._order.keep(sources), blocks))

    def take_back(self) -> None:
        """Let go of what copies have read by now."""
        with self._lock:
            while self._reading and not self._order.copy_reads(self._reading[0].copied):
                _, number, _, blocks = self._reading.popleft()
                self._idle += [_Block(block, number) for block in blocks]

    def close(self) -> None:
        """Wait until the copies have run, and keep nothing."""
        with self._lock:
            for entry in self._reading:
                self._order.host_after_copy(entry.copied)
            self._reading.clear()
            self._idle.clear()


def pinned(nbytes: int) -> Tensor:
    """`nbytes` of pinned host memory (uint8, 1-D, uninitialised); where none is had ordinary memory, and a warning."""
    try:
        return pinned_block(nbytes)
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
