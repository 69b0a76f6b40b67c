"""Packs a batch: any class, shared objects and cycles, as one tensor and a few bytes (`packed_batch.py`).

Every tensor gets the strides that `.to` would give it, and none is a view to autograd. Runs of equal small tensors are
found once for all batches of as many tensors, then checked and copied as one (`runs.py`).
"""

from __future__ import annotations

import functools
import io
import pickle
import types
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from torchrec_prealloc.buffers import Views, host_bytes, unit_views
from torchrec_prealloc.codec import PROTOCOL, REFUSALS, refusal
from torchrec_prealloc.config import PreallocConfig
from torchrec_prealloc.layout import ALIGNMENT, Leaf, Segment, plan
from torchrec_prealloc.packed_batch import APART, DTYPES, PackedBatch
from torchrec_prealloc.plain import is_plain, leaf
from torchrec_prealloc.runs import Run, Structure, structure_of

SECTION_BYTES = PreallocConfig.direct_bytes
"""A tensor of at least this many bytes gets memory of its own on the device, as it does unpacked."""
SHARED_BYTES = SECTION_BYTES
"""A tensor of at least this many bytes that already is in shared memory travels apart: it costs less to hand over than
to copy. Measured by `torchrec-prealloc bench loader --full`: eight such tensors are faster copied up to 64 KiB each,
and slower from 256 KiB on. Not less than `SECTION_BYTES`, below which nobody asks each tensor of a run."""
REMEMBERED = 64
"""Numbers of tensors for which the runs are remembered."""

_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
_structures: OrderedDict[int, Structure] = OrderedDict()


def pack(batch: Any) -> PackedBatch:
    """Pack a batch of any type.

    Raises:
        CodecError: something in the batch cannot be pickled; the message has the path to it, as in `batch.extra[0]`.
        BatchError: a tensor's memory was freed.
    """
    in_worker = get_worker_info() is not None
    buffer = io.BytesIO()
    coder = _Coder(buffer, in_worker)
    try:
        coder.dump(batch)
    except REFUSALS as error:
        raise refusal({"batch": batch}, error, lambda obj: _Coder(io.BytesIO(), in_worker).dump(obj)) from error
    layout = _Layout(coder.tensors)
    if in_worker and any(map(_is_refused, layout.apart_tensors())):
        raise refusal({"batch": batch}, RuntimeError(_NO_LEAF), lambda obj: _Checker(io.BytesIO(), True).dump(obj))
    # Until they are filled the tensors must not change, just as those that a worker sends unpacked.
    whole = _allocate(layout.nbytes, in_worker)
    fill = functools.partial(layout.fill, whole)
    table = layout.table()  # before it is filled, which moves the offsets
    sections = fill if in_worker else fill()
    return PackedBatch(sections, layout.apart_tensors(), buffer.getvalue(), tuple(coder.globals), layout.dtypes, table)


