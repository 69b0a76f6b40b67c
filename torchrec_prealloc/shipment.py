"""One batch made ready to travel: its device memory allocated, its small tensors gathered, its copies listed.

Nothing here touches a stream: memory comes from the one that is current, and `transfer.py` queues the copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchrec_prealloc.batch import Walk
from torchrec_prealloc.batch_types import BatchError, Kind
from torchrec_prealloc.buffers import Views, allocate, host_bytes, leaf_views, unit_views
from torchrec_prealloc.capture import Capture, RealCopies, is_plain
from torchrec_prealloc.layout import ALIGNMENT, Form, Leaf, aligned, plan
from torchrec_prealloc.own_to import Learned
from torchrec_prealloc.staging import pinned

CAPTURE_BYTES = 1 << 20
"""Size of the arenas for conversions of a class' own `to`, whose sizes are not known beforehand."""

_learned: dict[tuple[type, str], Learned] = {}


class Arena:
    """Device memory that host tensors are gathered for.

    Args:
        base: device memory (uint8, 1-D).
        streams: whether the device has streams. If so tensors are gathered in pinned host memory of the same size,
            `staging`; on the CPU `base` is filled directly.
    """

    def __init__(self, base: Tensor, streams: bool) -> None:
        self.base = base
        self.staging = pinned(base.numel()) if streams else None
        self.sources: list[Tensor] = []
        self.targets: list[Tensor] = []
        """For each source its place in `staging` (or in `base`)."""
        self.nbytes = 0
        """Bytes in use, from the start."""
        self.views = Views(base)
        self.places = Views(self.staging) if self.staging is not None else self.views

    def add(self, source: Tensor, form: Form) -> Tensor:
        """Put one host tensor behind the others; returns its device tensor, of dtype, shape and strides `form`."""
        offset = self.nbytes
        self.nbytes = offset + aligned(source.numel() * source.element_size())
        self.sources.append(source)
        self.targets.append(self.places.at(offset, form))
        return self.views.at(offset, form)

    def fits(self, nbytes: int) -> bool:
        """Whether another `nbytes` have room."""
        return self.nbytes + aligned(nbytes) <= self.base.numel()


