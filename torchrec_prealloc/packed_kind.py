"""How the engine takes a packed batch: its memory as it is, or unpacked on the host first.

**As it is**: one copy for all small tensors and one for each large one, then the batch is read around views of the
device's memory. Which tensors move is asked of the same walk that serves unpacked batches, once for each structure, on
a *template*: the batch around tensors of no elements. What a class' own `to` does is learned and checked as always; the
fields that it depends on are part of the structure.

**Unpacked**: the batch's tensors are views of the packed memory on the host, and travel like any other batch's. So it
goes where the device's batch is more than the host's around moved tensors:

- with `isolate`, where there is a `KeyedJaggedTensor`: it needs memory of its own;
- where a class' own `to` has to run: its first batch, each recheck, and always if it computes;
- where a registered type or a pytree node makes the object in its own way;
- where something travels apart that is more than host memory.

**Small tensors that a user keeps** would keep the memory of all small ones. They are found out as those of unpacked
batches are (`held.py`), and from then on travel once more, into memory of their own; the batch is read around those.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_prealloc.batch import OwnTo, Walk
from torchrec_prealloc.batch_types import Kind, has_its_own_way
from torchrec_prealloc.packed_batch import APART, DTYPES, UNPACKED, PackedBatch, Place, read_table
from torchrec_prealloc.shipment import Shipment

REMEMBERED = 64
"""Structures that are remembered."""

_structures: OrderedDict[Any, _Structure] = OrderedDict()


def choose(packed: PackedBatch, own_to: OwnTo, isolate: bool) -> Kind:
    """How to walk a packed batch. `own_to` is a shipment where it is to be sent."""
    key = packed.code, packed.dtypes, packed.globals
    structure = _structures.get(key)
    if structure is None:
        structure = _structures[key] = _Structure(packed)
        while len(_structures) > REMEMBERED:
            _structures.popitem(last=False)
    if not structure.is_plain or not structure.is_served(own_to) or (isolate and structure.has_kjt):
        return UNPACKED
    if isinstance(own_to, Shipment):
        sent = _Sent(own_to, packed, structure.kept)
        return Kind(sent.flatten, sent.unflatten)
    return AS_IT_IS


def _flatten(packed: PackedBatch) -> tuple[Sequence[Any], Any]:
    return [*map(_alone, packed.sections), *packed.apart], packed


def _alone(section: Tensor) -> Tensor:
    """The same memory as a storage of its own: sections that are one storage would stay one on the device."""
    is_alone = section.untyped_storage().nbytes() == len(section)
    alone = section if is_alone else torch.from_numpy(section.numpy())
    # In words: torch copies what has few elements in one thread, and waits for no other.
    return alone.view(torch.int64)


def _unflatten(children: Sequence[Any], packed: PackedBatch) -> Any:
    kept = _structures[packed.code, packed.dtypes, packed.globals].kept
    return packed.rebuild(_tensors(children, packed, kept))


def _tensors(children: Sequence[Any], packed: PackedBatch, kept: frozenset[int]) -> Sequence[Tensor]:
    """The batch's tensors, in the order of their indices, those `kept` on the host among them."""
    count = len(packed.sections)
    tensors = packed.views([section.view(torch.uint8) for section in children[:count]], children[count:])
    if kept:
        host = packed.views(packed.sections, packed.apart)
        tensors = [host[index] if index in kept else tensor for index, tensor in enumerate(tensors)]
    return tensors


AS_IT_IS = Kind(_flatten, _unflatten)


class _Sent:
    """A packed batch on its way, whose small tensors get memory of their own where somebody keeps them."""

    def __init__(self, shipment: Shipment, packed: PackedBatch, kept: frozenset[int]) -> None:
        held = shipment.memory.held_in_packed
        wanted = held.next_batch(len(packed.dtypes))
        self._again: dict[int, Place] = {}
        """Those that travel once more."""
        if wanted:
            table = read_table(packed.table)
            places = {index: table.place(index) for index in wanted if index not in kept}
            self._again = {index: place for index, place in places.items() if place.section == 0}
        self._kept = kept
        self._watched = held.latest
        self._shipment = shipment

    def flatten(self, packed: PackedBatch) -> tuple[Sequence[Any], Any]:
        children, _ = _flatten(packed)
        if not self._again:
            return children, packed
        again = [packed.at(place) for place in self._again.values()]
        self._shipment.own_memory.update(map(id, again))
        return [*children, *again], packed

    def unflatten(self, children: Sequence[Any], packed: PackedBatch) -> Any:
        memory = self._shipment.memory
        if packed.sections:
            memory.watch(children[0], -1, self._watched)
        if not self._again:
            return packed.rebuild(_tensors(children, packed, self._kept))
        count = len(children) - len(self._again)
        tensors = list(_tensors(children[:count], packed, self._kept))
        for index, arrived in zip(self._again, children[count:], strict=True):
            memory.watch(arrived, index, self._watched)
            tensors[index] = arrived
        return packed.rebuild(tensors)


class _MustRun(Exception):
    """An object's own `to` has to run."""


class _Asked:
    """Asks how objects with their own `to` are walked, and keeps the answers."""

    def __init__(self, own_to: OwnTo) -> None:
        self.answers: list[tuple[Any, Kind]] = []
        self._own_to = own_to

    def kind(self, obj: Any) -> Kind | None:
        kind = self._own_to.kind(obj)
        if kind is None:
            raise _MustRun
        self.answers.append((obj, kind))
        return kind

    def run(self, obj: Any) -> Any:
        raise NotImplementedError


class _Structure:
    """What is known of all batches of one structure."""

    def __init__(self, packed: PackedBatch) -> None:
        self.is_plain = APART not in packed.dtypes
        self.has_kjt = False
        self.kept: frozenset[int] = frozenset()
        """Tensors that stay on the host."""
        self._answers: list[tuple[Any, Kind]] | None = None
        self._tensors: list[Tensor] = []
        self._template: Any = None
        if self.is_plain:
            self._tensors = _without_elements(packed.dtypes)
            self._template = packed.rebuild(self._tensors)

    def is_served(self, own_to: OwnTo) -> bool:
        """Whether every object with its own `to` in the next batch is walked, and how is known."""
        if self._answers is not None and all(own_to.kind(obj) is kind for obj, kind in self._answers):
            return True
        asked = _Asked(own_to)
        walk = Walk(asked)
        try:
            walk.find(self._template)
        except _MustRun:
            self._answers = None
            return False
        containers = walk.containers()
        self._answers = asked.answers
        self.has_kjt = any(isinstance(obj, KeyedJaggedTensor) for obj, _ in containers)
        self.is_plain = all(_is_read_as_walked(obj) for obj, _ in containers)
        moved = set(map(id, walk.groups[0]))
        self.kept = frozenset(index for index, tensor in enumerate(self._tensors) if id(tensor) not in moved)
        return self.is_plain


def _without_elements(dtypes: bytes) -> list[Tensor]:
    several = {index: iter(torch.empty(dtypes.count(index), 0, dtype=DTYPES[index]).unbind(0)) for index in set(dtypes)}
    return [next(several[index]) for index in dtypes]


_JAGGED = (KeyedJaggedTensor, JaggedTensor, KeyedTensor)


def _is_read_as_walked(obj: Any) -> bool:
    """Whether an object that is read around the device's tensors is what a walk makes of the host's."""
    cls = type(obj)
    if cls is KeyedJaggedTensor and obj._jt_dict is not None:
        return False  # forgotten by a walk
    return cls in _JAGGED or not has_its_own_way(cls)
