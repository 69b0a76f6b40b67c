"""One batch taken through the engine's own decisions, without being sent.

A `Trial` is a `Shipment`: it takes the batch apart, lays it out and allocates for it as the engine does; what would be
copied is written down instead. So there is no second account of how a batch travels that could differ from the first.

**Where the device is missing** the device without memory (`meta`) stands in for it. Nothing in the layout depends on
the device but what is pinned (nothing can be, without one) and a class' own `to`, if that looks at values.

What a class' own `to` does is learned from one batch and relied on from the next, so a batch is tried twice; what this
process' engines have learned is neither asked nor changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchrec_prealloc.batch import Walk, tensors_in
from torchrec_prealloc.batch_types import BatchError, check_understood, field_names
from torchrec_prealloc.config import PreallocConfig
from torchrec_prealloc.doctor.place import Place
from torchrec_prealloc.layout import Form
from torchrec_prealloc.memory import Memory
from torchrec_prealloc.ordering import Ordering
from torchrec_prealloc.own_to import Learned
from torchrec_prealloc.plain import is_dense
from torchrec_prealloc.shipment import Arena, Shipment
from torchrec_prealloc.staging import Staging


class SeenWalk(Walk):
    """A walk that tells what it found."""

    def node(self, obj: Any, group: int) -> Any:
        """How a container met in a group was taken apart (`batch._Node`); None for one without tensors."""
        return self._nodes.get((group, id(obj)))

    def position(self, tensor: Tensor, group: int) -> int | None:
        """A tensor's place in `groups[group]`; None where it was not met, or only among many."""
        return self._positions[group].get(id(tensor))


@dataclass
class OwnRun:
    """An object whose own `to` ran."""

    obj: Any
    moved: Any = None
    captured: dict[int, Tensor] = field(default_factory=dict)
    """The device tensors, by the `id` of the host tensor that is copied into each."""
    error: str = ""
    """Why it could not be tried on the device that stands in."""

    def by_field(self) -> dict[int, Tensor]:
        """The tensor in the same field of the moved object, by the `id` of the host's."""
        pairs = ((getattr(self.obj, name), getattr(self.moved, name, None)) for name in field_names(self.obj))
        return {id(old): new for old, new in pairs if isinstance(old, Tensor) and isinstance(new, Tensor)}

    def kept(self) -> set[int]:
        """The `id`s of the host's tensors that the moved object holds, too."""
        return {id(tensor) for tensor in tensors_in(self.moved)} if self.moved is not None else set()


class Learning(Learned):
    """What is known of one class in this trial; it warns of nothing."""

    def __init__(self, cls: type) -> None:
        super().__init__(cls)
        self.failure = ""
        """Why the class' `to` cannot run under capture."""

    def give_up(self, error: Exception) -> None:
        self.opaque = True
        self.failure = f"{type(error).__name__}: {error}"


class Ordinary(Staging):
    """Memory to gather tensors in that is not pinned: nothing is sent from it."""

    def take(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class Trial(Shipment):
    """A shipment that is not sent.

    Args:
        place: the target.
        config: options.
        isolate: whether each KeyedJaggedTensor gets memory of its own.
        known: what is known of classes with their own `to`, by class.
        all_pinned: take every host tensor for pinned.
    """

    def __init__(
        self,
        place: Place,
        config: PreallocConfig,
        isolate: bool,
        known: dict[type, Learning],
        all_pinned: bool,
    ) -> None:
        memory = Memory(place.used, config, lambda stream: None, lambda: "a trial")
        staging = Ordinary(Ordering()) if place.streams else None
        super().__init__(place.used, staging, config, isolate, memory, _run_queue)
        self.known = known
        self.arrived: list[list[Tensor]] = []
        """For each group of the walk, the device's tensors."""
        self.own: dict[int, OwnRun] = {}
        """By the `id` of the object."""
        self.sent_arenas: list[Arena] = []
        self.sent_direct: list[tuple[Tensor, Tensor]] = []
        self.place = place
        self._all_pinned = all_pinned
        self._running: list[OwnRun] = []

    def examine(self, batch: Any) -> SeenWalk:
        """Take a batch as far as to its copies; returns the walk that found its tensors.

        Raises:
            BatchError, Exception: what the engine would raise.
        """
        walk = SeenWalk(self, self._isolate)
        walk.find(batch)
        for index, group in enumerate(walk.groups):
            self.arrived.append(self._load_group(group, index > 0))
        try:
            walk.rebuild(batch, self.arrived)
        except Exception as error:
            if self.place.is_there or isinstance(error, BatchError):
                raise
        self.write_down()
        return walk

    def write_down(self) -> tuple[list[Arena], list[tuple[Tensor, Tensor]]]:
        """Note the copies that are listed; returns them."""
        arenas, direct = self.take()
        self.sent_arenas += arenas
        self.sent_direct += direct
        return arenas, direct

    # What the engine does, written down; each of these is a method of Shipment -----------------------------------

    def run(self, obj: Any) -> Any:
        ran = self.own[id(obj)] = OwnRun(obj)
        self._running.append(ran)
        try:
            ran.moved = super().run(obj)
        except Exception as error:
            if self.place.is_there or isinstance(error, BatchError):
                raise
            ran.moved, ran.error = obj, f"{type(error).__name__}: {error}"
        finally:
            self._running.pop()
        return ran.moved

    def _arrive(self, source: Tensor, form: Form) -> Tensor:
        target = super()._arrive(source, form)
        for ran in self._running:
            ran.captured[id(source)] = target
        return target

    def _move_alone(self, tensor: Tensor) -> Tensor:
        if self.place.is_there:
            return super()._move_alone(tensor)
        if tensor.is_meta:
            return tensor.to("cpu")  # raises, as on the way to any device
        try:
            return super()._move_alone(tensor)
        except RuntimeError:  # a layout that the device without memory has not
            return torch.empty(0, device=self._device)

    def _can_leave(self, source: Tensor) -> bool:
        if self._all_pinned and self._streams:
            return is_dense(source)
        return super()._can_leave(source)

    def _learned(self, cls: type) -> Learned:
        return self.known.setdefault(cls, Learning(cls))


def _run_queue(trial: Any, _reuse_sources: bool) -> None:
    """A class' own `to` reads what it has moved: on a real device it needs the values."""
    arenas, direct = trial.write_down()
    if not trial.place.is_there:
        return
    with torch.no_grad():
        for arena in arenas:
            for target, source in zip(arena.targets, arena.sources, strict=True):
                target.copy_(source)
            if arena.block is not None:
                arena.base[: arena.nbytes].copy_(arena.block[: arena.nbytes])
        for target, source in direct:
            target.copy_(source)


def try_out(
    batch: Any, place: Place, config: PreallocConfig, isolate: bool = False, all_pinned: bool = False
) -> tuple[Trial, SeenWalk]:
    """What the engine would do with the second of two such batches, and the walk that found its tensors.

    Raises:
        BatchError: the engine would refuse the batch.
        Exception: what the batch's own `to` raises.
    """
    check_understood(batch)
    known: dict[type, Learning] = {}
    for _ in range(2):
        trial = Trial(place, config, isolate, known, all_pinned)
        walk = trial.examine(batch)
        if not trial.own:
            break  # there was nothing to learn
    return trial, walk