class Shipment:
    """A batch's way from the host's object to the device's.

    Args:
        device: the target.
        streams: whether the device has streams, and so can copy from pinned memory while the host goes on.
        direct_bytes: smallest tensor that travels by itself.
        isolate: whether each KeyedJaggedTensor gets memory of its own.
        flush: `flush(shipment, reuse_sources)`: send what is loaded, order the current stream after it, and with
            `reuse_sources` wait until the host's tensors may be changed.
    """

    def __init__(
        self,
        device: torch.device,
        streams: bool,
        direct_bytes: int,
        isolate: bool,
        flush: Callable[[Shipment, bool], None],
    ) -> None:
        self.arenas: list[Arena] = []
        """To be gathered, and copied."""
        self.direct: list[tuple[Tensor, Tensor]] = []
        """Targets and the host tensors to be copied into them."""
        self.owned: list[Tensor] = []
        """All memory of the batch that the owner stream owns."""
        self.isolated: list[Tensor] = []
        """That part of it which belongs to one KeyedJaggedTensor each, and may be freed early."""
        self.foreign: list[Tensor] = []
        """Tensors of the batch that were on the device already."""
        self.allocations = 0
        self._device = device
        self._streams = streams
        self._direct_bytes = direct_bytes
        self._isolate = isolate
        self._flush = flush
        self._open: Arena | None = None

    def load(self, batch: Any) -> Any:
        """Allocate device memory for `batch`, and list its copies.

        Returns:
            The device's batch, whose tensors hold nothing yet.
        """
        walk = Walk(self, self._isolate)
        walk.find(batch)
        arrived = [self._load_group(group, index > 0) for index, group in enumerate(walk.groups)]
        return walk.rebuild(batch, arrived)

    def take(self) -> tuple[list[Arena], list[tuple[Tensor, Tensor]]]:
        """The copies listed since the last call."""
        taken = self.arenas, self.direct
        self.arenas, self.direct, self._open = [], [], None
        return taken

    # Tensors that were found in the batch ------------------------------------------------------------------------

    def _load_group(self, group: dict[int, Tensor], isolated: bool) -> dict[int, Tensor]:
        arrived: dict[int, Tensor] = {}
        plain: list[Tensor] = []
        for key, tensor in group.items():
            if type(tensor) is Tensor and is_plain(tensor) and _is_dense(tensor):
                plain.append(tensor)
            else:
                arrived[key] = self._move_alone(tensor)
        leaves = [_leaf(tensor, index) for index, tensor in enumerate(plain)]
        for segment in plan(leaves, self._direct_bytes):
            base = self._allocate(segment.nbytes, isolated)
            sources = [
                plain[unit.members[0]] if len(unit.members) == 1 else host_bytes(unit, plain[unit.members[0]])
                for unit in segment.units
            ]
            if segment.direct and self._can_leave(sources[0]):
                views = Views(base)
                units = unit_views(views, segment, leaves)
                self.direct.append((units[0], sources[0]))
            else:
                arena = Arena(base, self._streams)
                views = arena.views
                units = unit_views(views, segment, leaves)
                arena.sources, arena.nbytes = sources, segment.nbytes
                arena.targets = unit_views(arena.places, segment, leaves) if self._streams else units
                self.arenas.append(arena)
            for index, view in leaf_views(views, segment, units, leaves):
                arrived[id(plain[index])] = view
        return arrived

    def _move_alone(self, tensor: Tensor) -> Tensor:
        """A tensor that is more than dense host memory goes its own way: `.to`, on the owner stream."""
        if self._device.type == "cpu":
            return tensor.to(self._device, copy=tensor.is_cpu)
        if tensor.device == self._device:
            self.foreign.append(tensor)
            return tensor
        moved = tensor.to(self._device, non_blocking=True)
        self.owned.append(moved)
        return moved

    def _can_leave(self, source: Tensor) -> bool:
        """Whether a dense host tensor can be copied from where it is without the host waiting for the copy."""
        return not self._streams or source.is_pinned()

    def _allocate(self, nbytes: int, isolated: bool) -> Tensor:
        base = allocate(nbytes, self._device)
        self.allocations += 1
        self.owned.append(base)
        if isolated:
            self.isolated.append(base)
        return base

    # Objects with their own `to` ---------------------------------------------------------------------------------

    def kind(self, obj: Any) -> Kind | None:
        """How to walk an object with its own `to`; None where that has to run."""
        return self._learned(type(obj)).kind(obj)

    def run(self, obj: Any) -> Any:
        """What an object's own `to` gives; the conversions it makes are put among the batch's copies.

        Raises:
            BatchError: `to` returned None.
            Exception: what `to` raises, unchanged but for a note that names the class.
        """
        real_copies = RealCopies() if self._device.type == "cpu" else contextlib.nullcontext()
        capture = Capture(self._device, self._arrive, lambda reuse: self._flush(self, reuse))
        try:
            with real_copies, capture:
                moved = obj.to(device=self._device, non_blocking=True)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11 on
                error.add_note(f"while a batch's {type(obj).__name__} was moved to {self._device} by its own `to`")
            raise
        if moved is None:
            raise BatchError(f"{type(obj).__name__}.to returned None; it must return the moved object")
        self._learned(type(obj)).learn(obj, moved, capture.captured)
        return moved

    def _learned(self, cls: type) -> Learned:
        key = (cls, self._device.type)
        learned = _learned.get(key)
        if learned is None:
            learned = _learned[key] = Learned(cls)
        return learned

    def _arrive(self, source: Tensor, form: Form) -> Tensor:
        nbytes = source.numel() * source.element_size()
        if not self._isolate and nbytes < min(self._direct_bytes, CAPTURE_BYTES):
            if self._open is None or not self._open.fits(nbytes):
                self._open = self._new_arena(CAPTURE_BYTES)
            return self._open.add(source, form)
        if source.stride() == form[2] and _is_dense(source) and self._can_leave(source):
            target = Views(self._allocate(_size(nbytes), self._isolate)).at(0, form)
            self.direct.append((target, source))
            return target
        return self._new_arena(_size(nbytes)).add(source, form)

    def _new_arena(self, nbytes: int) -> Arena:
        arena = Arena(self._allocate(nbytes, self._isolate), self._streams)
        self.arenas.append(arena)
        return arena


def _size(nbytes: int) -> int:
    return max(aligned(nbytes), ALIGNMENT)


def _leaf(tensor: Tensor, index: int) -> Leaf:
    numel, size = tensor.numel(), tensor.element_size()
    start = tensor.data_ptr()
    # A tensor without elements has no place in a storage; one at an odd address could not be viewed in an extent.
    alone = numel == 0 or start % size != 0
    storage = -1 - index if alone else tensor.untyped_storage()._cdata
    return Leaf(storage, start, numel * size, (tensor.dtype, tensor.shape, tensor.stride()))


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill one run of memory, each once. `.to` keeps such a tensor's strides."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
