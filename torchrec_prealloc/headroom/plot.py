"""A snapshot as a picture: what each stream reserved and what of it was in use, and the segments, over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchrec_prealloc.bench.plot import NO_MATPLOTLIB, PlotUnavailable
from torchrec_prealloc.headroom.analysis import Headroom
from torchrec_prealloc.headroom.cause import Kind
from torchrec_prealloc.headroom.rectangles import Rectangle, blocks_of, segments_of
from torchrec_prealloc.headroom.report import buckets
from torchrec_prealloc.headroom.timeline import StreamCurves

Shades = tuple[str, str, str]
"""Of one stream: reserved, waiting, allocated."""

# The main stream's, then the others', then of all that are left.
_MAIN = ("#d5e3f3", "#8fb3dc", "#2f6db3")
_SIDES = (
    ("#fbdfcf", "#f0a582", "#d1521b"),
    ("#d9ecd3", "#97c68f", "#3f8a3a"),
    ("#e8dcf2", "#bb9bd4", "#7d4aa6"),
    ("#f5e9c4", "#dcc06b", "#a97f0e"),
)
_REST = ("#e2e2e2", "#b5b5b5", "#777777")
_INK, _QUIET = "#1f2933", "#616e7c"
_BUCKETS = 1_000
_MOST_LABELS = 4


def write_plot(found: Headroom, path: Path) -> None:
    """Draw one device of a snapshot as a PNG. Without history it shows the state at the end as bars.

    Args:
        path: of the PNG; its folder is made where it is missing.

    Raises:
        PlotUnavailable: there is no matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotUnavailable(NO_MATPLOTLIB) from error

    figure = Figure(figsize=(11, 8 if found.has_history else 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    colours = _colours(found)
    panels: list[Any]
    if found.has_history:
        above, below = figure.subplots(2, 1, sharex=True)
        _draw_curves(above, found, colours)
        _draw_segments(below, found, colours)
        below.set_xlabel("seconds" if found.timeline.seconds else "events", fontsize=9, color=_INK)
        above.set_xlim(0, _length(found))
        panels = [above, below]
    else:
        panels = [figure.subplots()]
        _draw_state(panels[0], found, colours)
    for panel in panels:
        panel.tick_params(labelsize=8, colors=_QUIET)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    figure.suptitle(_title(found), color=_INK, fontsize=12, fontweight="bold", x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, format="png")


def _title(found: Headroom) -> str:
    sides = sum(curves.reserved.peak for curves in found.sides)
    most = "at most " if found.has_history else ""
    return f"{found.name}: {most}{_bytes(found.estimate.now)} reserved, {_bytes(sides)} of it by side streams"


def _colours(found: Headroom) -> dict[int, Shades]:
    colours: dict[int, Shades] = {curves.stream: _REST for curves in found.sides}
    colours.update(zip((curves.stream for curves in found.sides), _SIDES, strict=False))
    return {**colours, found.main: _MAIN}


def _length(found: Headroom) -> float:
    """Of the horizontal axis: seconds, or events."""
    return found.timeline.seconds or max(found.timeline.entries - 1, 1)


def _order(found: Headroom) -> list[StreamCurves]:
    return [*([found.of_main] if found.of_main else []), *found.sides]


def _draw_curves(panel: Any, found: Headroom, colours: dict[int, Shades]) -> None:
    """One band for each stream, as high as what it reserves, darker as far as it is in use."""
    from matplotlib.patches import Patch

    times = found.timeline.times
    moments = np.linspace(0, _length(found), _BUCKETS)
    unit, name = _unit(found.estimate.now)
    floor = np.zeros(_BUCKETS)
    labels: list[Patch] = []
    for curves in _order(found):
        shades = colours[curves.stream]
        reserved = buckets(times, curves.reserved, _BUCKETS) / unit
        for curve, shade in zip((curves.reserved, curves.active, curves.allocated), shades, strict=True):
            height = np.minimum(buckets(times, curve, _BUCKETS) / unit, reserved)
            panel.fill_between(moments, floor, floor + height, color=shade, linewidth=0, step="mid")
        panel.step(moments, floor + reserved, where="mid", color=shades[2], linewidth=0.8)
        floor = floor + reserved
        if len(labels) < _MOST_LABELS:
            labels.append(Patch(facecolor=shades[2], label=_label(found, curves)))
    top = found.estimate.now / unit
    lines = [(top, f"{top:,.1f} {name} reserved at most")]
    if found.estimate.copies_alive and found.estimate.gives_back > 0:
        after = found.estimate.after / unit
        about = "about" if found.estimate.replayed else "at least"
        lines.append((after, f"{about} {after:,.1f} {name} with preallocation"))
    for height, text in lines:
        panel.axhline(height, color=_INK, linewidth=0.9, linestyle=(0, (4, 3)))
        panel.annotate(
            text, (1, height), (-4, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
            ha="right", fontsize=8, color=_INK,
            bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.75},
        )  # fmt: skip
    panel.set_ylim(0, top * 1.12 or 1)
    panel.set_ylabel(name, fontsize=9, color=_INK)
    panel.set_title(
        "Each stream: allocated (dark), freed but waiting for other streams, reserved (light)",
        fontsize=10, loc="left", color=_INK,
    )  # fmt: skip
    # Beside the title, where no curve is.
    panel.legend(
        handles=labels, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(labels), frameon=False,
        borderaxespad=0.2, columnspacing=1.2, handlelength=1.2, labelcolor=_INK,
    )  # fmt: skip


def _label(found: Headroom, curves: StreamCurves) -> str:
    if curves.stream == found.main:
        return f"stream {curves.stream} (main)"
    known = {kind: curve.peak for kind, curve in curves.by_kind.items() if kind not in (Kind.UNKNOWN, Kind.OTHER)}
    purpose = max(known, key=lambda kind: known[kind]).value if any(known.values()) else ""
    return f"stream {curves.stream}" + (f": {purpose}" if purpose else "")


def _draw_segments(panel: Any, found: Headroom, colours: dict[int, Shades]) -> None:
    """Each segment as a bar over its time, as high as it is large, with the blocks in use in it."""
    device = found.timeline.device
    segments = segments_of(found.snapshot, device)
    unit, name = _unit(found.estimate.now)
    height: dict[int, int] = {}
    for segment in segments:
        height[segment.stream] = max(height.get(segment.stream, 0), segment.place + segment.size)
    floors, floor = {}, 0
    for curves in _order(found):
        if curves.stream in height:
            floors[curves.stream], floor = floor, floor + height[curves.stream]
    blocks = blocks_of(found.snapshot, device, segments, least=max(1, floor // 1_000))
    for shade, rectangles in ((0, segments), (2, blocks)):
        for stream, bottom in floors.items():
            mine = [rectangle for rectangle in rectangles if rectangle.stream == stream]
            _draw_rectangles(panel, mine, bottom, unit, found, colours[stream][shade], edges=shade == 0)
    for bottom in list(floors.values())[1:]:
        panel.axhline(bottom / unit, color=_INK, linewidth=0.8)
    panel.set_ylim(0, max(floor, 1) / unit * 1.02)
    panel.set_ylabel(name, fontsize=9, color=_INK)
    panel.set_title(
        "Each stream's segments (light), and the blocks in them until they can be used again (dark)",
        fontsize=10, loc="left", color=_INK,
    )  # fmt: skip


def _draw_rectangles(
    panel: Any, rectangles: Sequence[Rectangle], bottom: int, unit: int, found: Headroom, colour: str, edges: bool
) -> None:
    from matplotlib.collections import PolyCollection

    times = found.timeline.times
    scale = _length(found) / max(int(times[-1] - times[0]), 1)
    corners = []
    for rectangle in rectangles:
        begin, end = max(rectangle.begin, 0), min(rectangle.end, len(times) - 1)
        left, right = (float(times[entry] - times[0]) * scale for entry in (begin, end))
        low = (bottom + rectangle.place) / unit
        high = low + rectangle.size / unit
        corners.append([(left, low), (right, low), (right, high), (left, high)])
    width = 0.5 if edges else 0.15
    drawn = PolyCollection(corners, facecolors=colour, edgecolors="white", linewidths=width)
    panel.add_collection(drawn, autolim=False)


def _draw_state(panel: Any, found: Headroom, colours: dict[int, Shades]) -> None:
    """Without a history: one bar for each stream."""
    unit, name = _unit(found.estimate.now)
    streams = _order(found)[::-1]
    for row, curves in enumerate(streams):
        held = (curves.reserved.peak, curves.active.peak, curves.allocated.peak)
        for nbytes, shade in zip(held, colours[curves.stream], strict=True):
            panel.barh(row, nbytes / unit, color=shade, height=0.62)
    panel.set_yticks(range(len(streams)), [_label(found, curves) for curves in streams])
    panel.set_xlabel(name, fontsize=9, color=_INK)
    panel.set_title(
        "Each stream when it was written (no history): allocated (dark), reserved (light)",
        fontsize=10, loc="left", color=_INK,
    )  # fmt: skip


def _unit(nbytes: int) -> tuple[int, str]:
    return (1 << 30, "GiB") if nbytes >= 4 << 30 else (1 << 20, "MiB")


def _bytes(nbytes: int) -> str:
    unit, name = _unit(nbytes)
    return f"{nbytes / unit:,.1f} {name}"
