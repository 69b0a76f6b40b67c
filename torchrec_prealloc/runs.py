"""Runs: many small tensors of one dtype and shape, found once, then checked, gathered and viewed as one.

Batches with hundreds of tensors mostly hold many of one form: one tensor a feature, of one row a sample. Looking at
each of them in Python costs more than copying it. So the members of a run are remembered by their positions among the
batch's tensors; in the next batch of as many tensors they are checked by a few operations over the whole run, copied by
one and viewed by one. Shapes may change from batch to batch, as long as they are one shape. A batch that does not fit
what is remembered is looked at tensor by tensor, and remembered instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_prealloc.buffers import Views
from torchrec_prealloc.layout import Leaf, aligned

MIN_MEMBERS = 4
"""A shorter run costs more than its members one by one."""

_dtype = attrgetter("dtype")


class Run(NamedTuple):
    """Where a run's members are among the tensors of a batch."""

    dtype: torch.dtype
    members: Sequence[int]
    """A range where they follow one another."""
    pick: Callable[[Sequence[Any]], Sequence[Any]]
    """Takes them out of a list of as many entries as there are tensors."""

    @classmethod
    def of(cls, dtype: torch.dtype, members: Sequence[int]) -> Run:
        first, end = members[0], members[-1] + 1
        if end - first == len(members):
            return cls(dtype, range(first, end), itemgetter(slice(first, end)))
        return cls(dtype, members, itemgetter(*members))

    def put(self, into: list[Tensor], members: Sequence[Tensor]) -> None:
        """Put new members where the old ones are in a list of all tensors."""
        if isinstance(self.members, range):
            into[self.members.start : self.members.stop] = members
        else:
            for index, member in zip(self.members, members, strict=True):
                into[index] = member

    def storages(self, tensors: Sequence[Tensor], max_bytes: int) -> set[torch.UntypedStorage] | None:
        """The members' storages, or None where these tensors of one batch cannot be taken as a run.

        Members are contiguous tensors of `dtype`, smaller than `max_bytes`, each of which fills a storage of its own.
        That they are of one shape, on the host and without a gradient, `Region.gather` finds out.
        """
        members = self.pick(tensors)
        first = members[0]
        size = first.numel() * first.element_size()
        if (
            not 0 < size < max_bytes
            or set(map(type, members)) != {Tensor}
            or set(map(_dtype, members)) != {self.dtype}
        ):
            return None
        try:
            listed = list(map(Tensor.untyped_storage, members))
            # One dimension in a storage of just its size can only be contiguous.
            if first.dim() > 1 and not all(map(Tensor.is_contiguous, members)):
                return None
        except RuntimeError:  # a layout without storage or strides
            return None
        # In the members' order, which is that of their memory: a set's is not.
        if set(map(len, listed)) != {size}:
            return None
        storages = set(listed)  # one Python object for each storage, as long as it is held
        return storages if len(storages) == len(members) else None


class Region(NamedTuple):
    """A run's place in an arena: one row a member, `slot` bytes apart, from byte `offset` on."""

    run: Run
    offset: int
    slot: int
    shape: torch.Size
    """Of one member."""

    @property
    def nbytes(self) -> int:
        return self.slot * len(self.run.members)

    def rows(self, views: Views) -> Tensor:
        """The region in an arena: shape [members, *shape of one]."""
        return views.rows(self.offset, self.slot, len(self.run.members), self.run.dtype, self.shape)

    def gather(self, tensors: Sequence[Tensor], rows: Tensor) -> None:
        """Copy the members, taken from all `tensors` of the batch, into `rows`.

        Raises:
            RuntimeError: they are not of one shape, not on the host, or require a gradient.
        """
        members = self.run.pick(tensors)
        if rows.is_contiguous():
            torch.stack(members, out=rows)  # type: ignore[arg-type]  # a list or a tuple
            return
        together = torch.stack(members)  # type: ignore[arg-type]
        if together.requires_grad or not together.is_cpu:
            raise RuntimeError("a run of tensors that are not plain host memory")
        rows.copy_(together)


class Structure(NamedTuple):
    """Of which runs the tensors of a batch consist, and which are in none."""

    runs: tuple[Run, ...]
    singles: tuple[int, ...]
    alone: Collection[int] = frozenset()
    """Those of the singles that get memory of their own."""

    def fits(self, tensors: Sequence[Tensor], max_bytes: int) -> bool:
        """Whether a batch of as many tensors has these runs, as far as `Run.storages` tells, and no tensor shares a
        member's storage.
        """
        seen: set[torch.UntypedStorage] = set()
        for run in self.runs:
            storages = run.storages(tensors, max_bytes)
            if storages is None or not seen.isdisjoint(storages):
                return False
            seen = seen | storages if seen else storages
        singles = (tensors[index] for index in self.singles)
        return not any(one.untyped_storage() in seen for one in singles if one.layout is torch.strided)

    def regions(self, tensors: Sequence[Tensor]) -> list[Region]:
        """The runs one behind the other, each as large as its first member says."""
        regions, offset = [], 0
        for run in self.runs:
            first = tensors[run.members[0]]
            region = Region(run, offset, aligned(first.numel() * first.element_size()), first.shape)
            regions.append(region)
            offset += region.nbytes
        return regions


def structure_of(
    leaves: Sequence[Leaf | None], tensors: Sequence[Tensor], max_bytes: int, alone: Collection[int] = frozenset()
) -> Structure:
    """Find the runs among the tensors of a batch.

    Args:
        leaves: for each tensor what is known of it; None where it is more than plain host memory.
        tensors: all tensors of the batch.
        max_bytes: tensors of at least this many bytes are in no run.
        alone: positions of tensors that get memory of their own, and so are in no run either.
    """
    in_storage = Counter(found.storage for found in leaves if found is not None)
    by_form: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for index, found in enumerate(leaves):
        if found is not None and found.storage >= 0 and in_storage[found.storage] == 1 and index not in alone:
            by_form.setdefault(found.form[:2], []).append(index)
    candidates = [Run.of(dtype, members) for (dtype, _), members in by_form.items() if len(members) >= MIN_MEMBERS]
    runs = tuple(run for run in candidates if run.storages(tensors, max_bytes) is not None)
    taken = {index for run in runs for index in run.members}
    structure = Structure(runs, tuple(index for index in range(len(tensors)) if index not in taken), alone)
    return structure if structure.fits(tensors, max_bytes) else Structure((), tuple(range(len(tensors))), alone)
