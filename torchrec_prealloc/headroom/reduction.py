"""What is kept of a memory snapshot's dicts and lists while it is read: columns of numbers, and causes."""

from __future__ import annotations

from typing import Any

from torchrec_prealloc.headroom.cause import UNKNOWN, Cause, Frame, cause_of
from torchrec_prealloc.headroom.opcodes import Open, SnapshotError
from torchrec_prealloc.headroom.snapshot import (
    ACTIONS,
    ALLOCATED,
    INACTIVE,
    OTHER,
    PENDING,
    Block,
    Blocks,
    Segment,
    Trace,
)

MOST_BYTES, MOST_DEVICES = 1 << 44, 1 << 10
"""What no device and no machine has."""
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


_ENTRY, _BLOCK = object(), object()
"""What stands for a dict of an entry or of a block. Its numbers wait for the list that it is put into: were they in
what stands for the dict, the memo would keep them."""


class Kept:
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
        size = _number(items["size"], end=MOST_BYTES)
        self._blocks += Block(
            address=_number(items.get("address", 0)),
            size=size,
            requested=_number(items.get("requested_size", size), end=MOST_BYTES),
            state=state,
            cause=self._cause(items.get("frames")),
        )
        return _BLOCK

    def _segment(self, items: dict[str, Any]) -> Segment:
        blocks = items["blocks"]
        return Segment(
            device=_number(items.get("device", 0), end=MOST_DEVICES),
            stream=self.streams.number(_number(items.get("stream", 0), least=-(1 << 63))),
            address=_number(items.get("address", 0)),
            size=_number(items["total_size"], end=MOST_BYTES),
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
