"""Reserved and allocated bytes of each stream over time, worked out from a snapshot.

PyTorch's history is a ring buffer: it may begin in the middle, when memory was held already. So the totals are anchored
at the end, where `segments` says what is held, and what each entry changed is taken off going backwards. A snapshot
whose older half is missing gives the same curves for the half that is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_prealloc.headroom import snapshot as fields
from torchrec_prealloc.headroom.cause import Cause, Kind
from torchrec_prealloc.headroom.snapshot import Segment, Snapshot, Trace

Numbers = npt.NDArray[np.int64]
Entries = npt.NDArray[np.int32]
"""Numbers of entries of a history; 32 bits, since a long history is to fit into memory."""
KINDS = tuple(Kind)


@dataclass(frozen=True)
class Curve:
    """Bytes over time. After the history's entry `at[i]` they are `value[i]`, before `at[0]` they are `start`."""

    start: int
    at: Entries
    value: Numbers

    @property
    def peak(self) -> int:
        return max(self.start, int(self.value.max(initial=self.start)))

    @property
    def lowest(self) -> int:
        return min(self.start, int(self.value.min(initial=self.start)))

    def after(self, entry: int) -> int:
        """The value after the history's entry of that number; -1: before all."""
        place = int(np.searchsorted(self.at, entry, side="right"))
        return int(self.value[place - 1]) if place else self.start



@dataclass
class StreamCurves:
    """What one stream's pool held.

    Attributes:
        stream: its number; 0 is the default stream
        reserved: taken from the device
        allocated: asked for by tensors that were alive
        active: the same, and what was freed but waited for streams of `record_stream`
        by_kind: allocated, by what for; of memory that was freed before its allocation was recorded nothing is known
        reserved_by_kind: reserved, by what the segment was first taken for
        sites: the causes of what was allocated here, and their bytes in all, largest first
    """

    stream: int
    reserved: Curve
    allocated: Curve
    active: Curve
    by_kind: dict[Kind, Curve] = field(default_factory=dict)
    reserved_by_kind: dict[Kind, Curve] = field(default_factory=dict)
    sites: list[tuple[Cause, int]] = field(default_factory=list)


@dataclass
class Timeline:
    """One device of a snapshot.

    Attributes:
        device: its index
        entries: of the history; 0: none was recorded
        seconds: between its first and its last entry; 0 where times were not recorded
        times: microseconds, one for each entry; entry numbers where times were not recorded
        streams: those that ever held memory, in the order of their peaks
        is_consistent: the history and the final state agree
    """

    device: int
    entries: int
    seconds: float
    times: npt.NDArray[np.signedinteger[Any]]
    streams: list[StreamCurves]
    is_consistent: bool

    def total(self, what: str = "reserved") -> Curve:
        """The sum over all streams of `reserved`, `allocated` or `active`."""
        return summed([getattr(stream, what) for stream in self.streams])


def summed(curves: list[Curve]) -> Curve:
    """The sum of curves over the same history."""
    if len(curves) == 1:
        return curves[0]
    start = sum(curve.start for curve in curves)
    at = np.concatenate([np.zeros(0, np.int32), *(curve.at for curve in curves)])
    value = np.concatenate([np.zeros(0, np.int64), *(np.diff(c.value, prepend=c.start) for c in curves)])
    order = np.argsort(at, kind="stable").astype(np.int32)
    at, value = at[order], value[order]
    np.cumsum(value, out=value)
    value += start
    return Curve(start, at, value)


def timelines(snapshot: Snapshot) -> list[Timeline]:
    """One timeline for each device that held memory."""
    devices = {segment.device for segment in snapshot.segments}
    devices.update(device for device, trace in enumerate(snapshot.traces) if len(trace))
    return [_timeline(snapshot, device) for device in sorted(devices)]


def _timeline(snapshot: Snapshot, device: int) -> Timeline:
    trace = snapshot.traces[device] if device < len(snapshot.traces) else Trace()
    segments = [segment for segment in snapshot.segments if segment.device == device]
    kinds = np.array([KINDS.index(cause.kind) for cause in snapshot.causes], np.uint8)
    history = _History(trace)
    present = np.unique(np.concatenate((history.stream, np.array([s.stream for s in segments], np.uint16))))
    streams = []
    for number in present.tolist():
        mine = [segment for segment in segments if segment.stream == number]
        curves = _stream(snapshot, history, mine, number, kinds)
        if curves.reserved.peak or curves.active.peak:
            streams.append(curves)
    streams.sort(key=lambda curves: -curves.reserved.peak)
    every = [curve for s in streams for curve in (s.reserved, s.allocated, s.active)]
    times = history.time
    if np.any(times[1:] < times[:-1]):  # a clock that was set back; the order is the history's
        times = np.maximum.accumulate(times)
    timed = len(times) > 1 and bool(times[-1] > times[0])
    return Timeline(
        device=device,
        entries=len(trace),
        seconds=float(times[-1] - times[0]) / 1e6 if timed else 0.0,
        times=times if timed else np.arange(len(times), dtype=np.int32),
        streams=streams,
        is_consistent=all(curve.lowest >= 0 for curve in every),
    )


