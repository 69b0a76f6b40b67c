"""Which bytes of a batch travel together, and where each tensor lands.

Pure arithmetic on sizes, addresses and strides: nothing here allocates memory, touches a device or reads a tensor's
values. The result is a list of `Segment`s. Each becomes one device allocation and one copy:

* a **direct** segment is one unit that is large enough to travel from its own host memory;
* an **arena** holds many small units, gathered on the host first.

A *unit* is a run of host bytes that is copied as a whole: one tensor, or the used extent of a storage that several
tensors view, so that they view one storage on the device too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

ALIGNMENT = 64
"""Bytes to which every unit in an arena is aligned.

A multiple of every dtype's item size, so any dtype can view its place, and of the 16 bytes that vector loads on GPUs
want; also what torch's CPU allocator gives, so a kernel sees no worse alignment than on the host.
"""


Form = tuple[torch.dtype, torch.Size, tuple[int, ...]]
"""dtype, shape and strides (in elements) of a tensor."""


class Leaf(NamedTuple):
    """What the layout needs to know of one host tensor. Sizes and addresses in bytes."""

    storage: int
    """Identity of the storage the tensor views (equal for tensors that share one)."""
    start: int
    """Address of the tensor's first byte."""
    nbytes: int
    """Bytes from the tensor's first to its last element."""
    form: Form
    """Tensors of equal form can be viewed in bulk."""
    alone: bool = False
    """Whether it gets a segment of its own however small it is."""


@dataclass(slots=True)
class Unit:
    """Host bytes `[start, start + nbytes)` of one storage, and the leaves that view them."""

    start: int
    nbytes: int
    members: list[int]
    """Indices of the leaves in this unit."""
    offset: int = 0
    """Where the unit begins in its segment, in bytes."""


@dataclass(slots=True)
class Segment:
    """One device allocation and one copy."""

    units: list[Unit]
    nbytes: int
    direct: bool
    """Whether the only unit is copied from its own host memory; otherwise the units are gathered first."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Slices `[first, end)` of `units` whose leaves have one form and lie at equal distances: viewed in bulk."""


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def plan(leaves: Sequence[Leaf], direct_bytes: int, taken: int = 0) -> list[Segment]:
    """Lay out `leaves`: units of at least `direct_bytes` bytes alone, all others in one arena.

    Args:
        leaves: one entry for each distinct tensor.
        direct_bytes: smallest unit, in bytes, that gets a segment of its own; so do those of leaves that are `alone`.
        taken: bytes at the start of the arena that are somebody else's; a multiple of `ALIGNMENT`.

    Returns:
        The segments, direct ones first, in the order of the leaves. Every leaf is a member of exactly one unit.
    """
    segments: list[Segment] = []
    small: list[Unit] = []
    for unit in _units(leaves):
        if unit.nbytes >= direct_bytes or leaves[unit.members[0]].alone:
            segments.append(_place([unit], direct=True))
        else:
            small.append(unit)
    if small or taken:
        segments.append(_arena(small, leaves, taken))
    return segments


def _units(leaves: Sequence[Leaf]) -> list[Unit]:
    by_storage: dict[int, list[int]] = {}
    for index, leaf in enumerate(leaves):
        by_storage.setdefault(leaf.storage, []).append(index)
    units: list[Unit] = []
    for members in by_storage.values():
        if len(members) == 1:
            leaf = leaves[members[0]]
            units.append(Unit(leaf.start, leaf.nbytes, members))
        else:
            units.extend(_extents(members, leaves))
    return units


def _extents(members: list[int], leaves: Sequence[Leaf]) -> list[Unit]:
    """Group the views of one storage into extents of which the views cover at least half.

    Views far apart in a large storage travel apart: what lies between them is nobody's.
    """
    units: list[Unit] = []
    covered = end = 0
    for index in sorted(members, key=lambda i: leaves[i].start):
        leaf = leaves[index]
        leaf_end = leaf.start + leaf.nbytes
        if units:
            unit = units[-1]
            new_end = max(end, leaf_end)
            new_covered = covered + max(0, leaf_end - max(end, leaf.start))
            if new_end - unit.start <= 2 * new_covered:
                unit.members.append(index)
                unit.nbytes, end, covered = new_end - unit.start, new_end, new_covered
                continue
        units.append(Unit(leaf.start, leaf.nbytes, [index]))
        end, covered = leaf_end, leaf.nbytes
    return units


def _arena(units: list[Unit], leaves: Sequence[Leaf], taken: int) -> Segment:
    by_form: dict[Form | None, list[Unit]] = {}
    for unit in units:
        form = leaves[unit.members[0]].form if len(unit.members) == 1 else None
        by_form.setdefault(form, []).append(unit)
    segment = _place([unit for same in by_form.values() for unit in same], direct=False, offset=taken)
    first = 0
    for form, same in by_form.items():
        if form is not None and len(same) > 1:
            segment.runs.append((first, first + len(same)))
        first += len(same)
    return segment


def _place(units: list[Unit], direct: bool, offset: int = 0) -> Segment:
    for unit in units:
        # An extent keeps its host address modulo the alignment, so each of its views keeps its own alignment. A
        # tensor alone starts aligned wherever it came from.
        phase = unit.start % ALIGNMENT if len(unit.members) > 1 else 0
        unit.offset = offset + phase
        offset += aligned(phase + unit.nbytes)
    return Segment(units, max(offset, ALIGNMENT), direct)
