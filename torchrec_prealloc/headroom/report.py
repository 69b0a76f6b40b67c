"""What a snapshot says, on one screen."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchrec_prealloc.bench.table import Column, Row, Table
from torchrec_prealloc.headroom.analysis import Headroom
from torchrec_prealloc.headroom.cause import Kind
from torchrec_prealloc.headroom.timeline import Curve

MIB = 1 << 20
_WIDTH = 110
_BARS = " ▁▂▃▄▅▆▇█"
_BUCKETS = 60
_MOST_STREAMS = 6

_STREAMS = (
    Column("peak_reserved", "peak reserved", digits=1),
    Column("peak_allocated", "peak allocated", digits=1),
    Column("reserved", "at the peak of all: reserved", digits=1),
    Column("allocated", "allocated", digits=1),
    Column("waiting", "freed, waits for streams", digits=1),
    Column("idle", "idle", digits=1),
)
_HELD = (
    Column("allocated", "peak allocated", digits=1),
    Column("reserved", "peak reserved", digits=1),
    Column("where", "where"),
)
RANKS = (
    Column("reserved", "peak reserved", digits=1),
    Column("allocated", "peak allocated", digits=1),
    Column("sides", "of reserved, not main", digits=1),
    Column("copies", "of it TorchRec's copies", digits=1),
    Column("after", "reserved with prealloc", digits=1),
    Column("back", "given back", digits=1, better="high"),
    Column("failed", "what is wrong"),
)
"""Of the table with one row for each rank. MiB."""


def text(found: Headroom) -> str:
    """The report on one device."""
    parts = [_heading(found), _streams(found).text()]
    if found.has_history:
        parts.append(_over_time(found))
    parts.append(_held(found))
    parts.append(_verdict(found))
    parts += [_wrapped(f"Note: {note}", "  ") for note in found.notes]
    return "\n\n".join(parts)


def rank_row(found: Headroom) -> Row:
    """The row of one rank, in MiB."""
    now = found.estimate
    figures: dict[str, Any] = {
        "reserved": now.now / MIB,
        "allocated": found.timeline.total("allocated").peak / MIB,
        "sides": sum(curves.reserved.peak for curves in found.sides) / MIB,
        "copies": now.copies_reserved / MIB if now.by_stack else None,
        "after": now.after / MIB if found.has_history else None,
        "back": now.gives_back / MIB if found.has_history else None,
    }
    return Row(found.name, figures)


def ranks_table(rows: Sequence[Row]) -> Table:
    """All ranks; the column of failures only where there is one."""
    columns = RANKS if any("failed" in row.figures for row in rows) else RANKS[:-1]
    return Table("MiB", columns, tuple(rows))


def as_json(found: Headroom) -> dict[str, Any]:
    """All figures, in bytes."""
    timeline = found.timeline
    return {
        "name": found.name,
        "device": timeline.device,
        "main_stream": found.main,
        "entries": timeline.entries,
        "seconds": timeline.seconds,
        "has_stacks": found.snapshot.stacks > 0,
        "peak_reserved": found.estimate.now,
        "peak_allocated": timeline.total("allocated").peak,
        "streams": [
            {
                "stream": curves.stream,
                "peak_reserved": curves.reserved.peak,
                "peak_allocated": curves.allocated.peak,
                "peak_allocated_by_kind": {kind.value: curve.peak for kind, curve in curves.by_kind.items()},
                "peak_reserved_by_kind": {kind.value: curve.peak for kind, curve in curves.reserved_by_kind.items()},
            }
            for curves in timeline.streams
        ],
        "estimate": {**vars(found.estimate), "gives_back": found.estimate.gives_back},
        "notes": found.notes,
    }


def _heading(found: Headroom) -> str:
    timeline = found.timeline
    history = f"{timeline.entries:,} events" if found.has_history else "no history"
    over = f" over {timeline.seconds:.2f} s" if timeline.seconds else ""
    stacks = "with stacks" if found.snapshot.stacks else "without stacks"
    return f"{found.name}: {history}{over}, {stacks}; main stream: {found.main} ({found.chosen}). All in MiB."


def _stream_name(found: Headroom, stream: int) -> str:
    return f"{stream} (main)" if stream == found.main else str(stream)


def _streams(found: Headroom) -> Table:
    timeline = found.timeline
    total = timeline.total()
    moment = _moment_of_peak(total)
    rows = []
    for name, reserved, allocated, active in [
        ("all", total, timeline.total("allocated"), timeline.total("active")),
        *((_stream_name(found, s.stream), s.reserved, s.allocated, s.active) for s in _ordered(found)),
    ]:
        then, used, held = reserved.after(moment), allocated.after(moment), active.after(moment)
        figures = {
            "peak_reserved": reserved.peak / MIB,
            "peak_allocated": allocated.peak / MIB,
            "reserved": then / MIB,
            "allocated": used / MIB,
            "waiting": (held - used) / MIB,
            "idle": (then - held) / MIB,
        }
        rows.append(Row(name, figures))
    return Table("stream", _STREAMS, tuple(rows))


def _ordered(found: Headroom) -> list[Any]:
    """The main stream first, then the largest."""
    main = [found.of_main] if found.of_main else []
    return [*main, *found.sides][:_MOST_STREAMS]


def _moment_of_peak(total: Curve) -> int:
    """The entry of the history after which most was reserved."""
    if not len(total.value) or total.start >= total.value.max():
        return -1
    return int(total.at[int(np.argmax(total.value))])


def _over_time(found: Headroom) -> str:
    streams = _ordered(found)
    top = max(curves.reserved.peak for curves in streams)
    names = [_stream_name(found, curves.stream) for curves in streams]
    lines = [f"Over time, from the first event to the last; a full bar is {top / MIB:,.1f} MiB:"]
    for name, curves in zip(names, streams, strict=True):
        for what, curve in (("reserved", curves.reserved), ("allocated", curves.allocated)):
            label = name if what == "reserved" else ""
            lines.append(f"{label:<{max(map(len, names))}}  {what:<9}  {_bars(found, curve, top)}")
    return "\n".join(lines)


def _bars(found: Headroom, curve: Curve, top: int) -> str:
    values = buckets(found.timeline.times, curve, _BUCKETS)
    levels = np.ceil(values / max(top, 1) * (len(_BARS) - 1)).astype(int)
    return "".join(_BARS[level] for level in levels.clip(0, len(_BARS) - 1))


def buckets(times: Any, curve: Curve, count: int) -> Any:
    """The largest value of the curve in each of `count` equal parts of the time."""
    edges = np.searchsorted(times, np.linspace(times[0], times[-1], count + 1)[1:-1])
    starts = np.concatenate(([0], edges))
    place = np.searchsorted(curve.at, starts, side="left")
    values = np.concatenate(([curve.start], curve.value))
    ends = np.concatenate((place[1:], [len(curve.value)]))
    return np.array([values[begin : end + 1].max() for begin, end in zip(place, ends, strict=True)])


def _held(found: Headroom) -> str:
    sides = found.sides
    held = sum(curves.reserved.after(_moment_of_peak(found.timeline.total())) for curves in sides)
    if not sides:
        return "No stream but the main one holds memory."
    share = held / max(found.estimate.now, 1)
    when = "at the peak" if found.has_history else "when it was written"
    rows = []
    for curves in sides[:_MOST_STREAMS]:
        kinds = sorted(
            set(curves.by_kind) | set(curves.reserved_by_kind),
            key=lambda kind: -(curves.reserved_by_kind[kind].peak if kind in curves.reserved_by_kind else 0),
        )
        for kind in kinds:
            allocated, reserved = curves.by_kind.get(kind), curves.reserved_by_kind.get(kind)
            figures: dict[str, Any] = {
                "allocated": allocated.peak / MIB if allocated else 0.0,
                "reserved": reserved.peak / MIB if reserved else 0.0,
                "where": next((cause.site for cause, _ in curves.sites if cause.kind is kind), "") or "-",
            }
            if max(figures["allocated"], figures["reserved"]) > 0:
                rows.append(Row(f"{curves.stream}: {_for(kind)}", figures))
    table = Table("stream, for", _HELD, tuple(rows)).text()
    return f"Held by other streams than the main one {when}: {held / MIB:,.1f} MiB ({share:.0%}).\n\n{table}"


def _for(kind: Kind) -> str:
    return "no stack" if kind is Kind.UNKNOWN else kind.value


def _verdict(found: Headroom) -> str:
    now = found.estimate
    if not now.copies_reserved and not now.copies_alive:
        ours = [c.by_kind[Kind.OURS].peak for c in found.timeline.streams if Kind.OURS in c.by_kind]
        with_ours = f" (this run has torchrec_prealloc: batches of {sum(ours) / MIB:,.1f} MiB)" if ours else ""
        return f"Nothing to give back: no copy's memory is on another stream than the main one{with_ours}."
    sides = "TorchRec's copies" if now.by_stack else "Other streams"
    why = (
        f"{sides} hold {now.copies_reserved / MIB:,.1f} MiB on side streams, for at most "
        f"{now.copies_alive / MIB:,.1f} MiB that were alive; the main stream reserves {now.main_reserved / MIB:,.1f} "
        f"MiB, and its own tensors and these together would need {now.together / MIB:,.1f} MiB at most."
    )
    if not found.has_history:
        return _wrapped(f"{why} What preallocation would give back cannot be told without the history.")
    if now.replayed:
        how = (
            f"How: the history run again with the copies in the main stream's pool, by the rules of PyTorch's "
            f"allocator on the simulator, gives {now.main_after / MIB:,.1f} MiB for that pool."
        )
    else:
        how = "The least that is possible, since nothing was run again: an allocator loses some to its holes."
    about = "about" if now.replayed and now.by_stack else "at most"
    back, share = now.gives_back / MIB, now.gives_back / max(now.now, 1)
    change = f"{now.now / MIB:,.1f} MiB reserved would become {now.after / MIB:,.1f} MiB"
    if now.gives_back > 0:
        first = f"Preallocation would give back {about} {back:,.1f} MiB ({share:.0%}): {change}."
    else:
        first = f"Preallocation would give back nothing here: {change}, since the sizes leave holes."
    lines = [first, f"  Why: {why}", f"  {how}"]
    if now.rounding:
        lines.append(
            f"  With size_rounding={now.rounding} batches would fit each other's memory better: "
            f"{now.after_rounding / MIB:,.1f} MiB in all, {(now.now - now.after_rounding) / MIB:,.1f} MiB given back."
        )
    return "\n".join(_wrapped(line, "  ") for line in lines)


def _wrapped(line: str, indent: str = "") -> str:
    return "\n".join(textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_on_hyphens=False))
