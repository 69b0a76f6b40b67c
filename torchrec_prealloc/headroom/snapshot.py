"""A memory snapshot of `torch.cuda.memory._dump_snapshot`, as columns of numbers.

Of each block and each entry of the history a few numbers are kept, of each stack its cause: less than the file has,
however many entries it has.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchrec_prealloc.headroom.cause import Cause

ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
    "free",  # of PyTorch 1.13: requested and completed
    "other",
)
"""What an entry of the history says, by its number in `Trace.action`."""
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP = range(7)
SNAPSHOT, FREE, OTHER = 7, 9, 10
ALLOCATED, PENDING, INACTIVE = range(3)
"""A block's state: a tensor has it; it was freed, but streams of `record_stream` may still use it; free."""

_ENOUGH = 100


class Trace:
    """The history of one device, oldest first: one row for each entry, in columns.

    Attributes:
        action: index into `ACTIONS`
        cause: index into `Snapshot.causes`
        stream: index into `Snapshot.streams`
        address: of a block or segment; of an out-of-memory error 0
        size: bytes, of blocks as requested
        time: microseconds; 0 where none was recorded
    """

    def __init__(self) -> None:
        self.action = array("B")
        self.stream = array("H")
        self.cause = array("I")
        self.address = array("Q")
        self.size = array("q")
        self.time = array("q")

    def __len__(self) -> int:
        return len(self.action)

    def ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The actions that end a tensor's hold of a block, and those after which the block can be used again. Where
        one kind was left out of the recording (`skip_actions`), the other stands for both."""
        requested, completed = (FREE_REQUESTED, FREE), (FREE_COMPLETED, FREE)
        counted = self.action.count(FREE_REQUESTED), self.action.count(FREE_COMPLETED)
        if min(counted) or max(counted) < _ENOUGH:  # a few frees may all be waiting, or all be older than the history
            return requested, completed
        return (requested, requested) if counted[0] else (completed, completed)


class Block(NamedTuple):
    """A part of a segment. Bytes; `requested` is what the tensor asked for; `state` is `ALLOCATED` and so on."""

    address: int
    size: int
    requested: int
    state: int
    cause: int


class Blocks:
    """The blocks of one segment, in one array."""

    def __init__(self) -> None:
        self._numbers = array("q")

    def add(self, numbers: list[int]) -> None:
        """Add blocks, each by its numbers in the order of `Block`."""
        self._numbers.extend(numbers)

    def __iter__(self) -> Iterator[Block]:
        return map(Block._make, zip(*[iter(self._numbers)] * len(Block._fields), strict=True))

    def __len__(self) -> int:
        return len(self._numbers) // len(Block._fields)


@dataclass(slots=True)
class Segment:
    """Memory that the allocator has taken from the device, for one stream. `cause` is an index, as in `Trace`."""

    device: int
    stream: int
    address: int
    size: int
    cause: int
    blocks: Blocks


@dataclass
class Snapshot:
    """What one process' allocator held, and what it did before.

    Attributes:
        name: the file's, without its suffixes
        streams: numbers of streams, as the file has them; 0 is the default stream
        causes: of allocations; `UNKNOWN` where there was no stack
        traces: the history by device; empty where none was recorded
        stacks: of how many entries and blocks a stack was recorded
        settings: of the allocator, as far as the file has them
    """

    name: str
    segments: list[Segment]
    traces: list[Trace]
    streams: list[int]
    causes: list[Cause]
    stacks: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
