"""One batch: find its tensors, and rebuild the same object around other tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_prealloc.batch_types import OWN_TO, BatchError, Kind, kind_of, structure


class OwnTo(Protocol):
    """Serves the objects of a batch whose classes have their own `to`."""

    def kind(self, obj: Any) -> Kind | None:
        """How to walk `obj`; None where its `to` has to run."""

    def run(self, obj: Any) -> Any:
        """The object that `to` gives."""


class _Node(NamedTuple):
    """A container met in a batch, taken apart once: `flatten` may make new objects at each call."""

    obj: Any
    kind: Kind
    children: Sequence[Any]
    context: Any
    group: int
    span: range | None = None
    """The positions of `children` in their group, where these are many tensors and nothing else."""


MANY = 16
"""Containers of at least this many tensors, and nothing else, are handled in bulk."""

_MISSING = object()
_UNFINISHED = object()


class Walk:
    """A batch taken apart into its tensors, and put together again around others.

    Args:
        own_to: serves the classes with their own `to`.
        isolate: whether each `KeyedJaggedTensor`'s tensors are kept apart from all others, for pipelines that free its
            storages early.

    A tensor or container that appears several times is one object in the result too. A container without tensors
    is passed on as it is.
    """

    def __init__(self, own_to: OwnTo, isolate: bool = False) -> None:
        self.groups: list[list[Tensor]] = [[]]
        """The tensors: in `groups[0]` those that may share memory, in each other group one KJT's. Each is there once;
        only containers of many tensors are not searched for what was met before."""
        self._positions: list[dict[int, int]] = [{}]
        self._own_to = own_to
        self._isolate = isolate
        self._group = 0
        self._nodes: dict[tuple[int, int], _Node | None] = {}
        self._built: dict[tuple[int, int], Any] = {}
        self._arrived: Sequence[Sequence[Tensor]] = ()

    def find(self, batch: Any) -> None:
        """Collect the tensors of `batch` into `groups`.

        Raises:
            BatchError: the batch nests too deeply.
        """
        try:
            self._find(batch)
        except RecursionError:
            raise _too_deep(batch) from None

    def rebuild(self, batch: Any, arrived: Sequence[Sequence[Tensor]]) -> Any:
        """The batch that was given to `find`, around other tensors.

        Args:
            batch: the same object, unchanged.
            arrived: for each of `groups`, the new tensors, in the order of the old ones.

        Raises:
            BatchError: a container that can only be made whole holds itself.
        """
        self._arrived = arrived
        try:
            return self._rebuild(batch)
        except RecursionError:
            raise _too_deep(batch) from None

    def containers(self) -> list[tuple[Any, Kind]]:
        """The objects found that hold tensors, and how each was taken apart."""
        return [(node.obj, node.kind) for node in self._nodes.values() if node is not None]

    def _find(self, obj: Any) -> bool:
        """Whether `obj` is or holds a tensor, or has its own `to`."""
        cls = type(obj)
        kind = kind_of(cls)
        if kind is None:
            if not isinstance(obj, Tensor):
                return False
            self._take(obj)
            return True
        key = (self._group, id(obj))
        if key in self._nodes:
            return self._nodes[key] is not None
        if kind is OWN_TO:
            kind = self._own_to.kind(obj)
            if kind is None:
                self._nodes[key] = _Node(obj, OWN_TO, (), None, self._group)
                self._built[key] = self._own_to.run(obj)
                return True
        if kind.choose is not None:
            kind = kind.choose(obj, self._own_to, self._isolate)
        outer = self._group
        if self._isolate and cls is KeyedJaggedTensor:
            self._group = len(self.groups)
            self.groups.append([])
            self._positions.append({})
        children, context = kind.flatten(obj)
        self._nodes[key] = _Node(obj, kind, children, context, self._group)
        span = self._find_many(children)
        if span:
            self._nodes[key] = _Node(obj, kind, children, context, self._group, span)
        elif not self._find_each(children):
            self._nodes[key] = None
        self._group = outer
        return self._nodes[key] is not None

    def _find_many(self, children: Sequence[Any]) -> range | None:
        """Take many tensors without a step of Python for each; None where there are few, or other things."""
        if len(children) < MANY or set(map(type, children)) != {Tensor}:
            return None
        tensors = self.groups[self._group]
        first = len(tensors)
        tensors.extend(children)
        return range(first, len(tensors))

    def _take(self, tensor: Tensor) -> None:
        positions, tensors = self._positions[self._group], self.groups[self._group]
        if id(tensor) not in positions:
            positions[id(tensor)] = len(tensors)
            tensors.append(tensor)

    def _find_each(self, children: Sequence[Any]) -> bool:
        holds = False
        for child in children:
            if type(child) is Tensor:
                self._take(child)
                holds = True
            elif child is not None and self._find(child):
                holds = True
        return holds

    def _rebuild(self, obj: Any) -> Any:
        key = (self._group, id(obj))
        node = self._nodes.get(key)
        if node is None:
            position = self._positions[self._group].get(id(obj))
            return obj if position is None else self._arrived[self._group][position]
        built = self._built.get(key, _MISSING)
        if built is _UNFINISHED:
            name = type(obj).__name__
            raise BatchError(f"a {name} in the batch holds itself; only lists, dicts and objects with fields may")
        if built is not _MISSING:
            return built
        _, kind, children, context, group, span = node
        if kind.blank is None:
            self._built[key] = _UNFINISHED
        else:
            context = self._built[key] = kind.blank(obj)
        outer, self._group = self._group, group
        arrived, positions = self._arrived[group], self._positions[group]
        if span is not None:
            new = list(arrived[span.start : span.stop])
        else:
            new = [
                arrived[positions[id(child)]] if type(child) is Tensor else self._rebuild(child) for child in children
            ]
        self._group = outer
        result = self._built[key] = kind.unflatten(new, context)
        return result


class _ByStructure:
    """Looks into every object with its own `to`."""

    def kind(self, obj: Any) -> Kind | None:
        return structure(type(obj))  # type: ignore[arg-type]  # mypy takes no class for hashable

    def run(self, obj: Any) -> Any:
        raise NotImplementedError


def tensors_in(obj: Any) -> list[Tensor]:
    """The distinct tensors that an object holds, those in objects with their own `to` included."""
    walk = Walk(_ByStructure())
    walk.find(obj)
    return list({id(tensor): tensor for tensor in walk.groups[0]}.values())


def _too_deep(batch: Any) -> BatchError:
    return BatchError(
        f"the batch ({type(batch).__name__}) nests deeper than Python's recursion limit allows; flatten it, or "
        "register its class with register_batch_type"
    )
