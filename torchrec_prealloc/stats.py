"""What engines have done, counted and timed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass
class TransferStats:
    """What an engine has done, counted at the calls, and timed by events for some batches."""

    batches: int = 0
    bytes: int = 0
    """Bytes copied to the device, alignment included."""
    copies: int = 0
    """Copies to the device."""
    allocations: int = 0
    """Device allocations."""
    staging_bytes: int = 0
    """Pinned host memory that is kept for gathering, in use or not."""
    ring_bytes: int = 0
    """Device memory that a ring keeps, in use or not."""
    ring_skipped: int = 0
    """Requests that found a ring's memory all in use, and were allocated by themselves."""
    timed_batches: int = 0
    """Batches that were timed and have arrived: a pipeline times some of them, on devices whose events can."""
    timed_bytes: int = 0
    """The bytes of those."""
    copy_ms: float = 0.0
    """Milliseconds from the start to the end of their copies, on the side stream."""
    wait_ms: float = 0.0
    """Milliseconds that the owner stream waited for them."""

    def reset(self) -> None:
        """Set every count to 0. What is kept is counted again."""
        for field in fields(self):
            setattr(self, field.name, field.default)

    def line(self) -> str:
        """The counts and times in one line."""
        text = f"{self.batches} batches, {self.bytes} bytes in {self.copies} copies"
        if not self.batches:
            return text
        if not self.timed_batches:
            return text + "; host only: no device that times its copies"
        speed = f"{self.timed_bytes / self.copy_ms / 1e6:.1f} GB/s" if self.copy_ms else "too fast to time"
        each = self.wait_ms / self.timed_batches
        waited = f"{self.wait_ms:.1f} ms for {self.timed_batches} of them, {each:.3f} ms each"
        return f"{text}, {speed}; the main stream waited {waited}"


def total(several: Iterable[TransferStats]) -> TransferStats:
    """The sum of what several engines have done."""
    listed, names = list(several), [field.name for field in fields(TransferStats)]
    return TransferStats(**{name: sum(getattr(one, name) for one in listed) for name in names})
