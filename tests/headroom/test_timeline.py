"""The curves are those of the allocator, also where the history begins in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchrec_prealloc.headroom.cause import Kind
from torchrec_prealloc.headroom.reading import read_snapshot
from torchrec_prealloc.headroom.report import buckets
from torchrec_prealloc.headroom.timeline import Curve, Timeline, timelines

from .written import COPY, INPUT_DIST, OTHER, SLOT, SLOTS, Written, random_history

WHAT = ("reserved", "allocated", "active")
once = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)


def timeline_of(written: Written, path: Path, **how: Any) -> Timeline:
    (timeline,) = timelines(read_snapshot(written.dump(path / "snapshot.pickle", **how)))
    return timeline


@once
@given(seed=st.integers(0, 10_000), cut=st.floats(0, 1))
def test_the_curves_of_each_stream_are_the_allocators_wherever_the_history_begins(
    seed: int, cut: float, tmp_path: Path
) -> None:
    written = random_history(seed)
    first = int(cut * (len(written.trace) - 1))
    timeline = timeline_of(written, tmp_path, first=first)
    assert timeline.is_consistent
    assert timeline.entries == len(written.trace) - first
    streams = {curves.stream: curves for curves in timeline.streams}
    for entry, totals in enumerate(written.totals[first:]):
        for stream, expected in totals.items():
            if stream in streams:
                assert [getattr(streams[stream], what).after(entry) for what in WHAT] == expected
            else:  # it has given all back before
                assert not any(expected)
        for number, what in enumerate(WHAT):
            assert timeline.total(what).after(entry) == sum(expected[number] for expected in totals.values())


def test_a_snapshot_without_the_older_half_gives_the_same_curves_for_the_newer(tmp_path: Path) -> None:
    written = random_history(1, events=400)
    whole, half = timeline_of(written, tmp_path), timeline_of(written, tmp_path, first=200)
    assert half.total().start > 0
    for curves in half.streams:
        other = next(one for one in whole.streams if one.stream == curves.stream)
        for what in WHAT:
            mine, theirs = getattr(curves, what), getattr(other, what)
            assert [mine.after(entry) for entry in range(-1, 200)] == [theirs.after(e) for e in range(199, 400)]


@once
@given(seed=st.integers(0, 10_000))
def test_what_is_allocated_is_divided_by_what_for(seed: int, tmp_path: Path) -> None:
    for curves in timeline_of(random_history(seed), tmp_path).streams:
        assert Kind.UNKNOWN not in curves.by_kind
        for entry in range(-1, 120):
            assert sum(curve.after(entry) for curve in curves.by_kind.values()) == curves.allocated.after(entry)
            assert sum(c.after(entry) for c in curves.reserved_by_kind.values()) == curves.reserved.after(entry)


def test_a_free_counts_for_the_kind_of_its_allocation(tmp_path: Path) -> None:
    written = Written()
    copied = written.alloc(7, 1_000, COPY)
    written.alloc(7, 500, INPUT_DIST)
    written.free(copied)  # under other frames
    written.alloc(7, 300, OTHER)
    (curves,) = timeline_of(written, tmp_path).streams
    last = {kind: curve.after(99) for kind, curve in curves.by_kind.items()}
    assert last == {Kind.COPY: 0, Kind.INPUT_DIST: 500, Kind.OTHER: 300}
    assert {kind: curve.peak for kind, curve in curves.by_kind.items()} == {**last, Kind.COPY: 1_000}
    assert curves.reserved_by_kind[Kind.COPY].peak == SLOT * SLOTS
    assert [(cause.kind, size) for cause, size in curves.sites] == [
        (Kind.COPY, 1_000),
        (Kind.INPUT_DIST, 500),
        (Kind.OTHER, 300),
    ]


def test_what_was_allocated_before_the_history_has_no_known_cause_once_it_is_freed(tmp_path: Path) -> None:
    written = Written()
    freed, kept = written.alloc(7, 1_000, COPY), written.alloc(7, 10, COPY)
    begin = len(written.trace)
    written.free(freed)
    (curves,) = timeline_of(written, tmp_path, first=begin).streams
    assert kept
    assert {kind: curve.start for kind, curve in curves.by_kind.items()} == {Kind.UNKNOWN: 1_000, Kind.COPY: 10}
    assert curves.allocated.peak == 1_010


def test_freed_memory_that_waits_for_other_streams_is_active(tmp_path: Path) -> None:
    written = Written()
    first, second = written.alloc(7, 1_000), written.alloc(7, 1_000)
    written.free(first, wait=True)
    written.free(second, wait=True)
    written.complete(first)
    (curves,) = timeline_of(written, tmp_path).streams
    last = len(written.trace) - 1
    assert (curves.allocated.after(last), curves.active.after(last)) == (0, 1_000)


@pytest.mark.parametrize("skipped", ["free_requested", "free_completed"])
def test_of_frees_that_were_not_recorded_the_others_tell(tmp_path: Path, skipped: str) -> None:
    written = Written()
    kept = written.alloc(7, 1_000)
    for _ in range(100):
        written.free(written.alloc(7, 500))
    written.trace = [entry for entry in written.trace if entry["action"] != skipped]
    timeline = timeline_of(written, tmp_path)
    assert kept
    assert timeline.is_consistent
    for what in ("allocated", "active"):
        assert [timeline.total(what).after(entry) for entry in range(1, 6)] == [1_000, 1_500, 1_000, 1_500, 1_000]


def test_a_history_that_does_not_fit_the_state_is_found_out(tmp_path: Path) -> None:
    written = random_history(3)
    written.trace = [entry for entry in written.trace if entry["action"] != "alloc"]  # skip_actions=["alloc"]
    assert timeline_of(written, tmp_path).total("allocated").start > 0  # it seems to have been there before
    written = random_history(3)
    written.trace = [entry for entry in written.trace if not entry["action"].startswith("free")]
    assert not timeline_of(written, tmp_path).is_consistent


def test_expandable_segments_grow_and_shrink(tmp_path: Path) -> None:
    written = Written()
    base = written.segment(0)
    for entry in written.trace:
        entry["action"] = entry["action"].replace("segment_alloc", "segment_map")
    written.event("segment_map", 0, base + SLOT * SLOTS, 2 * SLOT, OTHER, [1, 0, 0])
    written.event("segment_unmap", 0, base + SLOT * SLOTS, 2 * SLOT, OTHER, [-1, 0, 0])
    (curves,) = timeline_of(written, tmp_path).streams
    assert [curves.reserved.after(entry) // SLOT for entry in range(-1, 3)] == [0, 4, 6, 4]


def test_devices_are_apart(tmp_path: Path) -> None:
    import pickle

    one, other = random_history(1), random_history(2)
    both = one.snapshot()
    second = other.snapshot()
    both["device_traces"] = [both["device_traces"][0], [], second["device_traces"][0]]
    both["segments"] += [{**segment, "device": 2} for segment in second["segments"]]
    path = tmp_path / "both.pickle"
    path.write_bytes(pickle.dumps(both))
    first, last = timelines(read_snapshot(path))
    assert (first.device, last.device) == (0, 2)
    assert first.total().peak == timeline_of(one, tmp_path).total().peak
    assert last.total().peak == timeline_of(other, tmp_path).total().peak


@once
@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=40).map(sorted),
    st.lists(st.integers(0, 9), max_size=30),
    st.integers(1, 20),
)
def test_a_part_of_the_time_shows_its_largest_value(times: list[int], values: list[int], count: int) -> None:
    changes = np.arange(len(times))[: len(values)].astype(np.int32)
    curve = Curve(3, changes, np.array(values[: len(times)], np.int64))
    edges = np.linspace(times[0], times[-1], count + 1)
    begins = [0, *(next((n for n, time in enumerate(times) if time >= edge), len(times)) for edge in edges[1:-1])]
    for part, largest in enumerate(buckets(np.array(times), curve, count)):
        end = begins[part + 1] if part + 1 < count else len(times)
        assert largest == max(curve.after(entry) for entry in range(begins[part] - 1, max(end, begins[part])))


def test_a_clock_that_was_set_back_changes_no_order(tmp_path: Path) -> None:
    written = random_history(1)
    for entry in written.trace[60:]:
        entry["time_us"] -= 40_000
    times = timeline_of(written, tmp_path).times
    assert (times[1:] >= times[:-1]).all()
    assert times[-1] - times[0] == 79_000


@pytest.mark.parametrize("history", [True, False])
def test_times_are_seconds_where_there_are_any(tmp_path: Path, history: bool) -> None:
    timeline = timeline_of(random_history(1), tmp_path, history=history)
    assert timeline.seconds == pytest.approx((timeline.entries - 1) / 1_000 if history else 0)
