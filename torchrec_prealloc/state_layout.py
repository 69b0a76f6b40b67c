"""Which bytes of a state travel together to the host, and where they land. Nothing is copied here."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_prealloc.layout import aligned
from torchrec_prealloc.plain import arrival_strides, check_storage, is_dense

_ITEM = 16
"""The largest item of any dtype, in bytes."""


def is_strided(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but strided memory; others have a `cpu()` that does more than copy bytes."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (
            tensor.is_quantized
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.is_nested
            or tensor.is_meta
            or tensor._is_zerotensor()
        )
    )


@dataclass(frozen=True)
class Alone:
    """One tensor, one transfer."""

    index: int
    strides: tuple[int, ...]
    """In which it arrives: those that `.cpu()` gives."""
    offset: int
    nbytes: int


@dataclass
class Gathered:
    """Small tensors of one dtype, which arrive contiguous, one after the other."""

    members: list[int] = field(default_factory=list)
    numel: int = 0
    offset: int = 0


class Overlapping(NamedTuple):
    """Tensors of one storage that overlap, and the bytes that they cover."""

    members: list[int]
    first: int
    """Where those begin in the storage."""
    offset: int
    nbytes: int


class StateLayout:
    """Where the tensors of one device land in a block of host memory.

    Args:
        tensors: of the whole state.
        indices: those of one device. All are strided and have elements.
        gather_bytes: smallest tensor that travels alone.
        offset: the first free byte of the block.
    """

    def __init__(self, tensors: Sequence[Tensor], indices: Iterable[int], gather_bytes: int, offset: int) -> None:
        self.alone: list[Alone] = []
        self.gathered: dict[torch.dtype, Gathered] = {}
        self.overlapping: list[Overlapping] = []
        self.end = offset
        """The first byte behind."""
        dense = [index for index in indices if is_dense(tensors[index])]
        overlapping = _overlapping(tensors, dense)
        shared = {index for members in overlapping for index in members}
        for index in indices:
            if index not in shared:
                self._add(index, tensors[index], gather_bytes)
        for members in overlapping:
            self._add_overlapping(members, tensors)
        for dtype, gathered in self.gathered.items():
            gathered.offset = self._take(gathered.numel * dtype.itemsize)

    def _add(self, index: int, tensor: Tensor, gather_bytes: int) -> None:
        nbytes = tensor.nbytes
        strides = tensor.stride()
        if not is_dense(tensor):
            check_storage(tensor)
            strides = arrival_strides(tensor.shape, strides)
        if nbytes < gather_bytes and strides == _contiguous(tensor.shape):
            gathered = self.gathered.setdefault(tensor.dtype, Gathered())
            gathered.members.append(index)
            gathered.numel += tensor.numel()
        else:
            self.alone.append(Alone(index, strides, self._take(nbytes), nbytes))

    def _add_overlapping(self, members: list[int], tensors: Sequence[Tensor]) -> None:
        storage = tensors[members[0]].untyped_storage().data_ptr()
        starts = [tensors[index].data_ptr() for index in members]
        # From a multiple of the largest item on, so that each member begins at a multiple of its own.
        first = (min(starts) - storage) // _ITEM * _ITEM
        last = max(start + tensors[index].nbytes for start, index in zip(starts, members, strict=True)) - storage
        self.overlapping.append(Overlapping(members, first, self._take(last - first), last - first))

    def _take(self, nbytes: int) -> int:
        offset, self.end = self.end, self.end + aligned(nbytes)
        return offset


@functools.lru_cache(maxsize=4096)
def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _overlapping(tensors: Sequence[Tensor], dense: Iterable[int]) -> list[list[int]]:
    """Groups of tensors whose bytes overlap.

    Raises:
        BatchError: a tensor's memory was freed.
    """
    spans: list[tuple[int, int, int]] = []
    for index in dense:
        start = tensors[index].data_ptr()
        if start == 0:
            check_storage(tensors[index])
        spans.append((start, start + tensors[index].nbytes, index))
    groups: list[list[int]] = []
    end = -1
    for start, stop, index in sorted(spans):
        if start < end:
            groups[-1].append(index)
            end = max(end, stop)
        else:
            groups.append([index])
            end = stop
    return [group for group in groups if len(group) > 1 and _share(tensors, group)]


def _share(tensors: Sequence[Tensor], members: list[int]) -> bool:
    return len({tensors[index].untyped_storage()._cdata for index in members}) == 1