class _Layout:
    """Where each tensor of a batch lands.

    Args:
        tensors: distinct ones. The list is taken over.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        structure, looked_at = _structure(tensors)
        self.apart: list[int] = []
        """Positions of the tensors that travel as they are."""
        self._tensors = tensors
        self._inside: list[int] = []
        self._regions = structure.regions(tensors)
        self.dtypes = self._sort(structure)
        """As in the packed batch."""
        self._leaves = [looked_at.get(index) or leaf(tensors[index], index) for index in self._inside]
        taken = sum(region.nbytes for region in self._regions)
        self._segments = plan(self._leaves, SECTION_BYTES, taken)
        if not tensors:  # what is packed has a tensor to travel with
            self._segments = [Segment([], ALIGNMENT, direct=False)]
        self._segments.sort(key=lambda segment: segment.direct)

    @property
    def nbytes(self) -> int:
        """Of all sections."""
        return sum(segment.nbytes for segment in self._segments)

    def _sort(self, structure: Structure) -> bytes:
        dtypes = bytearray([APART]) * len(self._tensors)
        for run in structure.runs:
            number = _NUMBERS[run.dtype]
            if isinstance(run.members, range):
                dtypes[run.members.start : run.members.stop] = bytes([number]) * len(run.members)
            else:
                for index in run.members:
                    dtypes[index] = number
        for index in structure.singles:
            tensor = self._tensors[index]
            inside = is_plain(tensor)
            if inside:
                dtypes[index] = _NUMBERS[tensor.dtype]
            (self._inside if inside and not _goes_apart(tensor) else self.apart).append(index)
        return bytes(dtypes)

    def apart_tensors(self) -> list[Tensor]:
        """Those that travel as they are."""
        return [self._tensors[index] for index in self.apart]

    def table(self) -> bytes:
        """What `read_table` reads."""
        pieces: list[tuple[Any, ...]] = []
        order: list[int] = []
        for region in self._regions:
            first = self._tensors[region.run.members[0]]
            place = (0, region.offset, region.slot, len(region.run.members), _NUMBERS[region.run.dtype])
            pieces.append((*place, tuple(region.shape), first.stride()))
            order += region.run.members
        found: list[int] = []
        for number, segment in enumerate(self._segments):
            pieces += _pieces(number, segment, self._leaves, found)
        order += [self._inside[index] for index in found]
        order += self.apart
        return pickle.dumps((pieces, pickle.dumps(order if order != sorted(order) else [], PROTOCOL)), PROTOCOL)

    def fill(self, whole: Tensor) -> Sequence[Tensor]:
        """Copy the tensors into new memory of `nbytes`; returns the sections."""
        views = Views(whole)
        with torch.no_grad():
            for region in self._regions:
                region.gather(self._tensors, region.rows(views))
            start = 0
            for segment in self._segments:
                self._fill_section(views, segment, start)
                start += segment.nbytes
        return list(whole.split([segment.nbytes for segment in self._segments])) if self._segments else []

    def _fill_section(self, views: Views, segment: Segment, start: int) -> None:
        sources: list[Tensor] = []
        for unit in segment.units:
            unit.offset += start
            first = self._tensors[self._inside[unit.members[0]]]
            sources.append(first if len(unit.members) == 1 else host_bytes(unit, first))
        if sources:
            torch._foreach_copy_(unit_views(views, segment, self._leaves), sources)


def _structure(tensors: Sequence[Tensor]) -> tuple[Structure, Mapping[int, Leaf]]:
    """The runs among a batch's tensors: those of the last batch of as many, if they are runs here, too.

    Returns:
        The structure, and the leaves at the positions of those tensors that had to be looked at for it.
    """
    count = len(tensors)
    known = _structures.get(count)
    if known is not None and known.fits(tensors, SECTION_BYTES) and all(_is_run(run, tensors) for run in known.runs):
        return known, {}
    leaves = [leaf(tensor, index) if is_plain(tensor) else None for index, tensor in enumerate(tensors)]
    structure = structure_of(leaves, tensors, SECTION_BYTES)
    if structure.runs:
        _structures[count] = structure
        while len(_structures) > REMEMBERED:
            _structures.popitem(last=False)
    return structure, {index: found for index, found in enumerate(leaves) if found is not None}


_shape, _is_cpu, _requires_grad = attrgetter("shape"), attrgetter("is_cpu"), attrgetter("requires_grad")


def _is_run(run: Run, tensors: Sequence[Tensor]) -> bool:
    """What `Structure.fits` leaves open: whether the members are of one shape, and plain."""
    members = run.pick(tensors)
    return (
        len(set(map(_shape, members))) == 1
        and all(map(_is_cpu, members))
        and not any(map(_requires_grad, members))
        and not any(map(Tensor.is_neg, members))
        and not (run.dtype.is_complex and any(map(Tensor.is_conj, members)))
    )


def _goes_apart(tensor: Tensor) -> bool:
    nbytes = tensor.numel() * tensor.element_size()
    return nbytes >= SHARED_BYTES and tensor.is_shared()


def _pieces(number: int, segment: Segment, leaves: Sequence[Leaf], order: list[int]) -> list[tuple[Any, ...]]:
    pieces: list[tuple[Any, ...]] = []
    at = 0
    for first, after in [*segment.runs, (len(segment.units), len(segment.units))]:
        for unit in segment.units[at:first]:
            for index in unit.members:
                within = leaves[index].start - unit.start if len(unit.members) > 1 else 0
                pieces.append(_piece(number, unit.offset + within, 0, 1, index, leaves))
            order += unit.members
        if first < after:
            one, two = segment.units[first : first + 2]
            pieces.append(_piece(number, one.offset, two.offset - one.offset, after - first, one.members[0], leaves))
            order += [unit.members[0] for unit in segment.units[first:after]]
        at = after
    return pieces


def _piece(number: int, offset: int, step: int, count: int, index: int, leaves: Sequence[Leaf]) -> tuple[Any, ...]:
    dtype, shape, strides = leaves[index].form
    return number, offset, step, count, _NUMBERS[dtype], tuple(shape), tuple(strides)


def _allocate(nbytes: int, shared: bool) -> Tensor:
    """New memory; in a DataLoader's worker shared memory, which is not copied once more on its way."""
    if not shared or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(nbytes, device="cpu")
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class _Coder(pickle.Pickler):
    """Pickles a batch without its tensors, classes and functions."""

    def __init__(self, buffer: io.BytesIO, in_worker: bool) -> None:
        super().__init__(buffer, PROTOCOL)
        self.tensors: list[Tensor] = []
        self.globals: list[Any] = []
        self._in_worker = in_worker
        self._indices: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is Tensor or isinstance(obj, Tensor):
            index = self._indices.get(id(obj))
            if index is None:
                index = self._indices[id(obj)] = len(self.tensors)
                self.tensors.append(obj)
            return index
        if isinstance(obj, (type, types.FunctionType)) or (
            isinstance(obj, types.BuiltinFunctionType) and isinstance(obj.__self__, (types.ModuleType, type(None)))
        ):
            index = self._indices.get(id(obj))
            if index is None:
                if self._in_worker:
                    _check_importable(obj)
                self.globals.append(obj)
                index = self._indices[id(obj)] = -len(self.globals)
            return index
        return None


_NO_LEAF = "it has a gradient's history, which does not cross processes; give it detach()"


def _is_refused(tensor: Tensor) -> bool:
    return tensor.requires_grad and not tensor.is_leaf


class _Checker(_Coder):
    """Refuses tensors that the queue would refuse."""

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, Tensor) and _is_refused(obj):
            raise RuntimeError(_NO_LEAF)
        return super().persistent_id(obj)


@functools.lru_cache(maxsize=1024)
def _check_importable(obj: Any) -> None:
    """Refuse here what would fail later, in the queue's own thread, where nobody hears of it."""
    pickle.dumps(obj, PROTOCOL)
