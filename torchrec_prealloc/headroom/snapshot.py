"""A memory snapshot of `torch.cuda.memory._dump_snapshot`, as columns of numbers.

Of each block and each entry of the history a few numbers are kept, of each stack its cause. What is kept of a file is
smaller than the file, however many entries it has.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from torchrec_prealloc.headroom.cause import UNKNOWN, Cause, Frame, cause_of
from torchrec_prealloc.headroom.opcodes import Open, PlainPickle, Readable, SnapshotError

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

_GZIP, _ZIP, _PROTOCOL = b"\x1f\x8b", b"PK\x03\x04", b"\x80"
"""First bytes of files; the last of a pickle that is not of the oldest protocols."""
_ENOUGH = 100
_MOST_BYTES, _MOST_DEVICES = 1 << 44, 1 << 10
_ACTION = {name: number for number, name in enumerate(ACTIONS)}


class Numbered:
    """Values of one type by numbers, as few as there are different ones."""

    def __init__(self, of: type) -> None:
        self.values: list[Any] = []
        self._of = of
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        number = self._numbers.get(value)
        if number is None:
            if type(value) is not self._of:
                raise SnapshotError(f"is no snapshot: {str(value)[:40]!r} where a number of a stream stands")
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number


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


def read_snapshot(path: Path, progress: Callable[[int], object] = lambda _: None) -> Snapshot:
    """Read a snapshot; nothing in it is imported or called, and no more is kept of it than a `Snapshot`.

    Args:
        path: `.pickle` as `_dump_snapshot` writes it, or the same through gzip.
        progress: called with each number of bytes of the file that has been read.

    Raises:
        SnapshotError: the file is missing, empty, cut off, malformed, hostile, or something else. One line.
    """
    try:
        with path.open("rb") as raw:
            start = raw.read(4)
            raw.seek(0)
            if not start:
                raise SnapshotError("is empty")
            if start == _ZIP:
                raise SnapshotError("is a zip (of torch.save?), not a pickle of torch.cuda.memory._dump_snapshot")
            counted: Any = _Counted(raw, progress)
            file: Readable = gzip.GzipFile(fileobj=counted) if start[:2] == _GZIP else counted
            return _read(file, path, is_pickle=start[:1] == _PROTOCOL or start[:2] == _GZIP)
    except SnapshotError as error:
        raise type(error)(f"{path} {error}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SnapshotError(f"{path} is cut off or damaged: {error}") from None
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror or error}") from None


class _Counted:
    """A file that says how much of it has been read."""

    def __init__(self, file: BinaryIO, progress: Callable[[int], object]) -> None:
        self._file, self._progress = file, progress

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._progress(len(data))
        return data


def _read(file: Readable, path: Path, is_pickle: bool) -> Snapshot:
    kept = _Kept()
    try:
        whole = PlainPickle(file, kept).load()
    except SnapshotError as error:
        if is_pickle or "to import" in str(error):
            raise
        raise SnapshotError("is no snapshot, since it is no pickle") from None
    except (TypeError, OverflowError, ValueError) as error:  # a column is given what is no number, or too large a one
        raise SnapshotError(f"is no snapshot: a value does not fit ({error})") from None
    if type(whole) is not dict or type(whole.get("segments")) is Trace:
        raise SnapshotError("is a pickle, but no memory snapshot: it has no 'segments'")
    segments, traces, settings = (whole.get(key) for key in ("segments", "device_traces", "allocator_settings"))
    if type(segments) not in (list, Open) or type(traces) not in (list, Open, type(None)):
        raise SnapshotError("is a pickle, but no memory snapshot: it has no 'segments'")
    histories = [trace if type(trace) is Trace else Trace() for trace in _items(traces)]
    for trace in histories:
        _check(trace)
    return Snapshot(
        name=path.name.removesuffix(".gz").rsplit(".", 1)[0],
        segments=[segment for segment in _items(segments) if type(segment) is Segment],
        traces=histories,
        streams=kept.streams.values,
        causes=kept.causes.values,
        stacks=kept.stacks,
        settings=settings if type(settings) is dict else {},
    )


def _items(kept: Any) -> list[Any]:
    return kept if type(kept) is list else []


_ENTRY, _BLOCK = object(), object()
"""What stands for a dict of an entry or of a block. Its numbers wait for the list that it is put into: were they in
what stands for the dict, the memo would keep them."""


class _Kept:
    """What is kept of a snapshot's dicts and lists (see `opcodes.Reduction`): they are told apart by their keys."""

    def __init__(self) -> None:
        self.streams, self.causes, self._frames = Numbered(int), Numbered(Cause), Numbered(Frame)
        self.stacks = 0
        self._unknown = self.causes.number(UNKNOWN)
        self._entries: list[int] = []  # six numbers each, of those that are in no list yet
        self._blocks: list[int] = []

    def mapping(self, items: dict[str, Any]) -> Any:
        if "action" in items:
            return self._entry(items)
        if "filename" in items and "name" in items:
            return self._frame(items)
        if "state" in items and "size" in items:
            return self._block(items)
        if "blocks" in items and "total_size" in items:
            return self._segment(items)
        if "segments" in items or "expandable_segments" in items or "PYTORCH_CUDA_ALLOC_CONF" in items:
            return items
        return None

    def sequence(self, items: list[Any]) -> Any:
        first = type(items[0])
        if first is Frame:
            return cause_of(frame for frame in items if type(frame) is Frame)
        if items[0] is _ENTRY:
            return self.extend(Trace(), items)
        if items[0] is _BLOCK:
            return self.extend(Blocks(), items)
        if first in (Segment, Trace, Open):
            return list(items)
        return None

    def extend(self, kept: Any, items: list[Any]) -> Any:
        if type(kept) is Trace:
            waiting, self._entries = self._entries, []
            if items.count(_ENTRY) != len(items) or len(waiting) != 6 * len(items):
                raise SnapshotError("is no snapshot: a history is no list of dicts with actions")
            columns = kept.action, kept.stream, kept.cause, kept.address, kept.size, kept.time
            for place, column in enumerate(columns):
                column.extend(waiting[place::6])
        elif type(kept) is Blocks:
            waiting, self._blocks = self._blocks, []
            if items.count(_BLOCK) != len(items) or len(waiting) != len(Block._fields) * len(items):
                raise SnapshotError("is no snapshot: a segment's blocks are no list of dicts with states")
            kept.add(waiting)
        elif type(kept) is list:
            kept.extend(items)
        return kept

    def is_constant(self, kept: Any) -> bool:
        return type(kept) is Cause

    def _entry(self, items: dict[str, Any]) -> object:
        get = items.get
        self._entries += (
            _ACTION.get(items["action"], OTHER),
            self.streams.number(get("stream", 0)),
            self._cause(get("frames")),
            get("addr", 0),
            get("size", 0),
            get("time_us", 0),
        )
        return _ENTRY

    def _frame(self, items: dict[str, Any]) -> Frame:
        name, filename, line = items["name"], items["filename"], items.get("line", 0)
        if type(name) is not str or type(filename) is not str or type(line) is not int:
            raise SnapshotError("is no snapshot: a frame's name, filename or line is none")
        frame = Frame.of(name, filename, line)
        return self._frames.values[self._frames.number(frame)]  # type: ignore[no-any-return]

    def _block(self, items: dict[str, Any]) -> object:
        state = {"active_allocated": ALLOCATED, "inactive": INACTIVE}.get(items["state"], PENDING)
        size = _number(items["size"], end=_MOST_BYTES)
        self._blocks += Block(
            address=_number(items.get("address", 0)),
            size=size,
            requested=_number(items.get("requested_size", size), end=_MOST_BYTES),
            state=state,
            cause=self._cause(items.get("frames")),
        )
        return _BLOCK

    def _segment(self, items: dict[str, Any]) -> Segment:
        blocks = items["blocks"]
        return Segment(
            device=_number(items.get("device", 0), end=_MOST_DEVICES),
            stream=self.streams.number(_number(items.get("stream", 0), least=-(1 << 63))),
            address=_number(items.get("address", 0)),
            size=_number(items["total_size"], end=_MOST_BYTES),
            cause=self._cause(items.get("frames")),
            blocks=blocks if type(blocks) is Blocks else Blocks(),
        )

    def _cause(self, frames: Any) -> int:
        if type(frames) is not Cause:
            return self._unknown
        self.stacks += 1
        return self.causes.number(frames)


def _number(value: Any, least: int = 0, end: int = 1 << 63) -> int:
    if type(value) is not int or not least <= value < end:
        raise SnapshotError(f"is no snapshot: {str(value)[:40]!r} where a number from {least} to {end - 1} stands")
    return value


def _check(trace: Trace) -> None:
    """Sizes and times that no device has would leave the range of the sums."""
    for what, column, end in (("size", trace.size, _MOST_BYTES), ("time", trace.time, 1 << 62)):
        numbers = np.frombuffer(column, np.int64)
        action = np.frombuffer(trace.action, np.uint8)
        counts = (action < SNAPSHOT) | (action == FREE)  # a failed allocation may have wanted anything
        wrong = numbers[counts & ((numbers < 0) | (numbers >= end))]
        if len(wrong):
            raise SnapshotError(f"is no snapshot: a {what} of {int(wrong[0]):,} in its history")
