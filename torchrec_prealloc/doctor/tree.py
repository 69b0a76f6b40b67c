"""The batch as a tree: what each leaf is, how it travels, and why."""

from __future__ import annotations

import enum
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchrec_prealloc import PackedBatch
from torchrec_prealloc.batch import tensors_in
from torchrec_prealloc.batch_types import BatchError, field_names, kind_of, structure
from torchrec_prealloc.doctor.explained import ExplainedLeaf, ExplainedNode, ExplainedSegment
from torchrec_prealloc.doctor.names import JAGGED, child_names, note_of
from torchrec_prealloc.doctor.reasons import Route, why_background, why_direct, why_gathered, why_not_plain
from torchrec_prealloc.doctor.trial import OwnRun, SeenWalk, Trial
from torchrec_prealloc.plain import is_dense, is_plain

Fate = tuple[Route, "int | None", str]


class Tree:
    """Explains what a trial has found.

    Args:
        batch: what it examined.
        walk: that found its tensors.
        can_pin: whether memory can be asked whether it is pinned.
        all_pinned: take every host tensor for pinned.
    """

    def __init__(
        self, batch: Any, trial: Trial, walk: SeenWalk, direct_bytes: int, can_pin: bool, all_pinned: bool
    ) -> None:
        self.tensors: list[tuple[ExplainedLeaf, Tensor]] = []
        """Each distinct leaf once."""
        self.containers: list[tuple[str, Any]] = []
        """Each container that holds tensors, with its path."""
        self.sections: set[int] = set()
        """The `id`s of a packed batch's sections, whose dtype says nothing of what is in them."""
        self.passed: list[tuple[str, Any]] = []
        """Objects that hold tensors, and are passed on as they are."""
        self._trial = trial
        self._walk = walk
        self._direct_bytes = direct_bytes
        self._can_pin = can_pin
        self._all_pinned = all_pinned
        self._seen: dict[tuple[int, int], str] = {}
        self._leaves: dict[tuple[int, int], ExplainedLeaf] = {}
        self._segments, self._segment_of = _segments(trial)
        found = {id(tensor): tensor for group in walk.groups for tensor in group}
        self._reached = set(found)
        for ran in trial.own.values():
            found.update((id(tensor), tensor) for tensor in tensors_in(ran.obj))
        self._viewed = Counter(_storage(tensor) for tensor in found.values() if _has_storage(tensor))
        self._storages: dict[int, int] = {}
        try:
            root = self._node(batch, "batch", "", 0)
        except RecursionError:
            raise BatchError(f"the batch ({type(batch).__name__}) nests too deeply to be shown") from None
        self.root = root or ExplainedNode("batch", "batch", type(batch).__name__)

    @property
    def segments(self) -> tuple[ExplainedSegment, ...]:
        """In the order of their copies: first what is gathered, then what is direct."""
        counts = [0] * len(self._segments)
        for leaf, _ in self.tensors:
            if leaf.segment is not None:
                counts[leaf.segment] += 1
        return tuple(replace(one, leaves=count) for one, count in zip(self._segments, counts, strict=True))

    # Containers --------------------------------------------------------------------------------------------------

    def _node(self, obj: Any, name: str, parent: str, group: int) -> ExplainedNode | None:
        path = parent + name
        if isinstance(obj, Tensor):
            return self._found(obj, name, path, group, self._walk.position(obj, group))
        if id(obj) in self._trial.own:
            return self._own(self._trial.own[id(obj)], name, parent)
        node = self._walk.node(obj, group)
        if node is None:
            return self._passed(obj, name, path)
        again = self._again(obj, name, path, group)
        if again is not None:
            return again
        self.containers.append((path, obj))
        if isinstance(obj, PackedBatch):
            self.sections.update(map(id, node.children))
        names = child_names(obj, node.children)
        children: list[ExplainedNode | None] = []
        for index, (child, child_name) in enumerate(zip(node.children, names, strict=True)):
            if node.span is not None:
                position = node.span.start + index
                children.append(self._found(child, child_name, path + child_name, node.group, position))
            else:
                children.append(self._node(child, child_name, path, node.group))
        children += self._left_behind(obj, path)
        made = _container(obj, name, path, children)
        if type(obj) in self._trial.known:
            made = replace(made, note="its `to` only moves fields: walked, but for the first of its class")
        return made

    def _again(self, obj: Any, name: str, path: str, group: int) -> ExplainedNode | None:
        first = self._seen.setdefault((group, id(obj)), path)
        return None if first == path else ExplainedNode(name, path, type(obj).__name__, again=first)

    def _left_behind(self, obj: Any, path: str) -> Iterator[ExplainedNode | None]:
        """What hangs on an object and is not among its children: it stays on the host."""
        cls = type(obj)
        if isinstance(obj, PackedBatch) or cls in JAGGED or (cls.__module__.partition(".")[0] == "tensordict"):
            return
        own = cls in self._trial.known
        why = f"{cls.__name__}.to leaves it there" if own else f"how {cls.__name__} is taken apart does not name it"
        for name in field_names(obj):
            value = getattr(obj, name)
            if any(id(tensor) not in self._reached for tensor in tensors_in(value)):
                yield self._fixed(value, f".{name}", path, lambda tensor: (Route.LEFT, None, why))

    def _own(self, ran: OwnRun, name: str, parent: str) -> ExplainedNode | None:
        """An object whose own `to` runs for each batch."""
        cls, kept = type(ran.obj), ran.kept()
        known = self._trial.known.get(cls)
        here = self._trial.place.used
        converted = {key: new for key, new in ran.by_field().items() if _storage_or_none(new) in self._segment_of}

        def fate(tensor: Tensor) -> Fate:
            if id(tensor) in ran.captured:
                return self._fate(tensor, ran.captured[id(tensor)])
            if id(tensor) in converted and is_plain(tensor):
                new = converted[id(tensor)]
                index = self._segment_of[_storage(new)]
                dtype = str(new.dtype).removeprefix("torch.")
                return self._segments[index].route, index, f"{cls.__name__}.to makes it {dtype}, on the host"
            if tensor.device == here and not tensor.is_cpu:
                return Route.PRESENT, None, "nothing to copy"
            if ran.error:
                return Route.OWN_TO, None, "not known without the device"
            if id(tensor) in kept:
                return Route.LEFT, None, f"{cls.__name__}.to leaves it there"
            opaque = known is not None and known.opaque
            return Route.OWN_TO, None, f"{cls.__name__}.to {'cannot be observed' if opaque else 'converts or drops it'}"

        made = self._fixed(ran.obj, name, parent, fate)
        note = "its own `to` runs for each batch"
        if ran.error:
            note += f"; what it does is not known without the device, where it stopped ({ran.error})"
        return replace(made, note=note) if made is not None else None

    def _fixed(self, obj: Any, name: str, parent: str, fate: Callable[[Tensor], Fate]) -> ExplainedNode | None:
        """A tree that the engine does not walk, whose leaves' fates are known otherwise."""
        path = parent + name
        if isinstance(obj, Tensor):
            return self._leaf(obj, name, path, -1, fate)
        cls: Any = type(obj)
        if kind_of(cls) is None:
            return None
        again = self._again(obj, name, path, -1)
        if again is not None:
            return again
        self.containers.append((path, obj))
        children = structure(cls).flatten(obj)[0]
        names = child_names(obj, children)
        return _container(
            obj, name, path, [self._fixed(child, one, path, fate) for child, one in zip(children, names, strict=True)]
        )

    def _passed(self, obj: Any, name: str, path: str) -> ExplainedNode | None:
        """An object that the engine does not look into: its tensors, if it holds any, stay where they are."""
        if kind_of(type(obj)) is not None or isinstance(obj, (type, types.ModuleType, types.FunctionType, enum.Enum)):
            return None
        cls = type(obj).__name__
        why = f"{cls} is no type that is understood, and is passed on as it is"
        held = [(field, getattr(obj, field)) for field in field_names(obj)]
        children = [
            self._fixed(value, f".{field}", path, lambda tensor: (Route.LEFT, None, why))
            for field, value in held
            if tensors_in(value)
        ]
        if not children:
            return None
        self.passed.append((path, obj))
        return _container(obj, name, path, children)

    # Leaves ------------------------------------------------------------------------------------------------------

    def _found(self, tensor: Tensor, name: str, path: str, group: int, position: int | None) -> ExplainedNode | None:
        if position is None:
            return None
        arrived = self._trial.arrived[group][position]

        def fate(tensor: Tensor) -> Fate:
            route, segment, why = self._fate(tensor, arrived)
            apart = group > 0 and segment is not None
            return route, segment, why + ("; apart from other memory, since it is freed early" if apart else "")

        return self._leaf(tensor, name, path, group, fate)

    def _fate(self, tensor: Tensor, arrived: Tensor) -> Fate:
        if arrived is tensor:
            return Route.PRESENT, None, "nothing to copy"
        if not is_plain(tensor):
            return Route.OWN_TO, None, why_not_plain(tensor) or ""
        index = self._segment_of[_storage(arrived)]
        route = self._segments[index].route
        nbytes, dense, pinned = _nbytes(tensor), is_dense(tensor), self._pinned(tensor)
        if route is Route.DIRECT:
            return route, index, why_direct(nbytes, self._direct_bytes, self._trial.place.streams)
        if route is Route.BACKGROUND:
            return route, index, why_background(nbytes, self._direct_bytes, pinned, dense)
        return route, index, why_gathered(nbytes, self._direct_bytes, pinned, dense)

    def _leaf(self, tensor: Tensor, name: str, path: str, group: int, fate: Callable[[Tensor], Fate]) -> ExplainedNode:
        key = group, id(tensor)
        met = self._leaves.get(key)
        if met is not None:
            return ExplainedNode(name, path, met.type, leaf=met, again=met.path)
        route, segment, why = fate(tensor)
        storage = _storage_or_none(tensor)
        leaf = self._leaves[key] = ExplainedLeaf(
            path=path,
            type=type(tensor).__name__,
            dtype=tensor.dtype,
            shape=None if tensor.is_nested else tuple(tensor.shape),
            nbytes=_nbytes(tensor),
            device=tensor.device,
            pinned=self._pinned(tensor),
            dense=is_dense(tensor) if storage is not None else None,
            requires_grad=tensor.requires_grad,
            storage=None if storage is None else self._storages.setdefault(storage, len(self._storages)),
            storage_nbytes=0 if storage is None else tensor.untyped_storage().nbytes(),
            shared=1 if storage is None else max(self._viewed[storage], 1),
            route=route,
            segment=segment,
            why=why,
        )
        self.tensors.append((leaf, tensor))
        return ExplainedNode(name, path, leaf.type, leaf=leaf)

    def _pinned(self, tensor: Tensor) -> bool | None:
        if not tensor.is_cpu or not _has_storage(tensor):
            return None
        if self._all_pinned:
            return True
        return tensor.is_pinned() if self._can_pin and tensor.numel() else None


