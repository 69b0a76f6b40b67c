"""A batch as one uint8 tensor and a few bytes that say what it is; `packing.py` makes them.

The batch is written with pickle, but its tensors stay out of it. They are laid out in one tensor as the engine lays
them out on the device, so that the device's memory is a copy of it. What else stays out:

- classes and functions: they travel beside the code, so that reading it imports nothing;
- tensors that are more than host bytes (subclasses, sparse tensors, tensors that require grad, ...), and large ones
  that already are in shared memory: they travel apart, as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.streamable import Pipelineable

from torchrec_prealloc.batch import Walk
from torchrec_prealloc.batch_types import Kind, register_kind
from torchrec_prealloc.buffers import Views
from torchrec_prealloc.codec import Unpickler
from torchrec_prealloc.layout import Form
from torchrec_prealloc.plain import is_plain

DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
APART = 255
"""Stands for the dtype of a tensor that is more than host bytes."""


class PackedBatch(Pipelineable):  # TorchRec's pipelines take nothing else
    """A batch that was packed: `DataLoader` workers make them (`packed`), pipelines and `to_device` take them.

    Args:
        sections: the packed tensors' bytes (uint8, 1-D): first one for all small ones, then one for each large one; or
            what fills them. None where all tensors travel apart.
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

    def to(self, device: torch.device | str, non_blocking: bool = False, **options: Any) -> Any:
        """The batch itself, no longer packed, on a device: what its own `to` gives, or that of each object in it.

        So a pipeline with TorchRec's own copy takes packed batches, too; ours have a faster way.

        Args:
            options: for the batch's own `to`; `data_copy_stream` is one.
        """
        batch = self.unpack()
        if callable(getattr(batch, "to", None)):
            return batch.to(device=torch.device(device), non_blocking=non_blocking, **options)
        by_own_to = _ByOwnTo(torch.device(device), non_blocking)
        walk = Walk(by_own_to)
        walk.find(batch)
        return walk.rebuild(batch, [[by_own_to.run(tensor) for tensor in group] for group in walk.groups])

    def record_stream(self, stream: Any) -> None:
        """Nothing: it is host memory."""

    def views(self, sections: Sequence[Tensor], apart: Sequence[Tensor]) -> Sequence[Tensor]:
        """The batch's tensors, in the order of their indices, as views of (other) sections."""
        table = read_table(self.table)
        views: list[Tensor] = []
        with torch._C._AutoDispatchBelowADInplaceOrView():  # as in `Views`, of which this is the short way
            memories = [_Typed(section) for section in sections]
            for section, offset, step, number, (dtype, shape, strides), is_one_row in table.pieces:
                memory, start = memories[section].at(dtype, offset)
                if number == 1:
                    views.append(memory.as_strided(shape, strides, start))
                elif is_one_row:  # a fifth faster than rows
                    (size,) = shape
                    flat = memory.as_strided((number * size,), strides, start)
                    views.extend(flat.split_with_sizes([size] * number))
                else:
                    rows = (step // dtype.itemsize, *strides)
                    views.extend(memory.as_strided((number, *shape), rows, start).unbind(0))
        views.extend(apart)
        ordered: Sequence[Tensor] = table.in_order(views)
        return ordered

    def at(self, place: Place) -> Tensor:
        """The host's tensor at a place in a section."""
        memory = Views(self.sections[place.section])
        return memory.at(int(memory.base.storage_offset()) + place.offset, place.form)

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The batch around these tensors."""
        unpickler = Unpickler(self.code, allowed=())
        # Assigned, not a method: no step of Python for each tensor.
        unpickler.persistent_load = [*tensors, *reversed(self.globals)].__getitem__  # type: ignore[method-assign]
        return unpickler.load()

    def __reduce__(self) -> Any:
        # Between processes torch forgets that a tensor is a conjugate or negative view: its values would be others.
        apart = tuple(tensor.resolve_conj().resolve_neg() if _is_lazy(tensor) else tensor for tensor in self.apart)
        rest = apart, self.code, self.globals, self.dtypes, self.table
        storages = {section.untyped_storage()._cdata for section in self.sections}
        if len(storages) == 1 < len(self.sections):
            # One tensor, so one segment of shared memory and one file descriptor.
            whole = torch.empty(0, dtype=torch.uint8).set_(self.sections[0].untyped_storage())
            return _from_whole, (whole, tuple(map(len, self.sections)), *rest)
        return PackedBatch, (self.sections, *rest)

    def __repr__(self) -> str:
        return f"PackedBatch({len(self.dtypes)} tensors, {len(self)} bytes in {len(self.sections)} sections)"


class _Typed:
    """A section as tensors of several dtypes."""

    def __init__(self, section: Tensor) -> None:
        self._section = section
        self._start = int(section.storage_offset())
        self._typed: dict[torch.dtype, Tensor] = {}

    def at(self, dtype: torch.dtype, offset: int) -> tuple[Tensor, int]:
        """The section as a tensor of a dtype, and where in its storage, in elements, a byte of the section is."""
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self._section.view(dtype)
        return typed, (self._start + offset) // dtype.itemsize


def _is_lazy(tensor: Tensor) -> bool:
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and (tensor.is_conj() or tensor.is_neg())


def _from_whole(whole: Tensor, sizes: tuple[int, ...], *rest: Any) -> PackedBatch:
    return PackedBatch(whole.split(sizes), *rest)


class _ByOwnTo:
    """Moves each object with its own `to` by that."""

    def __init__(self, device: torch.device, non_blocking: bool) -> None:
        self._device, self._non_blocking = device, non_blocking

    def kind(self, obj: Any) -> Kind | None:
        return None

    def run(self, obj: Any) -> Any:
        return obj.to(device=self._device, non_blocking=self._non_blocking)


class Place(NamedTuple):
    """Where one tensor lies."""

    section: int
    """-1: it travels apart."""
    offset: int
    """In bytes."""
    form: Form


class Piece(NamedTuple):
    """Tensors of one form at equal distances."""

    section: int
    offset: int
    """Of the first, in bytes."""
    step: int
    """Bytes from one to the next."""
    number: int
    form: Form
    is_one_row: bool
    """Whether they have one dimension, and no gaps between them."""


class Table(NamedTuple):
    """Where the tensors lie."""

    pieces: tuple[Piece, ...]
    positions: Sequence[int]
    """For each index the tensor's position among those of all pieces, and behind them those apart. Empty: the same."""
    in_order: Any
    """Puts the tensors from their positions in the order of their indices."""

    def place(self, index: int) -> Place:
        """Where the tensor of an index lies."""
        position = self.positions[index] if self.positions else index
        for piece in self.pieces:
            if position < piece.number:
                return Place(piece.section, piece.offset + position * piece.step, piece.form)
            position -= piece.number
        return Place(-1, 0, (torch.uint8, torch.Size(), ()))


@functools.lru_cache(maxsize=256)
def read_table(table: bytes) -> Table:
    """Read what `pack` wrote."""
    pieces, order = Unpickler(table, allowed=()).load()
    return Table(tuple(_piece(*piece) for piece in pieces), *_read_order(order))


def _piece(section: int, offset: int, step: int, number: int, kind: int, shape: Any, strides: Any) -> Piece:
    dtype = DTYPES[kind]
    is_one_row = strides == (1,) and step == shape[0] * dtype.itemsize
    return Piece(section, offset, step, number, (dtype, torch.Size(shape), strides), is_one_row)


@functools.lru_cache(maxsize=256)
def _read_order(order: bytes) -> tuple[Sequence[int], Any]:
    # By itself: sizes change from batch to batch, the order seldom.
    indices: list[int] = Unpickler(order, allowed=()).load()
    positions = sorted(range(len(indices)), key=indices.__getitem__)
    return positions, itemgetter(*positions) if len(positions) > 1 else lambda tensors: tensors


_kinds: Any = None


def _choose(packed: PackedBatch, own_to: Any, isolate: bool) -> Kind:
    global _kinds
    if _kinds is None:
        from torchrec_prealloc import packed_kind as _kinds  # which needs this module
    kind: Kind = _kinds.choose(packed, own_to, isolate)
    return kind


UNPACKED = Kind(lambda packed: ([packed.unpack()], None), lambda children, _: children[0])
register_kind(PackedBatch, UNPACKED._replace(choose=_choose))
