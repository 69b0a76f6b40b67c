"""One batch made ready to travel: its device memory allocated, its small tensors gathered, its copies listed.

Nothing here touches a stream: memory comes from the one that is current, and `transfer.py` queues the copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_prealloc import unpinned
from torchrec_prealloc.batch import Walk, tensors_in
from torchrec_prealloc.batch_types import BatchError, Kind
from torchrec_prealloc.buffers import Views, host_bytes, leaf_views, unbind, unit_views
from torchrec_prealloc.capture import Capture, RealCopies, runs_in
from torchrec_prealloc.config import PreallocConfig
from torchrec_prealloc.labels import step
from torchrec_prealloc.layout import ALIGNMENT, Form, Leaf, Segment, aligned, plan
from torchrec_prealloc.memory import Memory
from torchrec_prealloc.own_to import Learned, contents
from torchrec_prealloc.plain import check_storage, is_dense, is_plain, leaf
from torchrec_prealloc.runs import Region, Structure, structure_of
from torchrec_prealloc.staging import Staging

CAPTURE_BYTES = 1 << 20
"""Largest arena for conversions of a class' own `to`, whose sizes are not known beforehand."""
BACKGROUND_BYTES = 1 << 20
"""Memory that is not pinned is gathered by the thread in the background from this size on. Below it, handing the work
over takes the main thread about as long as the work."""

_learned: dict[tuple[type, str], Learned] = {}


