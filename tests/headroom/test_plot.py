"""The picture has each stream in its colour: bands of reserved and allocated memory, and segments with blocks."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchrec_prealloc.bench.plot import PlotUnavailable
from torchrec_prealloc.headroom.analysis import Headroom, analyse
from torchrec_prealloc.headroom.plot import write_plot
from torchrec_prealloc.headroom.rectangles import blocks_of, segments_of

from .written import COPY, SLOT, SLOTS, Written, random_history


def found_of(written: Written, path: Path, history: bool = True) -> Headroom:
    (found,) = analyse(written.dump(path / "s.pickle", history=history))
    return found


@pytest.mark.parametrize("history", [True, False])
def test_a_png_is_written(tmp_path: Path, history: bool) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "s.png"
    write_plot(found_of(random_history(1), tmp_path, history), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_history_of_one_event_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = Written()
    written.segment(0)
    write_plot(found_of(written, tmp_path), tmp_path / "s.png")
    assert (tmp_path / "s.png").exists()


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotUnavailable, match=r"pip install 'torchrec-prealloc\[plot\]'"):
        write_plot(found_of(random_history(1), tmp_path), tmp_path / "s.png")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(seed=st.integers(0, 1_000), first=st.integers(0, 119))
def test_segments_are_as_high_as_what_is_reserved_and_never_overlap(seed: int, first: int, tmp_path: Path) -> None:
    written = random_history(seed)
    (found,) = analyse(written.dump(tmp_path / "s.pickle", first=first))
    segments = segments_of(found.snapshot, 0)
    for curves in found.timeline.streams:
        mine = [segment for segment in segments if segment.stream == curves.stream]
        for entry in range(120 - first):
            standing = sorted((s for s in mine if s.begin <= entry < s.end), key=lambda segment: segment.place)
            assert sum(segment.size for segment in standing) == curves.reserved.after(entry)
            for lower, upper in itertools.pairwise(standing):
                assert lower.place + lower.size <= upper.place
    blocks = blocks_of(found.snapshot, 0, segments, least=1)
    for curves in found.timeline.streams:
        for entry in range(120 - first):
            standing = [b for b in blocks if b.stream == curves.stream and b.begin <= entry < b.end]
            assert sum(block.size for block in standing) == curves.active.after(entry)
            around = [s for s in segments if s.stream == curves.stream and s.begin <= entry < s.end]
            for block in standing:
                (segment,) = [s for s in around if s.address <= block.address < s.address + s.size]
                assert block.place - segment.place == block.address - segment.address


def test_a_block_lies_in_its_segment(tmp_path: Path) -> None:
    written = Written()
    for _ in range(SLOTS + 1):
        written.alloc(7, SLOT // 2, COPY)
    found = found_of(written, tmp_path)
    segments = segments_of(found.snapshot, 0)
    assert [segment.place for segment in segments] == [0, SLOT * SLOTS]
    blocks = blocks_of(found.snapshot, 0, segments, least=1)
    assert sorted(block.place for block in blocks) == [slot * SLOT for slot in range(SLOTS + 1)]
    assert blocks_of(found.snapshot, 0, segments, least=SLOT) == []
