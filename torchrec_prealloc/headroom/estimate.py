"""What preallocation would give back: the peak of reserved memory, with TorchRec's copies moved to the main stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from torchrec_prealloc.headroom import snapshot as fields
from torchrec_prealloc.headroom.cause import Kind
from torchrec_prealloc.headroom.snapshot import Snapshot
from torchrec_prealloc.headroom.timeline import Curve, StreamCurves, Timeline, summed


@dataclass(frozen=True)
class Move:
    """One allocation (`size` bytes) or free (0) of the main stream's pool, as it would be. `key` names the block."""

    key: int
    size: int
    is_copy: bool = False


@dataclass(frozen=True)
class Estimate:
    """Bytes; all are peaks.

    Attributes:
        now: reserved by all streams
        copies_reserved: of it by side streams for TorchRec's copies
        copies_alive: what of these copies was alive
        main_reserved: of `now` by the main stream
        together: what the main stream's tensors and these copies would need together, if nothing were lost
        main_after: what the main stream's pool would reserve then
        after: what all streams would reserve then
        replayed: `main_after` is what PyTorch's allocator rules give, not the least that is possible
        rounding: a `size_rounding` with which it would be clearly less; 0: there is none, or none was tried
        after_rounding: `after` with that
        by_stack: stacks said which allocations are copies; if not, all that side streams hold was taken for them
    """

    now: int
    copies_reserved: int
    copies_alive: int
    main_reserved: int
    together: int
    main_after: int
    after: int
    replayed: bool
    rounding: int
    after_rounding: int
    by_stack: bool

    @property
    def gives_back(self) -> int:
        """Negative where it would cost."""
        return self.now - self.after


Replay = Callable[[Iterable[Move], int | None], int | None]
"""What the main stream's pool reserves at most when it is given these moves, with this `size_rounding` (None: the
default); None: cannot be told."""

COARSER = (4, 2, 1)
"""Values of `size_rounding` that are tried where much would be lost to holes."""
_MUCH = 0.05
"""Of what is reserved."""


def estimate(snapshot: Snapshot, timeline: Timeline, main: int, replay: Replay | None = None) -> Estimate:
    """What preallocation would change on one device.

    Args:
        main: the number of the main stream.
        replay: runs the history again; without it the least that is possible stands for what would be reserved.
    """
    by_stack = snapshot.stacks > 0
    empty = Curve(0, np.zeros(0, np.int32), np.zeros(0, np.int64))
    of_main = next((curves for curves in timeline.streams if curves.stream == main), None)
    main_reserved, main_active = (of_main.reserved, of_main.active) if of_main else (empty, empty)
    copies_reserved, copies_alive, rest = [], [], []
    for curves in timeline.streams:
        if curves.stream == main:
            continue
        moved = moved_kinds(curves, by_stack)
        copies_reserved += [curve for kind, curve in curves.reserved_by_kind.items() if kind in moved]
        copies_alive += [curve for kind, curve in curves.by_kind.items() if kind in moved]
        rest += [curve for kind, curve in curves.reserved_by_kind.items() if kind not in moved]
    together = summed([main_active, *copies_alive]).peak
    now, least, others = timeline.total().peak, max(main_reserved.peak, together), summed(rest).peak
    replayed, rounding, best = None, 0, 0
    if replay is not None and copies_alive and timeline.entries:
        replayed = replay(moves(snapshot, timeline, main), None)
    main_after = least if replayed is None else max(main_reserved.peak, replayed)
    if replay is not None and main_after > least + _MUCH * now:
        best = main_after - int(_MUCH * now)
        for divisions in COARSER:
            tried = replay(moves(snapshot, timeline, main), divisions)
            if tried is not None and max(main_reserved.peak, tried) < best:
                rounding, best = divisions, max(main_reserved.peak, tried)
    return Estimate(
        now=now,
        copies_reserved=summed(copies_reserved).peak,
        copies_alive=summed(copies_alive).peak,
        main_reserved=main_reserved.peak,
        together=together,
        main_after=main_after,
        after=main_after + others,
        replayed=replayed is not None,
        rounding=rounding,
        after_rounding=best + others if rounding else main_after + others,
        by_stack=by_stack,
    )


