"""A batch as one uint8 tensor and a few bytes that say what it is.

`pack` writes the batch with pickle, so whatever a DataLoader passes on arrives: any class, shared objects, cycles. Its
tensors stay out of the pickle. They are laid out in one tensor as the engine lays them out on the device, so that the
device's memory is a copy of it. What else stays out:

- classes and functions: they travel beside the code, so that reading it imports nothing;
- tensors that are more than host bytes (subclasses, sparse tensors, tensors that require grad, ...), and large ones
  that already are in shared memory: they travel apart, as they are.

Every tensor gets the strides that `.to` would give it, and none is a view to autograd.
"""

from __future__ import annotations

import functools
import io
import pickle
import types
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from torchrec_prealloc.batch_types import Kind, register_kind
from torchrec_prealloc.buffers import Views, host_bytes, unit_views
from torchrec_prealloc.codec import PROTOCOL, REFUSALS, Unpickler, refusal
from torchrec_prealloc.config import PreallocConfig
from torchrec_prealloc.layout import ALIGNMENT, Leaf, Segment, plan
from torchrec_prealloc.plain import is_plain, leaf

SECTION_BYTES = PreallocConfig.direct_bytes
"""A tensor of at least this many bytes gets memory of its own on the device, as it does unpacked."""
SHARED_BYTES = 1 << 20
"""A tensor of at least this many bytes that already is in shared memory costs less to hand over than to copy."""


