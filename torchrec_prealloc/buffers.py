"""Device memory for a batch, and the tensors that view it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchrec_prealloc.layout import ALIGNMENT, Form, Leaf, Segment, Unit


def rounded(nbytes: int, divisions: int) -> int:
    """`nbytes` rounded up to a multiple of 1/`divisions` of the power of two below it; 0 divisions: as it is.

    Batches of wobbling size then ask for few different sizes, and find what earlier ones gave back. What is added is
    less than 1/`divisions`, or `ALIGNMENT` bytes.
    """
    if not divisions or nbytes <= ALIGNMENT:
        return nbytes
    step = max((1 << (nbytes.bit_length() - 1)) // divisions, ALIGNMENT)
    step -= step % ALIGNMENT
    return -(-nbytes // step) * step


def allocate(nbytes: int, device: torch.device, divisions: int = 0) -> Tensor:
    """At least `nbytes` of uninitialised memory (uint8, 1-D), from the pool of the stream that is current on `device`.

    Raises:
        torch.OutOfMemoryError: there is none.
    """
    return torch.empty(rounded(nbytes, divisions), dtype=torch.uint8, device=device)


class Views:
    """Tensors that view one allocation.

    They are no views to autograd (no common base or version counter): each is as free as the tensor that `.to` would
    have made, and an in-place change of one does not spoil a backward pass that saved another.
    """

    def __init__(self, base: Tensor) -> None:
        """`base`: uint8, 1-D, its size a multiple of every dtype's item size."""
        self.base = base
        self._typed: dict[torch.dtype, Tensor] = {torch.uint8: base}

    def at(self, offset: int, form: Form) -> Tensor:
        """The tensor of dtype, shape and strides `form` at byte `offset`, a multiple of the dtype's item size."""
        dtype, shape, strides = form
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self._as(dtype).as_strided(shape, strides, offset // dtype.itemsize)

    def bytes(self, offset: int, nbytes: int) -> Tensor:
        """`nbytes` bytes from byte `offset` on (uint8, 1-D)."""
        return self.at(offset, (torch.uint8, torch.Size((nbytes,)), (1,)))

    def rows(self, offset: int, step: int, count: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """`count` contiguous tensors of one dtype and shape, `step` bytes apart, the first at byte `offset`."""
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * size)
        inner = tuple(reversed(strides[: len(shape)]))
        return self.at(offset, (dtype, torch.Size((count, *shape)), (step // dtype.itemsize, *inner)))

    def run(self, offset: int, step: int, count: int, form: Form) -> Sequence[Tensor]:
        """`count` tensors of one form, `step` bytes apart, the first at byte `offset`: one operation for all."""
        dtype, shape, strides = form
        rows = self.at(offset, (dtype, torch.Size((count, *shape)), (step // dtype.itemsize, *strides)))
        return unbind(rows)

    def _as(self, dtype: torch.dtype) -> Tensor:
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self.base.view(dtype)
        return typed


def unbind(rows: Tensor) -> Sequence[Tensor]:
    """The tensors along the first dimension, no views to autograd."""
    count, *shape = rows.shape
    with torch._C._AutoDispatchBelowADInplaceOrView():
        if len(shape) == 1 and rows.is_contiguous():
            return rows.view(-1).split_with_sizes(shape * count)  # a fifth less time than unbind
        return rows.unbind(0)


def unit_views(views: Views, segment: Segment, leaves: Sequence[Leaf]) -> list[Tensor]:
    """For each unit of `segment` the tensor that holds it: of the leaf's own form, or bytes where several share it."""
    tensors: list[Tensor] = []
    end = len(segment.units)
    for first, after in [*segment.runs, (end, end)]:
        for unit in segment.units[len(tensors) : first]:
            if len(unit.members) == 1:
                tensors.append(views.at(unit.offset, leaves[unit.members[0]].form))
            else:
                tensors.append(views.bytes(unit.offset, unit.nbytes))
        if first < after:
            one, two = segment.units[first : first + 2]
            form = leaves[one.members[0]].form
            tensors.extend(views.run(one.offset, two.offset - one.offset, after - first, form))
    return tensors


def leaf_views(
    views: Views, segment: Segment, units: Sequence[Tensor], leaves: Sequence[Leaf]
) -> Iterator[tuple[int, Tensor]]:
    """Each leaf of `segment` as a tensor, with the leaf's index, given the segment's `unit_views`."""
    for unit, tensor in zip(segment.units, units, strict=True):
        if len(unit.members) == 1:
            yield unit.members[0], tensor
        else:
            for index in unit.members:
                leaf = leaves[index]
                yield index, views.at(unit.offset + leaf.start - unit.start, leaf.form)


def host_bytes(unit: Unit, member: Tensor) -> Tensor:
    """The host bytes of a unit of several leaves (uint8, 1-D), given one of these tensors."""
    storage = member.untyped_storage()
    first = unit.start - storage.data_ptr()
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return torch.empty(0, dtype=torch.uint8).set_(storage, first, (unit.nbytes,), (1,))
