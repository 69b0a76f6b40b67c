"""What an engine has done, counted."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class TransferStats:
    """What an engine has done, counted at the calls."""

    batches: int = 0
    bytes: int = 0
    """Bytes copied to the device, alignment included."""
    copies: int = 0
    """Copies to the device."""
    allocations: int = 0
    """Device allocations."""
    ring_bytes: int = 0
    """Device memory that a ring keeps, in use or not."""
    ring_skipped: int = 0
    """Requests that found a ring's memory all in use, and were allocated by themselves."""

    def reset(self) -> None:
        """Set every count to 0."""
        for name in (item.name for item in fields(self)):
            setattr(self, name, 0)