class PackedBatch:
    """A batch that was packed: `DataLoader` workers make them (`packed`), pipelines and `to_device` take them.

    Args:
        sections: the packed tensors' bytes (uint8, 1-D): first one for all small ones, then one for each large one; or
            what fills them.
        apart: tensors that travel as they are.
    """

    def __init__(
        self,
        sections: Sequence[Tensor] | Callable[[], Sequence[Tensor]],
        apart: Sequence[Tensor],
        code: bytes,
        globals_: tuple[Any, ...],
        dtypes: bytes,
        table: bytes,
    ) -> None:
        self._sections = sections
        self.apart = tuple(apart)
        self.code = code
        """The batch, pickled. Its references are indices into the tensors, and from the end into `globals`."""
        self.globals = globals_
        self.dtypes = dtypes
        """For each tensor the index of its dtype in `DTYPES`, or `APART`."""
        self.table = table

    @property
    def sections(self) -> tuple[Tensor, ...]:
        """Filled when they are first asked for: in a worker by the thread that sends the batch."""
        if not isinstance(self._sections, tuple):
            self._sections = tuple(self._sections() if callable(self._sections) else self._sections)
        return self._sections

    def __len__(self) -> int:
        """Bytes in the sections."""
        return sum(map(len, self.sections))

    def pin_memory(self, device: Any = None) -> PackedBatch:
        """The same in pinned memory, each byte copied once. `DataLoader(pin_memory=True)` calls it in its thread."""
        apart = [tensor.pin_memory() if is_plain(tensor) else tensor for tensor in self.apart]
        sections = [section.pin_memory() for section in self.sections]
        return PackedBatch(sections, apart, self.code, self.globals, self.dtypes, self.table)

    def is_pinned(self) -> bool:
        """Whether all sections are in pinned memory."""
        return all(section.is_pinned() for section in self.sections)

    def unpack(self) -> Any:
        """The batch around views of this memory: what a DataLoader gives that does not pack."""
        return self.rebuild(self.views(self.sections, self.apart))

    def views(self, sections: Sequence[Tensor], apart: Sequence[Tensor]) -> Sequence[Tensor]:
        """The batch's tensors, in the order of their indices, as views of (other) sections."""
        table = read_table(self.table)
        views: list[Tensor] = []
        memories = [Views(section) for section in sections]
        for (number, offset, step, count, shape, strides), dtype in zip(table.pieces, table.types, strict=True):
            memory = memories[number]
            first = int(memory.base.storage_offset()) + offset
            if count == 1:
                views.append(memory.at(first, (dtype, shape, strides)))
            elif strides == (1,) and step == shape[0] * dtype.itemsize:
                views.extend(_split(memory, first, count, dtype, int(shape[0])))
            else:
                views.extend(memory.run(first, step, count, (dtype, shape, strides)))
        views.extend(apart)
        ordered: Sequence[Tensor] = table.in_order(views)
        return ordered

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The batch around these tensors."""
        unpickler = Unpickler(self.code, allowed=())
        # Assigned, not a method: no step of Python for each tensor.
        unpickler.persistent_load = [*tensors, *reversed(self.globals)].__getitem__  # type: ignore[method-assign]
        return unpickler.load()

    def __reduce__(self) -> Any:
        rest = self.apart, self.code, self.globals, self.dtypes, self.table
        first = self.sections[0]
        if len(self.sections) > 1 and first.untyped_storage()._cdata == self.sections[-1].untyped_storage()._cdata:
            # One tensor, so one segment of shared memory and one file descriptor.
            whole = torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())
            return _from_whole, (whole, tuple(map(len, self.sections)), *rest)
        return PackedBatch, (self.sections, *rest)

    def __repr__(self) -> str:
        return f"PackedBatch({len(self.dtypes)} tensors, {len(self)} bytes in {len(self.sections)} sections)"


def _split(memory: Views, offset: int, count: int, dtype: torch.dtype, size: int) -> Sequence[Tensor]:
    """`Views.run` for tensors of one dimension without gaps between them, a fifth faster."""
    flat = memory.at(offset, (dtype, torch.Size((count * size,)), (1,)))
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return flat.split_with_sizes([size] * count)


def _from_whole(whole: Tensor, sizes: tuple[int, ...], *rest: Any) -> PackedBatch:
    return PackedBatch(whole.split(sizes), *rest)


# Packing ---------------------------------------------------------------------------------------------------------

DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
APART = 255


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
    dtypes = bytes(_NUMBERS[tensor.dtype] if is_plain(tensor) else APART for tensor in coder.tensors)
    inside = [dtype != APART and not _goes_apart(tensor) for tensor, dtype in zip(coder.tensors, dtypes, strict=True)]
    apart = [index for index, is_inside in enumerate(inside) if not is_inside]
    indices = [index for index, is_inside in enumerate(inside) if is_inside]
    tensors = [coder.tensors[index] for index in indices]
    leaves = [leaf(tensor, index) for index, tensor in enumerate(tensors)]
    segments = plan(leaves, SECTION_BYTES) or [Segment([], ALIGNMENT, direct=False)]
    segments.sort(key=lambda segment: segment.direct)
    pieces: list[tuple[Any, ...]] = []
    order: list[int] = []
    for number, segment in enumerate(segments):
        pieces += _pieces(number, segment, leaves, order)
    # Until then the tensors must not change, just as those that a worker sends unpacked.
    fill = functools.partial(_fill, segments, leaves, tensors, in_worker)
    order = [indices[index] for index in order] + apart
    table = pickle.dumps((pieces, order if order != sorted(order) else None), PROTOCOL)
    return PackedBatch(
        fill if in_worker else fill(),
        [coder.tensors[index] for index in apart],
        buffer.getvalue(),
        tuple(coder.globals),
        dtypes,
        table,
    )


def _goes_apart(tensor: Tensor) -> bool:
    nbytes = tensor.numel() * tensor.element_size()
    return nbytes >= SHARED_BYTES and tensor.is_shared()


def _fill(
    segments: Sequence[Segment], leaves: Sequence[Leaf], tensors: Sequence[Tensor], shared: bool
) -> Sequence[Tensor]:
    """Copy the tensors into new memory, one section for each segment."""
    sizes = [segment.nbytes for segment in segments]
    whole = _allocate(sum(sizes), shared)
    views = Views(whole)
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    start = 0
    for segment in segments:
        for unit in segment.units:
            unit.offset += start
            first = tensors[unit.members[0]]
            sources.append(first if len(unit.members) == 1 else host_bytes(unit, first))
        targets += unit_views(views, segment, leaves)
        start += segment.nbytes
    if sources:
        torch._foreach_copy_(targets, sources)
    return list(whole.split(sizes))


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
    if not shared:
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
        if isinstance(obj, Tensor):
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


@functools.lru_cache(maxsize=1024)
def _check_importable(obj: Any) -> None:
    """Refuse here what would fail later, in the queue's own thread, where nobody hears of it."""
    pickle.dumps(obj, PROTOCOL)


# Reading ---------------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """Where the tensors lie."""

    pieces: tuple[tuple[int, int, int, int, torch.Size, tuple[int, ...]], ...]
    """Section, byte offset of the first tensor, bytes from one to the next, count, shape, strides."""
    types: tuple[torch.dtype, ...]
    in_order: Any
    """Puts the tensors of all pieces, and behind them those apart, in the order of their indices."""


@functools.lru_cache(maxsize=256)
def read_table(table: bytes) -> Table:
    """Read what `pack` wrote."""
    pieces, order = Unpickler(table, allowed=()).load()
    positions = sorted(range(len(order)), key=order.__getitem__) if order is not None else []
    in_order = itemgetter(*positions) if len(positions) > 1 else lambda tensors: tensors
    read = tuple((*piece[:4], torch.Size(piece[5]), piece[6]) for piece in pieces)
    return Table(read, tuple(DTYPES[piece[4]] for piece in pieces), in_order)


def _choose(packed: PackedBatch, own_to: Any, isolate: bool) -> Kind:
    from torchrec_prealloc.packed_kind import choose

    return choose(packed, own_to, isolate)


UNPACKED = Kind(lambda packed: ([packed.unpack()], None), lambda children, _: children[0])
register_kind(PackedBatch, UNPACKED._replace(choose=_choose))