class Arena:
    """Device memory that host tensors are gathered for.

    Args:
        base: device memory (uint8, 1-D).
        staging: gives the pinned host memory, `block`, in which they are gathered; without one (on the CPU) `base` is
            filled directly.
    """

    def __init__(self, base: Tensor, staging: Staging | None) -> None:
        self.base = base
        self.block = staging.take(base.numel()) if staging is not None else None
        self.sources: list[Tensor] = []
        self.targets: list[Tensor] = []
        """For each source its place in `block` (or in `base`)."""
        self.nbytes = 0
        """Bytes in use, from the start."""
        self.takes_long = False
        """Whether filling `block` is for a thread in the background."""
        self.views = Views(base)
        self.places = Views(self.block) if self.block is not None else self.views

    def add(self, source: Tensor, form: Form) -> Tensor:
        """Put one host tensor behind the others; returns its device tensor, of dtype, shape and strides `form`."""
        offset = self.nbytes
        self.nbytes = offset + aligned(source.numel() * source.element_size())
        self.sources.append(source)
        self.targets.append(self.places.at(offset, form))
        return self.views.at(offset, form)

    def add_run(self, region: Region, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gather a run's members; returns their device tensors."""
        with step("gather"):
            region.gather(tensors, region.rows(self.places))
        return unbind(region.rows(self.views))

    def fits(self, nbytes: int) -> bool:
        """Whether another `nbytes` have room."""
        return self.nbytes + aligned(nbytes) <= self.base.numel()


class Shipment:
    """A batch's way from the host's object to the device's. What its methods decide, `doctor/trial.py` writes down.

    Args:
        device: the target.
        staging: pinned host memory; None on a device without streams, which cannot copy while the host goes on.
        config: options.
        isolate: whether each KeyedJaggedTensor gets memory of its own.
        memory: what is remembered of earlier batches.
        flush: `flush(shipment, reuse_sources)`: send what is loaded, order the current stream after it, and with
            `reuse_sources` wait until the host's tensors may be changed.
    """

    def __init__(
        self,
        device: torch.device,
        staging: Staging | None,
        config: PreallocConfig,
        isolate: bool,
        memory: Memory,
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
        self.ready: list[Any] = []
        """Events after which kept memory may be written."""
        self.memory = memory
        self.own_memory: set[int] = set()
        """`id`s of host tensors that get memory of their own, however small they are."""
        self.fresh = False
        """Whether the copy, and who waits for it, must follow the owner stream: it allocates, or does a part itself."""
        self._device = device
        self._staging = staging
        self._streams = staging is not None
        self._direct_bytes = config.direct_bytes
        self._isolate = isolate
        self._flush = flush
        self._open: Arena | None = None
        self._next_capture = memory.capture_bytes
        """Size of the next arena for conversions of a class' own `to`."""
        self._captured = 0
        """Bytes in such arenas."""
        self._pinning: list[Tensor] | None = None
        """Host tensors whose memory is asked whether it is pinned, where that is due."""
        self._learning: set[int] = set()
        """Objects whose own `to` runs, by `id`."""

    def load(self, batch: Any) -> Any:
        """Allocate device memory for `batch`, and list its copies.

        Returns:
            The device's batch, whose tensors hold nothing yet.
        """
        if self._streams and unpinned.is_due(batch):
            self._pinning = []
        walk = Walk(self, self._isolate)
        with step("find tensors"):
            walk.find(batch)
        with step("lay out"):
            arrived = [self._load_group(group, index > 0) for index, group in enumerate(walk.groups)]
        if self._pinning:
            unpinned.report(batch, self._pinning)
        with step("rebuild"):
            return walk.rebuild(batch, arrived)

    def take(self) -> tuple[list[Arena], list[tuple[Tensor, Tensor]]]:
        """The copies listed since the last call."""
        taken = self.arenas, self.direct
        self.arenas, self.direct, self._open = [], [], None
        return taken

    # Tensors that were found in the batch ------------------------------------------------------------------------

    def _load_group(self, tensors: list[Tensor], isolated: bool) -> list[Tensor]:
        if self._pinning is not None:
            self._pinning += filter(is_plain, tensors)
        count = len(tensors)
        if count == 1 and not isolated and is_plain(tensors[0]) and tensors[0].is_contiguous():
            return [self._load_one(tensors[0])]
        alone = self.memory.held.next_batch(count) if not isolated else ()
        if self.own_memory:
            alone = frozenset(alone).union(i for i, tensor in enumerate(tensors) if id(tensor) in self.own_memory)
        structure = self.memory.structures.get(count)
        if structure is not None and structure.alone == alone and structure.fits(tensors, self._direct_bytes):
            listed = [(one, len(one)) for one in (self.arenas, self.direct, self.owned, self.isolated, self.foreign)]
            try:
                return self._load_tensors(tensors, structure, isolated)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # the members of a run are no longer of one shape
                for one, before in listed:
                    del one[before:]
        leaves = [leaf(tensor, index) if is_plain(tensor) else None for index, tensor in enumerate(tensors)]
        structure = structure_of(leaves, tensors, self._direct_bytes, alone)
        self.memory.structures[count] = structure
        return self._load_tensors(tensors, structure, isolated)

    def _load_one(self, tensor: Tensor) -> Tensor:
        """A group of one tensor, as a packed batch of small ones is: nothing to lay out, and nobody to share with."""
        check_storage(tensor)
        nbytes, form = tensor.numel() * tensor.element_size(), (tensor.dtype, tensor.shape, tensor.stride())
        is_large = nbytes >= self._direct_bytes
        base = self._allocate(_size(nbytes), False)
        if is_large and self._can_leave(tensor):
            arrived = Views(base).at(0, form)
            self.direct.append((arrived, tensor))
            return arrived
        arena = Arena(base, self._staging)
        arena.takes_long = self._streams and is_large
        arena.sources, arena.targets, arena.nbytes = [tensor], [arena.places.at(0, form)], _size(nbytes)
        self.arenas.append(arena)
        return arena.targets[0] if arena.block is None else arena.views.at(0, form)

    def _load_tensors(self, tensors: list[Tensor], structure: Structure, isolated: bool) -> list[Tensor]:
        moved: dict[int, Tensor] = {}
        plain: list[Tensor] = []
        leaves: list[Leaf] = []
        positions = {id(tensors[index]): index for index in structure.singles}
        for key, position in positions.items():
            tensor = tensors[position]
            if is_plain(tensor):
                leaves.append(leaf(tensor, len(plain), position in structure.alone))
                plain.append(tensor)
            else:
                moved[key] = self._move_alone(tensor)
        arrived = list(tensors)
        regions = structure.regions(tensors)
        for segment in plan(leaves, self._direct_bytes, taken=sum(region.nbytes for region in regions)):
            base = self._allocate(segment.nbytes, isolated)
            first = segment.units[0].members[0] if segment.units else -1
            if not isolated and (not segment.direct or leaves[first].alone):
                self.memory.watch(base, positions[id(plain[first])] if segment.direct else -1)
            for index, view in self._load_segment(segment, base, leaves, plain, tensors, regions, arrived):
                moved[id(plain[index])] = view
        for index in structure.singles:
            arrived[index] = moved[id(tensors[index])]
        return arrived

    def _load_segment(
        self,
        segment: Segment,
        base: Tensor,
        leaves: list[Leaf],
        plain: list[Tensor],
        tensors: list[Tensor],
        regions: list[Region],
        arrived: list[Tensor],
    ) -> Iterator[tuple[int, Tensor]]:
        sources = [
            plain[unit.members[0]] if len(unit.members) == 1 else host_bytes(unit, plain[unit.members[0]])
            for unit in segment.units
        ]
        if segment.direct and self._can_leave(sources[0]):
            views = Views(base)
            units = unit_views(views, segment, leaves)
            self.direct.append((units[0], sources[0]))
        else:
            arena = Arena(base, self._staging)
            arena.takes_long = self._streams and segment.nbytes >= BACKGROUND_BYTES and segment.direct
            if not segment.direct:
                for region in regions:
                    region.run.put(arrived, arena.add_run(region, tensors))
            views = arena.views
            units = unit_views(views, segment, leaves)
            arena.sources, arena.nbytes = sources, segment.nbytes
            arena.targets = unit_views(arena.places, segment, leaves) if self._streams else units
            self.arenas.append(arena)
        return leaf_views(views, segment, units, leaves)

    def _move_alone(self, tensor: Tensor) -> Tensor:
        """A tensor that is more than strided host memory goes its own way: `.to`, on the owner stream."""
        if self._device.type == "cpu":
            return tensor.to(self._device, copy=tensor.is_cpu)
        self.fresh = True
        if tensor.device == self._device:
            self.foreign.append(tensor)
            return tensor
        moved = tensor.to(self._device, non_blocking=True)
        self.owned.append(moved)
        return moved

    def _can_leave(self, source: Tensor) -> bool:
        """Whether a host tensor can be copied from where it is without the host waiting for the copy."""
        return not self._streams or (is_dense(source) and source.is_pinned())

    def _allocate(self, nbytes: int, isolated: bool) -> Tensor:
        with step("allocate"):
            base, ready = self.memory.take(nbytes)
        if ready is None:
            self.fresh = True
            self.allocations += 1
        else:
            self.ready.append(ready)
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

        A `to` that fails under capture runs once more without it. If it fails there too, that is the exception which
        is raised; if not, its class is *opaque* from then on: its `to` runs plainly, on the owner stream. A class whose
        `to` has run under capture before is run once more only if the exception came out of an operation on a
        tensor; any other is its own.

        Raises:
            BatchError: `to` returned None.
            Exception: what `to` raises, unchanged but for a note that names the class (on Python 3.11 and later).
        """
        self.fresh = True
        learned = self._learned(type(obj))
        if learned.opaque:
            return self._run_plainly(obj)
        before = contents(obj) if learned.is_learning(obj) else None
        capture = Capture(self._device, self._arrive, lambda reuse: self._flush(self, reuse))
        failure: Exception | None = None
        try:
            with self._copies(capture), capture:
                moved = obj.to(device=self._device, non_blocking=True)
        except Exception as error:
            final = isinstance(error, (BatchError, torch.OutOfMemoryError))
            if final or (learned.ran and not runs_in(error, Capture)):
                self._note(error, obj)
                raise
            failure = error
        if failure is not None:
            moved = self._run_plainly(obj)
            learned.give_up(failure)
            return moved
        learned.ran = True
        self._check_moved(obj, moved)
        self._own(obj, moved)
        if before is not None:
            self._learning.add(id(obj))
            try:
                learned.learn(obj, before, moved, capture.captured, self._kept_by, self._device)
            finally:
                self._learning.discard(id(obj))
        return moved

    def _copies(self, capture: Capture) -> Any:
        if self._device.type != "cpu":
            return contextlib.nullcontext()
        return RealCopies(lambda: capture.run_queue(reuse_source=True))

    def _run_plainly(self, obj: Any) -> Any:
        try:
            moved = obj.to(device=self._device, non_blocking=True)
        except Exception as error:
            self._note(error, obj)
            raise
        self._check_moved(obj, moved)
        self._own(obj, moved)
        return moved

    def _own(self, obj: Any, moved: Any) -> None:
        """Note the memory of what `to` made; what it passed on was on the device before, and is somebody else's."""
        given = set(map(id, tensors_in(obj)))
        for tensor in tensors_in(moved):
            if tensor.device == self._device:
                (self.foreign if id(tensor) in given else self.owned).append(tensor)

    def _note(self, error: Exception, obj: Any) -> None:
        if hasattr(error, "add_note"):  # Python 3.11 on
            error.add_note(f"while a batch's {type(obj).__name__} was moved to {self._device} by its own `to`")

    def _check_moved(self, obj: Any, moved: Any) -> None:
        if moved is None:
            raise BatchError(f"{type(obj).__name__}.to returned None; it must return the moved object")

    def _kept_by(self, nested: Any) -> frozenset[str] | None:
        """The fields that a nested object's own `to` leaves on the host; None where it has to run for each object."""
        learned = self._learned(type(nested))
        verdict = learned.verdict(nested)
        if verdict is None and id(nested) not in self._learning and learned.is_learning(nested):
            self.run(nested)
            verdict = learned.verdict(nested)
        return verdict.kept if verdict is not None else None

    def _learned(self, cls: type) -> Learned:
        key = (cls, self._device.type)
        learned = _learned.get(key)
        if learned is None:
            learned = _learned[key] = Learned(cls)
        return learned

    def _arrive(self, source: Tensor, form: Form) -> Tensor:
        check_storage(source)
        if self._pinning is not None:
            self._pinning.append(source)
        nbytes = source.numel() * source.element_size()
        if not self._isolate and nbytes < min(self._direct_bytes, CAPTURE_BYTES):
            if self._open is None or not self._open.fits(nbytes):
                self._open = self._new_arena(max(self._next_capture, aligned(nbytes)))
                self._next_capture = min(2 * self._next_capture, CAPTURE_BYTES)
            self._captured += aligned(nbytes)
            # The next batch finds room for all of it in one arena.
            self.memory.capture_bytes = min(max(self.memory.capture_bytes, self._captured), CAPTURE_BYTES)
            return self._open.add(source, form)
        if source.stride() == form[2] and self._can_leave(source):
            target = Views(self._allocate(_size(nbytes), self._isolate)).at(0, form)
            self.direct.append((target, source))
            return target
        return self._new_arena(_size(nbytes)).add(source, form)

    def _new_arena(self, nbytes: int) -> Arena:
        arena = Arena(self._allocate(nbytes, self._isolate), self._staging)
        self.arenas.append(arena)
        return arena


def _size(nbytes: int) -> int:
    return max(aligned(nbytes), ALIGNMENT)
