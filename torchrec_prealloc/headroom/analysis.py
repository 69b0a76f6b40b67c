"""One snapshot, worked out: the timeline of each device, its main stream, and what preallocation would change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchrec_prealloc.errors import CommandError
from torchrec_prealloc.headroom.cause import Kind
from torchrec_prealloc.headroom.estimate import Estimate, Replay, estimate
from torchrec_prealloc.headroom.reading import read_snapshot
from torchrec_prealloc.headroom.snapshot import ACTIONS, Snapshot
from torchrec_prealloc.headroom.timeline import StreamCurves, Timeline, timelines

_BATCHES = frozenset({Kind.COPY, Kind.INPUT_DIST, Kind.LOOKUP, Kind.OURS, Kind.UNKNOWN})


@dataclass
class Headroom:
    """One device of one snapshot.

    Attributes:
        name: of the file, with the device where it has several
        path: of the file
        main: number of the main stream
        chosen: how that was decided, one phrase
        notes: what the figures do not say, and the remedy; one line each
    """

    name: str
    path: Path
    snapshot: Snapshot
    timeline: Timeline
    main: int
    chosen: str
    estimate: Estimate
    notes: list[str]

    @property
    def has_history(self) -> bool:
        return self.timeline.entries > 0

    @property
    def of_main(self) -> StreamCurves | None:
        return next((curves for curves in self.timeline.streams if curves.stream == self.main), None)

    @property
    def sides(self) -> list[StreamCurves]:
        """The other streams, largest first."""
        return [curves for curves in self.timeline.streams if curves.stream != self.main]


def analyse(
    path: Path,
    main_stream: int | None = None,
    replay: Replay | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> list[Headroom]:
    """Read a snapshot and work it out; one result for each device that held memory.

    Args:
        path: of the file.
        main_stream: the number of the stream that computes; by default 0, where that holds anything.
        replay: for the estimate (`estimate.estimate`).
        progress: called with each number of bytes of the file that has been read.

    Raises:
        SnapshotError: the file is no whole snapshot, or is hostile.
        CommandError: it says nothing of memory, or not of that stream.
    """
    snapshot = read_snapshot(path, progress)
    devices = timelines(snapshot)
    if not any(timeline.streams for timeline in devices):
        raise CommandError(f"{path} says of no memory at all: nothing was allocated on a device before it was written")
    results = []
    for timeline in devices:
        if not timeline.streams:
            continue
        main, chosen = _main_stream(timeline, main_stream, path)
        results.append(
            Headroom(
                name=snapshot.name if len(devices) == 1 else f"{snapshot.name}, device {timeline.device}",
                path=path,
                snapshot=snapshot,
                timeline=timeline,
                main=main,
                chosen=chosen,
                estimate=estimate(snapshot, timeline, main, replay),
                notes=_notes(snapshot, timeline, main),
            )
        )
    return results


def _main_stream(timeline: Timeline, wanted: int | None, path: Path) -> tuple[int, str]:
    streams = [curves.stream for curves in timeline.streams]
    if wanted is not None:
        if wanted not in streams:
            listed = ", ".join(map(str, sorted(streams)))
            raise CommandError(f"{path} has no stream {wanted} that holds memory; there are: {listed}")
        return wanted, "as given"
    if 0 in streams:
        return 0, "the default stream"
    return max(timeline.streams, key=_other_than_batches).stream, "the default stream holds nothing, this one most"


def _other_than_batches(curves: StreamCurves) -> int:
    """What was allocated for the model, as far as is known."""
    return max((curve.peak for kind, curve in curves.by_kind.items() if kind not in _BATCHES), default=0)


def _notes(snapshot: Snapshot, timeline: Timeline, main: int) -> list[str]:
    notes = []
    if not timeline.entries:
        notes.append(
            "Recorded without history: this is the state when it was written; peaks and the estimate need the history. "
            "Before training: torch.cuda.memory._record_memory_history(max_entries=1_000_000)"
        )
    if not snapshot.stacks:
        notes.append(
            "Recorded without stacks: what memory is for cannot be told, and all that other streams hold is taken for "
            "copies. For stacks: torch.cuda.memory._record_memory_history(context='all', stacks='python')"
        )
    held = timeline.total().start
    if timeline.entries and held > timeline.total().peak // 20:
        notes.append(
            f"The history begins when {held / (1 << 20):,.1f} MiB were reserved already (it keeps the last max_entries "
            "only); the curves are anchored at its end, and what was allocated before has no known cause."
        )
    if not timeline.is_consistent:
        notes.append(
            "The history and the state at its end do not agree (were actions left out with skip_actions?): curves and "
            "peaks are doubtful."
        )
    of_main = next((_other_than_batches(curves) for curves in timeline.streams if curves.stream == main), 0)
    for curves in timeline.streams:
        if curves.stream != main and _other_than_batches(curves) > of_main:
            notes.append(
                f"Stream {curves.stream} has more memory that is of no copy than stream {main}: if the training runs "
                f"there, say --main-stream {curves.stream}."
            )
            break
    trace = snapshot.traces[timeline.device] if timeline.device < len(snapshot.traces) else None
    if trace is not None and (failed := trace.action.count(ACTIONS.index("oom"))):
        notes.append(f"{failed} allocations failed for want of memory.")
    if snapshot.settings.get("expandable_segments") is True:
        notes.append("expandable_segments is on; the estimate has the rules of the allocator without it.")
    return notes