def moved_kinds(curves: StreamCurves, by_stack: bool) -> frozenset[Kind]:
    """What preallocation takes off a side stream. Memory without a stack counts as what most of the stream's is."""
    if not by_stack:
        return frozenset(Kind)
    known = [(cause.kind, nbytes) for cause, nbytes in curves.sites if cause.kind is not Kind.UNKNOWN]
    copied = sum(nbytes for kind, nbytes in known if kind is Kind.COPY)
    mostly = copied > 0 and 2 * copied >= sum(nbytes for _, nbytes in known)
    return frozenset({Kind.COPY, Kind.UNKNOWN}) if mostly else frozenset({Kind.COPY})


def moves(snapshot: Snapshot, timeline: Timeline, main: int) -> Iterator[Move]:
    """What the main stream's pool would be asked for: its own allocations, and the copies, in the history's order.

    What was held before the history begins comes first. A block of the main stream returns when it did; a copy
    returns when it was freed, since it waits for no `record_stream`.
    """
    sides = [curves for curves in timeline.streams if curves.stream != main]
    moved = {curves.stream: moved_kinds(curves, snapshot.stacks > 0) for curves in sides}
    alive: dict[int, int] = {}  # by address: the block's key
    for address, size, is_copy in _held_before(snapshot, timeline.device, main, moved):
        alive[address] = key = -1 - len(alive)
        yield Move(key, size, is_copy)
    for entry, address, size, is_copy in _history(snapshot, timeline.device, main, moved):
        if size:
            alive[address] = entry
            yield Move(entry, size, is_copy)
        elif address in alive:
            yield Move(alive.pop(address), 0)


_Moved = dict[int, frozenset[Kind]]
"""By the number of a side stream: what would be on the main stream."""


def _history(snapshot: Snapshot, device: int, main: int, moved: _Moved) -> Iterator[tuple[int, int, int, bool]]:
    """Entry, address, size (0: a free), and whether it is a copy, of what concerns the main stream's pool."""
    trace = snapshot.traces[device]
    causes = [cause.kind for cause in snapshot.causes]
    others: set[int] = set()  # what side streams allocated that stays there
    of_copies, of_main = trace.ends()
    for entry, action in enumerate(trace.action):
        if action != fields.ALLOC and action not in of_copies and action not in of_main:
            continue
        stream = snapshot.streams[trace.stream[entry]]
        if stream != main and stream not in moved:
            continue
        address = trace.address[entry]
        if action != fields.ALLOC:
            if action not in (of_main if stream == main else of_copies):
                continue
            if address in others:
                others.discard(address)
            else:
                yield entry, address, 0, stream != main
        elif stream == main or causes[trace.cause[entry]] in moved[stream]:
            yield entry, address, trace.size[entry], stream != main
        else:
            others.add(address)


def _held_before(snapshot: Snapshot, device: int, main: int, moved: _Moved) -> Iterator[tuple[int, int, bool]]:
    """Address, size, and whether it is a copy, of the blocks that the history finds allocated."""
    trace = snapshot.traces[device]
    alive: set[int] = set()
    for entry, address, size, is_copy in _history(snapshot, device, main, moved):
        if size:
            alive.add(address)
        elif address in alive:
            alive.discard(address)
        # Nobody knows what it was for: a copy, where all that is unknown counts as one.
        elif not is_copy or Kind.UNKNOWN in moved[snapshot.streams[trace.stream[entry]]]:
            yield address, trace.size[entry], is_copy
    causes = [cause.kind for cause in snapshot.causes]
    for segment in snapshot.segments:
        stream = snapshot.streams[segment.stream]
        if segment.device != device or (stream != main and stream not in moved):
            continue
        for block in segment.blocks:
            wanted = stream == main or causes[block.cause] in moved[stream]
            if wanted and block.state == fields.ALLOCATED and block.address not in alive:
                yield block.address, block.requested, stream != main
