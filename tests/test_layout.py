"""Where each tensor of a batch lands: arithmetic only."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_prealloc.layout import ALIGNMENT, Leaf, Segment, plan

MIB = 1 << 20


def leaf(storage: int, start: int, nbytes: int) -> Leaf:
    return Leaf(storage, start, nbytes, (torch.uint8, torch.Size((nbytes,)), (1,)))


def places(segments: list[Segment], leaves: list[Leaf]) -> dict[int, tuple[int, int, int]]:
    """For each leaf its segment, and its first and last byte there."""
    return {
        index: (number, at := unit.offset + leaves[index].start - unit.start, at + leaves[index].nbytes)
        for number, segment in enumerate(segments)
        for unit in segment.units
        for index in unit.members
    }


def test_small_tensors_share_one_arena_and_large_ones_travel_alone() -> None:
    leaves = [leaf(1, 0, 100), leaf(2, 4096, 2 * MIB), leaf(3, 8192, 50)]
    direct, arena = plan(leaves, direct_bytes=MIB)
    assert direct.direct
    assert direct.units[0].members == [1]
    assert not arena.direct
    assert [unit.members for unit in arena.units] == [[0], [2]]
    assert arena.nbytes == 128 + 64


def test_nothing_to_move_needs_no_memory() -> None:
    assert plan([], direct_bytes=MIB) == []


def test_a_batch_of_empty_tensors_has_an_arena_to_view() -> None:
    (arena,) = plan([leaf(-1, 0, 0), leaf(-2, 0, 0)], direct_bytes=MIB)
    assert arena.nbytes == ALIGNMENT


def test_views_of_one_storage_travel_as_one_extent_and_stay_views_of_it() -> None:
    leaves = [leaf(1, 1000, 40), leaf(1, 1040, 60), leaf(1, 1010, 20)]
    (arena,) = plan(leaves, direct_bytes=MIB)
    (unit,) = arena.units
    assert sorted(unit.members) == [0, 1, 2]
    assert unit.nbytes == 100
    found = places([arena], leaves)
    assert found[1][1] - found[0][1] == 40
    assert found[2][1] - found[0][1] == 10


def test_a_small_slice_of_a_large_storage_brings_only_itself() -> None:
    (arena,) = plan([leaf(1, 10 * MIB, 64)], direct_bytes=MIB)
    assert arena.nbytes == 64


def test_slices_far_apart_in_one_storage_travel_apart() -> None:
    leaves = [leaf(1, 0, 64), leaf(1, 500 * MIB, 64)]
    (arena,) = plan(leaves, direct_bytes=MIB)
    assert arena.nbytes == 128
    assert len(arena.units) == 2


def test_an_extent_keeps_the_alignment_its_views_have_on_the_host() -> None:
    leaves = [leaf(1, 1024 + 8, 100), leaf(1, 1024 + 64, 200)]
    (arena,) = plan(leaves, direct_bytes=MIB)
    found = places([arena], leaves)
    assert [found[index][1] % ALIGNMENT for index in (0, 1)] == [8, 0]


def test_tensors_of_equal_form_are_one_run_at_equal_distances() -> None:
    leaves = [leaf(1, 0, 100), leaf(2, 0, 30), leaf(3, 0, 100), leaf(4, 0, 100)]
    (arena,) = plan(leaves, direct_bytes=MIB)
    ((first, end),) = arena.runs
    run = arena.units[first:end]
    assert [unit.members for unit in run] == [[0], [2], [3]]
    assert {later.offset - one.offset for one, later in itertools.pairwise(run)} == {128}


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4000), st.integers(0, 600)), max_size=30),
    st.integers(1, 700),
)
def test_every_leaf_has_one_place_and_storages_do_not_overlap(
    spans: list[tuple[int, int, int]], direct_bytes: int
) -> None:
    # A storage's number also gives its address range, so that different storages cannot overlap on the host.
    leaves = [leaf(storage, storage * 10000 + start, nbytes) for storage, start, nbytes in spans]
    segments = plan(leaves, direct_bytes)
    found = places(segments, leaves)
    assert sorted(found) == list(range(len(leaves)))
    for one, (segment, start, end) in found.items():
        assert 0 <= start <= end <= segments[segment].nbytes
        for other, (other_segment, other_start, other_end) in found.items():
            overlap = segment == other_segment and start < other_end and other_start < end
            if one != other and overlap:
                assert leaves[one].storage == leaves[other].storage
                # The very bytes that they share on the host.
                assert other_start - start == leaves[other].start - leaves[one].start


@given(st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 500)), min_size=1, max_size=40))
def test_at_most_half_of_an_extent_is_bytes_that_nobody_views(spans: list[tuple[int, int]]) -> None:
    leaves = [leaf(1, start, nbytes) for start, nbytes in spans]
    for segment in plan(leaves, direct_bytes=MIB):
        for unit in segment.units:
            spanned = [leaves[index] for index in unit.members]
            viewed = {byte for one in spanned for byte in range(one.start, one.start + one.nbytes)}
            assert unit.nbytes <= 2 * len(viewed)
