"""Pinned host memory that is kept from one copy of a state to the next, and lent to one copy at a time.

A *set* is one block, large enough for one state. What lies in it is handed out as tensors, each with a storage of its
own, and all of them keep one numpy array alive, the *lease*: when that is gone nobody can read the block any more,
whatever was made of the tensors (views, numpy arrays, what a writer has queued).
"""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrec_prealloc.finalizing import finalize

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

SLACK = 8
"""A block that is replaced by a larger one gets an eighth more than is needed, so that a growing state does not mean
pinning anew at each copy."""

_POLL_S = 0.002


class MemoryInUse(RuntimeError):
    """All sets that there may be are still in use."""


class PinnedSet:
    """One block of host memory (none at first)."""

    def __init__(self) -> None:
        self.block: Tensor | None = None
        """uint8, 1-D."""
        self.asked_to_pin = False
        self.pinned = False
        self.copied: list[Any] = []
        """The events after which the device copies into the block have run."""
        self._lease: weakref.ref[Bytes] | None = None

    @property
    def nbytes(self) -> int:
        """The block's size."""
        return self.block.numel() if self.block is not None else 0

    def is_lent(self) -> bool:
        """Whether a tensor, or anything made of one, still lies in the block."""
        return self._lease is not None and self._lease() is not None

    def fits(self, nbytes: int, pin: bool) -> bool:
        """Whether the block will do for `nbytes`; not so if it is more than twice as large."""
        return nbytes <= self.nbytes <= 2 * nbytes and pin == self.asked_to_pin

    def lend(self) -> Bytes:
        """The block's bytes; it is lent until the array, and everything made of it, is gone."""
        assert self.block is not None
        lease: Bytes = self.block.numpy()  # a new array object at each call
        self._lease = weakref.ref(lease)
        return lease


class PinnedMemory:
    """Up to `max_in_flight` sets of kept host memory.

    Args:
        max_in_flight: how many states may be in host memory at a time. Another one waits until a set is free.
        patience: seconds that it waits.
        wait_for: `wait_for(event)` makes the host wait for a device copy.
        is_free: whether a set may be used again.

    Bytes are those of the blocks. CUDA's allocator of pinned memory rounds each block up to a power of two.
    """

    def __init__(
        self,
        max_in_flight: int,
        patience: float,
        wait_for: Callable[[Any], None],
        is_free: Callable[[PinnedSet], bool],
    ) -> None:
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; at least one state has to fit")
        self.max_in_flight = max_in_flight
        self.patience = patience
        self._wait_for = wait_for
        self._is_free = is_free
        self._sets: list[PinnedSet] = []
        self._lock = threading.Lock()
        self._warned = False
        # Also at exit, while there is still a device to wait for.
        finalize(self, _release, self._sets, wait_for)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that are kept."""
        return sum(kept.nbytes for kept in self._sets)

    @property
    def bytes_pinned(self) -> int:
        """Those of them that are pinned."""
        return sum(kept.nbytes for kept in self._sets if kept.pinned)

    def take(self, nbytes: int, pin: bool) -> tuple[PinnedSet, Bytes]:
        """Lend `nbytes`, or a little more.

        Args:
            nbytes: how many; at least 1.
            pin: whether to pin them. If that fails they are ordinary memory, and one warning says so.

        Raises:
            MemoryInUse: all sets are in use, and were for `patience` seconds.
        """
        with self._lock:
            kept = self._free_set(nbytes, pin)
            self._settle(kept)
            if not kept.fits(nbytes, pin):
                self._replace(kept, nbytes, pin)
            return kept, kept.lend()

    def close(self) -> None:
        """Wait for the copies that were queued, and give all memory back. What is still lent goes when it is let go."""
        with self._lock:
            _release(self._sets, self._wait_for)

    def _free_set(self, nbytes: int, pin: bool) -> PinnedSet:
        deadline = time.monotonic() + self.patience
        collected = False
        while True:
            free = [kept for kept in self._sets if self._is_free(kept)]
            if free:
                return next((kept for kept in free if kept.fits(nbytes, pin)), free[0])
            if len(self._sets) < self.max_in_flight:
                self._sets.append(PinnedSet())
                return self._sets[-1]
            if not collected:
                gc.collect()  # an exception's traceback holds what its functions held, often in a cycle
                collected = True
            elif time.monotonic() > deadline:
                raise MemoryInUse(
                    f"{self.max_in_flight} states are still in host memory after {self.patience:g} s: a write hangs, "
                    "or something keeps what was copied (a failed save's exception does); let it go, or raise "
                    "max_in_flight"
                )
            else:
                time.sleep(_POLL_S)

    def _settle(self, kept: PinnedSet) -> None:
        # Only where a copy's tensors were dropped before it had run is there anything to wait for.
        while kept.copied:
            self._wait_for(kept.copied.pop())

    def _replace(self, kept: PinnedSet, nbytes: int, pin: bool) -> None:
        grown = kept.block is not None and nbytes > kept.nbytes
        _drop(kept)  # before the new one: never more than one block a set
        kept.asked_to_pin = pin
        kept.block, kept.pinned = self._allocate(nbytes + nbytes // SLACK if grown else nbytes, pin)

    def _allocate(self, nbytes: int, pin: bool) -> tuple[Tensor, bool]:
        if pin:
            try:
                return pinned_block(nbytes), True
            except RuntimeError as error:
                if not self._warned:
                    self._warned = True
                    warnings.warn(
                        f"cannot pin {nbytes} bytes of host memory ({str(error).splitlines()[0]}); copies to it are "
                        "slower and block the host. Raise the limit of locked memory (ulimit -l), or the container's",
                        stacklevel=2,
                    )
        return torch.empty(nbytes, dtype=torch.uint8), False


def pinned_block(nbytes: int) -> Tensor:
    """`nbytes` of pinned memory (uint8, 1-D).

    Raises:
        RuntimeError: none is to be had.
    """
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _release(sets: list[PinnedSet], wait_for: Callable[[Any], None]) -> None:
    for kept in sets:
        while kept.copied:
            wait_for(kept.copied.pop())
        _drop(kept)
    sets.clear()


def _drop(kept: PinnedSet) -> None:
    pinned, kept.block, kept.pinned = kept.pinned, None, False
    if pinned:
        give_back_cached()  # these are large, and there may be none like them again


def give_back_cached() -> None:
    """Unpin what torch's host allocator keeps for later blocks of the same size. The device has to be idle for it."""
    empty: Callable[[], None] | None = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None and torch.cuda.is_initialized():
        empty()
