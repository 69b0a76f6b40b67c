"""Device memory that is kept from batch to batch, at stable addresses.

A kept block is used again when no tensor refers to its memory any more (a user may hold one for a thousand steps), and
its owner stream has passed the point where that was seen. The next copy waits for that point alone, so it can start
while the owner stream is still busy with later work; a block that was just allocated is free only where the owner
stream is now.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchrec_prealloc.buffers import allocate, rounded


@dataclass(eq=False)
class _Block:
    base: Tensor
    owner: Any
    unused: int
    """References to its storage when nobody but the ring has one."""
    free: bool = False
    since: Any = None
    """The event of the owner stream from which on it is free."""
    times_used: int = 0

    @property
    def nbytes(self) -> int:
        """0 where TorchRec has freed the storage early."""
        return self.base.untyped_storage().nbytes()


class Ring:
    """Takes the place of allocation at each batch.

    Args:
        device: where the memory is.
        divisions: how sizes are rounded up (`buffers.rounded`).
        slots: for how many batches memory is kept.
        record: `record(owner)`: an event of that stream, at the point where it is now.
    """

    def __init__(self, device: torch.device, divisions: int, slots: int, record: Callable[[Any], Any]) -> None:
        self.skipped = 0
        """Requests that found every kept block in use, and got memory of their own."""
        self._device = device
        self._divisions = divisions
        self._slots = slots
        self._record = record
        self._blocks: list[_Block] = []
        self._taken = 0
        self._most_taken = 1
        """By one batch."""

    @property
    def kept_bytes(self) -> int:
        """Device memory that the ring keeps, in use or not."""
        return sum(block.nbytes for block in self._blocks)

    def next_batch(self) -> None:
        """Note which blocks are free by now. The owner stream has to be ordered after the readers of what it frees."""
        self._taken = 0
        self._blocks = [block for block in self._blocks if block.nbytes]
        for block in self._blocks:
            if not block.free and _uses(block.base) == block.unused:
                block.free, block.since = True, self._record(block.owner)

    def take(self, nbytes: int, owner: Any) -> tuple[Tensor, Any]:
        """At least `nbytes` (uint8, 1-D) of `owner`, and the event after which they may be written.

        The event is None for memory that is free only where the owner stream is now.

        Raises:
            torch.OutOfMemoryError: there are none.
        """
        self._taken += 1
        self._most_taken = max(self._most_taken, self._taken)
        size = rounded(nbytes, self._divisions)
        free = sorted((block for block in self._blocks if block.free), key=lambda block: block.nbytes)
        for block in free:
            if block.owner == owner and size <= block.nbytes <= 2 * size:
                return self._hand_out(block)
        full = len(self._blocks) >= self._slots * self._most_taken
        if full and free:
            self._blocks.remove(free[0])  # of another size than is wanted now: back to the pool
        base = allocate(size, self._device)
        if full and not free:
            self._skip()
            return base, None
        block = _Block(base, owner, _uses(base))
        self._blocks.append(block)
        return self._hand_out(block)

    def watch(self, base: Tensor) -> Callable[[], bool]:
        """A function that tells whether memory that `take` gave is released by now."""
        storage = base.untyped_storage()._cdata
        block = next((one for one in self._blocks if one.base.untyped_storage()._cdata == storage), None)
        if block is None:  # it was not kept
            return StorageWeakRef(base.untyped_storage()).expired
        times_used = block.times_used
        return lambda: block.times_used != times_used or _uses(block.base) == block.unused

    def release(self) -> None:
        """Give the memory of all free blocks back to the pool."""
        self._blocks = [block for block in self._blocks if not block.free]

    def _hand_out(self, block: _Block) -> tuple[Tensor, Any]:
        since, block.free, block.since = block.since, False, None
        block.times_used += 1
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return block.base[:], since  # another tensor, whose reference tells that the block is in use

    def _skip(self) -> None:
        self.skipped += 1
        if self.skipped == 1:
            warnings.warn(
                f"the memory kept for {self._slots} batches is all in use, by tensors of earlier batches that somebody "
                "holds; this batch, and others like it, gets memory of its own. Hold fewer batches, or raise "
                "prealloc.ring_slots",
                stacklevel=2,
            )


def _uses(base: Tensor) -> int:
    return int(torch._C._storage_Use_Count(base.untyped_storage()._cdata))
