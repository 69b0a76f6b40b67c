"""Every ordering that the engine relies on, by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Ordering:
    """Every ordering the engine relies on, one method for each.

    The tests take them away one at a time, and show that the race checker or wrong numbers notice.
    """

    def copy_after_allocation(self, side: Any, owner: Any) -> None:
        """The memory may still be in use by work queued on the owner stream before it was allocated."""
        side.wait_stream(owner)

    def copy_after_last_use(self, side: Any, free: Any) -> None:
        """Kept memory is written again only when the owner stream is where nobody read it any more."""
        side.wait_event(free)

    def reader_after_copy(self, reader: Any, copied: Any) -> None:
        """A stream reads the batch only when it has arrived."""
        reader.wait_event(copied)

    def reader_after_reader(self, reader: Any, earlier: Any) -> None:
        """The owner stream goes on, and so may reuse the memory, only after the other streams that read it."""
        reader.wait_stream(earlier)

    def reader_after_event(self, reader: Any, event: Any) -> None:
        """As `reader_after_reader`, up to an event that the earlier stream has recorded."""
        reader.wait_event(event)

    def owner_after_read(self, owner: Any, read: Any) -> None:
        """The owner stream did not wait for other readers: it does before it may reuse the memory."""
        owner.wait_event(read)

    def owner_after_copy(self, owner: Any, copied: Any) -> None:
        """A batch that nobody waited for is dropped: its memory may be reused only when the copy is done with it."""
        owner.wait_event(copied)

    def free_after_reader(self, arena: Tensor, reader: Any) -> None:
        """Memory that may be freed while a reader's work is queued (TorchRec's early free) is kept until that ran."""
        arena.record_stream(reader)

    def host_after_copy(self, copied: Any) -> None:
        """The host changes or frees memory only when the copies that read it have run."""
        copied.synchronize()

    def copy_reads(self, copied: Any) -> bool:
        """Staging memory is filled again only when the copies from it have run."""
        return not copied.query()

    def keep(self, sources: list[Any]) -> list[Any]:
        """Host tensors that a queued copy reads stay alive until it has run."""
        return sources
