"""What an engine keeps from batch to batch: what it knows of them, and device memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchrec_prealloc.buffers import allocate
from torchrec_prealloc.config import PreallocConfig
from torchrec_prealloc.held import HeldTensors, Watched
from torchrec_prealloc.ring import Ring
from torchrec_prealloc.runs import Structure

FIRST_CAPTURE_BYTES = 64 << 10


class Memory:
    """Gives a batch its device memory.

    Args:
        device: where.
        config: options.
        record: `record(stream)`: an event of that stream, at the point where it is now.
        describe: what is held, for an error message.
    """

    def __init__(
        self,
        device: torch.device,
        config: PreallocConfig,
        record: Callable[[Any], Any],
        describe: Callable[[], str],
    ) -> None:
        self.structures: dict[int, Structure] = {}
        """By the number of tensors."""
        self.capture_bytes = FIRST_CAPTURE_BYTES
        """The most that conversions of classes' own `to` took together in a batch so far, where they are gathered."""
        self.held = HeldTensors()
        self.held_in_packed = HeldTensors()
        """The same for the tensors inside packed batches."""
        self.ring = Ring(device, config.size_rounding, config.ring_slots, record) if config.buffers == "ring" else None
        self._device = device
        # The CPU's allocator keeps no blocks by size: rounding would only touch more pages.
        self._divisions = config.size_rounding if device.type != "cpu" else 0
        self._describe = describe
        self._owner: Any = None

    def next_batch(self, owner: Any) -> None:
        """A batch comes whose memory belongs to the stream `owner`, which is current."""
        self._owner = owner
        if self.ring is not None:
            self.ring.next_batch()

    def watch(self, base: Tensor, position: int = -1, batch: Watched | None = None) -> None:
        """See how long memory that `take` gave is held.

        Args:
            base: it, or a tensor in it.
            position: of the tensor that has it alone; -1 if it is many tensors'.
            batch: whose it is; by default the last one of `held`.
        """
        released = self.ring.watch(base) if self.ring is not None else StorageWeakRef(base.untyped_storage()).expired
        (batch or self.held.latest).watch(released, base.untyped_storage().nbytes(), position)

    def take(self, nbytes: int) -> tuple[Tensor, Any]:
        """At least `nbytes` (uint8, 1-D), and the event after which they may be written; None: where the owner is now.

        Where memory is short, what is kept and what torch caches is given back, and it is tried once more.

        Raises:
            torch.OutOfMemoryError: there is none. The message says how much was wanted, and what is held.
        """
        try:
            return self._take(nbytes)
        except torch.OutOfMemoryError:
            if self.ring is not None:
                self.ring.release()
            torch.get_device_module(self._device).empty_cache()
        try:
            return self._take(nbytes)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(f"{nbytes} bytes for a batch are not to be had; {self._describe()}") from error

    def _take(self, nbytes: int) -> tuple[Tensor, Any]:
        if self.ring is not None:
            return self.ring.take(nbytes, self._owner)
        return allocate(nbytes, self._device, self._divisions), None