def _container(obj: Any, name: str, path: str, children: Iterable[ExplainedNode | None]) -> ExplainedNode:
    held = tuple(child for child in children if child is not None)
    return ExplainedNode(name, path, type(obj).__name__, note_of(obj), held)


def _segments(trial: Trial) -> tuple[list[ExplainedSegment], dict[int, int]]:
    """The segments, and the index of each by its device storage."""
    segments: list[ExplainedSegment] = []
    index_of: dict[int, int] = {}
    for arena in trial.sent_arenas:
        index_of[_storage(arena.base)] = len(segments)
        route = Route.BACKGROUND if arena.takes_long else Route.GATHERED
        # On a device without streams it is filled where it is: in one piece.
        itemsize = 1 if arena.block is not None else max(arena.nbytes, 1)
        segments.append(ExplainedSegment(route, arena.base.untyped_storage().nbytes(), arena.nbytes, itemsize, 0))
    for target, _ in trial.sent_direct:
        index_of[_storage(target)] = len(segments)
        allocated, copied = target.untyped_storage().nbytes(), target.numel() * target.element_size()
        segments.append(ExplainedSegment(Route.DIRECT, allocated, copied, target.element_size(), 0))
    return segments, index_of


def _has_storage(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _storage_or_none(tensor: Tensor) -> int | None:
    return _storage(tensor) if _has_storage(tensor) else None


def _nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, and of what says where they are."""
    if tensor.layout is torch.sparse_coo:
        return _nbytes(tensor._indices()) + _nbytes(tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return _nbytes(tensor.crow_indices()) + _nbytes(tensor.col_indices()) + _nbytes(tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return _nbytes(tensor.ccol_indices()) + _nbytes(tensor.row_indices()) + _nbytes(tensor.values())
    return tensor.numel() * tensor.element_size()