class _History:
    """A trace's columns as arrays, without a copy, and the causes of what is freed."""

    def __init__(self, trace: Trace) -> None:
        self.action = np.frombuffer(trace.action, np.uint8)
        self.stream = np.frombuffer(trace.stream, np.uint16)
        self.size = np.frombuffer(trace.size, np.int64)
        self.time = np.frombuffer(trace.time, np.int64)
        address, cause = np.frombuffer(trace.address, np.uint64), np.frombuffer(trace.cause, np.uint32)
        self.cause = cause.copy()
        blocks = (fields.ALLOC,), (fields.FREE_REQUESTED, fields.FREE_COMPLETED, fields.FREE)
        segments = (fields.SEGMENT_ALLOC, fields.SEGMENT_MAP), (fields.SEGMENT_FREE, fields.SEGMENT_UNMAP)
        for begin, end in (blocks, segments):
            self._pass_on(address, begin, end)
        self.signs = {
            "reserved": _signs(*segments),
            "allocated": _signs((fields.ALLOC,), trace.ends()[0]),
            "active": _signs((fields.ALLOC,), trace.ends()[1]),
        }

    def _pass_on(self, address: npt.NDArray[np.uint64], begin: tuple[int, ...], end: tuple[int, ...]) -> None:
        """Give each entry of an `end` the cause of the last `begin` at its address; 0, unknown, where there is none."""
        entries = np.flatnonzero(np.isin(self.action, (*begin, *end))).astype(np.int32)
        if not len(entries):
            return
        address = address[entries]
        order = np.argsort(address, kind="stable").astype(np.int32)
        address, order = address[order], entries[order]
        last = np.where(np.isin(self.action[order], begin), np.arange(len(order), dtype=np.int32), np.int32(-1))
        np.maximum.accumulate(last, out=last)
        found = (last >= 0) & (address[last] == address)
        del address
        self.cause[order] = np.where(found, self.cause[order[last]], 0)


def _signs(more: tuple[int, ...], less: tuple[int, ...]) -> npt.NDArray[np.int8]:
    signs = np.zeros(len(fields.ACTIONS), np.int8)
    signs[list(more)], signs[list(less)] = 1, -1
    return signs


def _stream(
    snapshot: Snapshot, history: _History, segments: list[Segment], stream: int, kinds: npt.NDArray[np.uint8]
) -> StreamCurves:
    mine = np.flatnonzero(history.stream == stream).astype(np.int32)
    action, size, cause = history.action[mine], history.size[mine], history.cause[mine]
    kind = kinds[cause]
    held = {what: _held(segments, what, kinds) for what in ("reserved", "allocated", "active")}

    def curves(what: str, divided: bool = True) -> tuple[Curve, dict[Kind, Curve]]:
        sign = history.signs[what][action]
        changes = np.flatnonzero(sign).astype(np.int32)
        whole = _curve(sum(held[what].values()), mine[changes], sign[changes] * size[changes])
        present = set(np.unique(kind[changes]).tolist()) | set(held[what]) if divided else set()
        if len(present) == 1:
            return whole, {KINDS[present.pop()]: whole}
        by_kind = {}
        for number in present:
            some = changes[kind[changes] == number]
            by_kind[KINDS[number]] = _curve(held[what].get(number, 0), mine[some], sign[some] * size[some])
        return whole, by_kind

    reserved, reserved_by_kind = curves("reserved")
    allocated, by_kind = curves("allocated")
    allocs = action == fields.ALLOC
    sizes = np.bincount(cause[allocs], weights=size[allocs], minlength=len(snapshot.causes))
    for segment in segments:
        for block in segment.blocks:
            if block.state != fields.INACTIVE and not sizes[block.cause]:
                sizes[block.cause] = block.requested
    largest = np.argsort(-sizes, kind="stable")
    return StreamCurves(
        stream=snapshot.streams[stream],
        reserved=reserved,
        allocated=allocated,
        active=curves("active", divided=False)[0],
        by_kind=by_kind,
        reserved_by_kind=reserved_by_kind,
        sites=[(snapshot.causes[number], int(sizes[number])) for number in largest.tolist() if sizes[number]],
    )


def _held(segments: list[Segment], what: str, kinds: npt.NDArray[np.uint8]) -> dict[int, int]:
    """Bytes at the end, by kind."""
    held: dict[int, int] = {}
    states = (fields.ALLOCATED,) if what == "allocated" else (fields.ALLOCATED, fields.PENDING)
    for segment in segments:
        if what == "reserved":
            kind = int(kinds[segment.cause])
            held[kind] = held.get(kind, 0) + segment.size
            continue
        for block in segment.blocks:
            if block.state in states:
                kind = int(kinds[block.cause])
                held[kind] = held.get(kind, 0) + block.requested
    return held


def _curve(end: int, at: Entries, deltas: Numbers) -> Curve:
    """The curve that changes by `deltas` and ends at `end`; it takes the array over."""
    start = end - int(deltas.sum())
    np.cumsum(deltas, out=deltas)
    deltas += start
    return Curve(start, at, deltas)
