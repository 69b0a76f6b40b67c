"""What preallocation would give back, against what it gives back when the same training runs with it (simulated)."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed import train_pipeline as theirs

from torchrec_prealloc import prealloc_pipeline
from torchrec_prealloc.headroom import replay
from torchrec_prealloc.headroom.analysis import Headroom, analyse
from torchrec_prealloc.headroom.cause import Kind
from torchrec_prealloc.headroom.estimate import Move, moves

from .trained import MIB, snapshot_of
from .written import COPY, INPUT_DIST, OTHER, SLOT, SLOTS, Written

TOLERANCE = 0.05
"""Of what ours really reserves."""


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("TrainPipelineBase", {}),
        ("TrainPipelineBase", {"layers": 3}),
        ("TrainPipelineSparseDist", {}),
        # Its sizes leave holes.
        pytest.param("TrainPipelineSparseDist", {"layers": 3, "steps": 25, "largest": 32}, marks=pytest.mark.long),
    ],
)
def test_the_estimate_is_what_ours_reserves(
    name: str, how: dict[str, int], simulated_accelerator: torch.device, tmp_path: Path
) -> None:
    pipeline = getattr(theirs, name)
    path = tmp_path / "theirs.pickle"
    reserved = snapshot_of(pipeline, simulated_accelerator, path, **how)
    (found,) = analyse(path, replay=replay.reserved)
    before = found.timeline.total().start  # of other tests
    ours = snapshot_of(prealloc_pipeline(pipeline), simulated_accelerator, tmp_path / "ours.pickle", **how)

    copies = max(found.sides, key=lambda curves: curves.reserved.peak)
    assert copies.by_kind[Kind.COPY].peak > 12 * MIB
    assert found.estimate.replayed
    assert found.estimate.now - before == pytest.approx(reserved, rel=TOLERANCE, abs=2 * MIB)
    assert found.estimate.after - before == pytest.approx(ours, rel=TOLERANCE, abs=2 * MIB)
    assert found.estimate.gives_back == pytest.approx(reserved - ours, abs=TOLERANCE * ours + 4 * MIB)
    assert bool(found.estimate.rounding) == ("steps" in how)

    if found.estimate.rounding:
        with_rounding = functools.partial(
            prealloc_pipeline(pipeline), prealloc={"size_rounding": found.estimate.rounding}
        )
        ours = snapshot_of(with_rounding, simulated_accelerator, tmp_path / "rounded.pickle", **how)
        assert found.estimate.after_rounding - before == pytest.approx(ours, rel=TOLERANCE, abs=2 * MIB)

    (with_ours,) = analyse(tmp_path / "ours.pickle", replay=replay.reserved)
    assert all(Kind.COPY not in c.by_kind or c.by_kind[Kind.COPY].peak < MIB for c in with_ours.sides)
    assert with_ours.estimate.gives_back == 0
    assert with_ours.of_main is not None
    assert with_ours.of_main.by_kind[Kind.OURS].peak > 12 * MIB


def found_of(written: Written, path: Path, main: int | None = None, **how: Any) -> Headroom:
    (found,) = analyse(written.dump(path / "s.pickle", **how), main)
    return found


def both() -> Written:
    """The main stream has 10 bytes of its own, a copy comes and goes, and the input dist keeps something."""
    written = Written()
    first = written.alloc(0, 10)
    copied = written.alloc(7, 1_000, COPY)
    written.alloc(8, 300, INPUT_DIST)
    written.free(copied, wait=True)
    written.free(first)
    written.alloc(0, 20)
    written.complete(copied)
    return written


def test_without_a_replay_the_least_that_is_possible_is_said(tmp_path: Path) -> None:
    estimate = found_of(both(), tmp_path).estimate
    segment = SLOT * SLOTS
    assert (estimate.now, estimate.copies_reserved, estimate.copies_alive) == (3 * segment, segment, 1_000)
    assert (estimate.main_reserved, estimate.together) == (segment, 1_010)
    assert (estimate.main_after, estimate.after, estimate.gives_back) == (segment, 2 * segment, segment)
    assert not estimate.replayed
    assert estimate.by_stack


def test_without_stacks_all_of_side_streams_counts_as_copies(tmp_path: Path) -> None:
    written = both()
    written._stacks = False
    for entry in written.trace:
        del entry["frames"]
    estimate = found_of(written, tmp_path).estimate
    assert (estimate.copies_reserved, estimate.copies_alive, estimate.by_stack) == (2 * SLOT * SLOTS, 1_300, False)


@pytest.mark.parametrize(
    ("reserves", "rounding", "tried"),
    [
        ({None: 5 * MIB, 4: 4 * MIB, 2: 4 * MIB, 1: 4 * MIB}, 4, [None, 4, 2, 1]),
        ({None: 9 * MIB, 4: 9 * MIB, 2: 8 * MIB, 1: 7 * MIB}, 1, [None, 4, 2, 1]),
        ({None: 9 * MIB, 4: None, 2: 9 * MIB, 1: 12 * MIB}, 0, [None, 4, 2, 1]),
        ({None: 4 * MIB}, 0, [None]),
        ({None: None}, 0, [None]),
    ],
)
def test_coarser_rounding_is_tried_where_much_is_lost_to_holes(
    reserves: dict[int | None, int | None], rounding: int, tried: list[int | None], tmp_path: Path
) -> None:
    asked: list[int | None] = []

    def replayed(asked_for: Iterable[Move], size_rounding: int | None) -> int | None:
        asked.append(size_rounding)
        assert len(list(asked_for)) == 5
        return reserves[size_rounding]

    (found,) = analyse(both().dump(tmp_path / "s.pickle"), replay=replayed)
    assert asked == tried
    assert found.estimate.rounding == rounding
    dist = SLOT * SLOTS
    assert found.estimate.after == max(reserves[None] or 0, SLOT * SLOTS) + dist
    assert found.estimate.after_rounding == max(reserves[rounding or None] or 0, SLOT * SLOTS) + dist


def test_what_is_replayed_is_main_and_copies_and_copies_wait_for_nobody(tmp_path: Path) -> None:
    written = both()
    found = found_of(written, tmp_path)
    asked = list(moves(found.snapshot, found.timeline, 0))
    keys = {move.key for move in asked}
    sizes = [(10, False), (1_000, True), (0, False), (0, False), (20, False)]
    assert [(move.size, move.is_copy) for move in asked] == sizes
    assert [asked[2].key, asked[3].key] == [asked[1].key, asked[0].key]
    assert len(keys) == 3


def test_what_was_there_before_the_history_is_replayed_first(tmp_path: Path) -> None:
    written = Written()
    kept, freed, copied = written.alloc(0, 10), written.alloc(0, 20), written.alloc(7, 1_000, COPY)
    dist = written.alloc(7, 5, INPUT_DIST)
    begin = len(written.trace)
    written.alloc(7, 2_000, COPY)
    other = written.alloc(7, 7, INPUT_DIST)
    for address in (freed, copied, other):
        written.free(address)
    found = found_of(written, tmp_path, first=begin)
    asked = list(moves(found.snapshot, found.timeline, 0))
    assert kept
    assert dist
    assert sorted((move.size, move.is_copy) for move in asked[:3]) == [(10, False), (20, False), (1_000, True)]
    assert [(move.size, move.is_copy) for move in asked[3:]] == [(2_000, True), (0, False), (0, False)]


def test_a_stream_is_main_as_given_or_0_or_the_models(tmp_path: Path) -> None:
    assert (found_of(both(), tmp_path).main, found_of(both(), tmp_path, 8).main) == (0, 8)
    written = Written()
    written.alloc(5, 1_000, COPY)
    written.alloc(6, 10, OTHER)
    assert found_of(written, tmp_path).main == 6


@pytest.mark.usefixtures("simulated_accelerator")
def test_a_replay_has_the_allocators_rules() -> None:
    assert replay.unavailable() == ""
    mib = 1 << 20
    assert replay.reserved([Move(1, 512), Move(2, 3 * mib)]) == 22 * mib  # a small and a large segment
    assert replay.reserved([Move(1, 30 * mib), Move(1, 0), Move(2, 30 * mib)]) == 30 * mib  # used again
    assert replay.reserved([Move(1, 30 * mib), Move(1, 0), Move(2, 31 * mib)]) == 62 * mib  # does not fit
    copies = [Move(1, 65 * mib, True), Move(1, 0), Move(2, 71 * mib, True)]
    assert replay.reserved(copies) == 72 * mib  # rounded up as ours are
    assert replay.reserved(copies, 1) == 128 * mib
    assert replay.reserved(copies, 0) == (66 + 72) * mib
    assert replay.reserved([]) == 0
