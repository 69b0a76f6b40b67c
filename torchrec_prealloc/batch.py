"""What is in a batch: find its tensors, and rebuild the same object around other tensors.

A batch is a tree. Each type in it is understood in one of three ways, looked up once for each type:

1. A **registered** type says itself what it holds (`register_batch_type`). Registered here: tensors,
   `KeyedJaggedTensor`, `JaggedTensor`, `KeyedTensor`, dict, list, tuple and their subclasses, named tuples,
   dataclasses and attrs classes without a `to` of their own; and whatever `torch.utils._pytree` knows.
2. A class with **its own `to`** is asked: its `to` runs, and what it converts is captured (`capture.py`).
3. Everything else (numbers, strings, numpy arrays, ...) is passed through untouched.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

Flatten = Callable[[Any], tuple[Sequence[Any], Any]]
Unflatten = Callable[[Sequence[Any], Any], Any]


class BatchError(TypeError):
    """A batch, or something in it, cannot be understood. The message names the type, the reason and the remedy."""


class _Kind(NamedTuple):
    """How to take a type apart and put it together again."""

    flatten: Flatten
    unflatten: Unflatten
    blank: Callable[[Any], Any] | None = None
    """Makes the empty new object, for types that can hold themselves; `unflatten` is then given it as context."""


class _Node(NamedTuple):
    """A container met in a batch, taken apart once: `flatten` may make new objects at each call."""

    obj: Any
    kind: _Kind
    children: Sequence[Any]
    context: Any
    group: int


_OWN_TO = _Kind(lambda obj: ((), obj), lambda children, obj: obj)
"""Marks a class with its own `to`."""

_registered: dict[type, _Kind] = {}
_resolved: dict[type, _Kind | None] = {Tensor: None}


def register_batch_type(cls: type, flatten: Flatten, unflatten: Unflatten) -> None:
    """Say how batches of class `cls` (exactly; subclasses decide for themselves) are taken apart and rebuilt.

    Args:
        cls: the class. A registration replaces an earlier one, and goes before the class' own `to`.
        flatten: `flatten(obj) -> (children, context)`: the objects in `obj` that may hold tensors, and anything
            else that `unflatten` needs. Called once for each batch; must not change `obj`.
        unflatten: `unflatten(children, context) -> obj`: a new object around the device's children. Must not change
            `context`.

    Raises:
        BatchError: `cls` is not a class, or is a tensor class (tensors are what batches are made of).
    """
    if not isinstance(cls, type) or issubclass(cls, Tensor):
        raise BatchError(f"register_batch_type: {cls!r} is not a class that holds tensors; give the batch's class")
    _registered[cls] = _Kind(flatten, unflatten)
    _resolved.clear()
    _resolved[Tensor] = None


class Walk:
    """One batch taken apart: `leaves` are its tensors; `rebuild` makes the same tree around their device copies.

    Args:
        own_to: called as `own_to(obj)` for an object whose class has its own `to`; returns the moved object.
        isolate: whether each `KeyedJaggedTensor`'s tensors are kept apart from all others (`groups`), for pipelines
            that free its storages early.

    Each tensor and each container is one object however often it appears, and stays one.
    """

    def __init__(self, own_to: Callable[[Any], Any], isolate: bool = False) -> None:
        self.groups: list[dict[int, Tensor]] = [{}]
        """The distinct tensors by `id`: in `groups[0]` those that may share memory, in each other group one KJT's."""
        self._own_to = own_to
        self._isolate = isolate
        self._leaves = self.groups[0]
        self._nodes: dict[tuple[int, int], _Node | None] = {}
        self._built: dict[tuple[int, int], Any] = {}
        self._group = 0

    def find(self, batch: Any) -> None:
        """Collect the tensors of `batch` into `groups`.

        Raises:
            BatchError: the batch nests too deeply.
        """
        try:
            self._find(batch)
        except RecursionError:
            raise _too_deep(batch) from None

    def rebuild(self, batch: Any, arrived: Sequence[dict[int, Tensor]]) -> Any:
        """The batch that was given to `find`, around other tensors.

        Args:
            batch: the same object, unchanged.
            arrived: for each of `groups`, the new tensor for each old tensor's `id`.

        Raises:
            BatchError: a container that can only be made whole holds itself.
        """
        self._arrived = arrived
        self._group = 0
        try:
            return self._rebuild(batch)
        except RecursionError:
            raise _too_deep(batch) from None

    def _find(self, obj: Any) -> bool:
        """Whether `obj` is or holds a tensor, or has its own `to`: what does not is kept as it is."""
        cls = type(obj)
        if cls is Tensor:
            self._leaves[id(obj)] = obj
            return True
        kind = _kind(cls)
        if kind is None:
            if isinstance(obj, Tensor):
                self._leaves[id(obj)] = obj
                return True
            return False
        key = (self._group, id(obj))
        if key in self._nodes:
            return self._nodes[key] is not None
        outer = self._group
        if kind is _OWN_TO:
            self._nodes[key] = _Node(obj, kind, (), None, outer)
            self._built[key] = self._own_to(obj)
            return True
        if self._isolate and cls is KeyedJaggedTensor:
            self._group = len(self.groups)
            self.groups.append({})
            self._leaves = self.groups[self._group]
        children, context = kind.flatten(obj)
        self._nodes[key] = _Node(obj, kind, children, context, self._group)
        leaves = self._leaves
        holds = False
        for child in children:
            if type(child) is Tensor:
                leaves[id(child)] = child
                holds = True
            elif self._find(child):
                holds = True
        self._group = outer
        self._leaves = self.groups[outer]
        if not holds:
            self._nodes[key] = None
        return holds

    def _rebuild(self, obj: Any) -> Any:
        node = self._nodes.get((self._group, id(obj)))
        if node is None:
            return self._arrived[self._group].get(id(obj), obj)
        key = (self._group, id(obj))
        built = self._built.get(key, _MISSING)
        if built is _UNFINISHED:
            raise BatchError(
                f"a {type(obj).__name__} in the batch holds itself; only lists, dicts and objects with fields may"
            )
        if built is not _MISSING:
            return built
        kind, children, context, group = node.kind, node.children, node.context, node.group
        if kind.blank is None:
            self._built[key] = _UNFINISHED
        else:
            context = self._built[key] = kind.blank(obj)
        outer, self._group = self._group, group
        arrived = self._arrived[group]
        new = [arrived[id(child)] if type(child) is Tensor else self._rebuild(child) for child in children]
        self._group = outer
        result = self._built[key] = kind.unflatten(new, context)
        return result


_MISSING = object()
_UNFINISHED = object()


def _too_deep(batch: Any) -> BatchError:
    return BatchError(
        f"the batch ({type(batch).__name__}) nests deeper than Python's recursion limit allows; flatten it, or "
        "register its class with register_batch_type"
    )


def is_understood(batch: Any) -> bool:
    """Whether `batch` itself is a tensor, a registered type or a class with its own `to`."""
    return isinstance(batch, Tensor) or _kind(type(batch)) is not None


def _kind(cls: type) -> _Kind | None:
    try:
        return _resolved[cls]
    except KeyError:
        kind = _resolved[cls] = _resolve(cls)
        return kind


def _resolve(cls: type) -> _Kind | None:
    if cls in _registered:
        return _registered[cls]
    if issubclass(cls, Tensor):
        return None
    if callable(getattr(cls, "to", None)):
        return _OWN_TO
    if cls in pytree.SUPPORTED_NODES and not issubclass(cls, (dict, list, tuple)):
        node = pytree.SUPPORTED_NODES[cls]
        return _Kind(node.flatten_fn, lambda children, context: node.unflatten_fn(list(children), context))
    if issubclass(cls, dict):
        return _Kind(lambda obj: (list(obj.values()), None), _fill_dict, copy.copy)
    if issubclass(cls, list):
        return _Kind(lambda obj: (obj, None), _fill_list, copy.copy)
    if issubclass(cls, tuple) and cls is not torch.Size:
        return _Kind(_flatten_tuple, _unflatten_tuple)
    if dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__"):
        return fields_of(cls)
    return None


def _fill_list(children: Sequence[Any], new: list[Any]) -> list[Any]:
    new[:] = children
    return new


def _fill_dict(children: Sequence[Any], new: dict[Any, Any]) -> dict[Any, Any]:
    # The copy has the same keys in the same order. dict.__setitem__: a subclass' own may have effects.
    for key, child in zip(list(new), children, strict=True):
        dict.__setitem__(new, key, child)
    return new


def _flatten_tuple(obj: tuple[Any, ...]) -> tuple[Sequence[Any], Any]:
    return obj, obj


def _unflatten_tuple(children: Sequence[Any], old: tuple[Any, ...]) -> tuple[Any, ...]:
    cls = type(old)
    if cls is tuple:
        return tuple(children)
    if hasattr(cls, "n_sequence_fields"):  # torch.return_types.*: CPython's struct sequences
        return cls(children)
    new = tuple.__new__(cls, children)
    if hasattr(old, "__dict__"):
        new.__dict__.update(old.__dict__)
    return new


def fields_of(cls: type) -> _Kind:
    """Take instances of `cls` apart by their attributes (`__dict__` and slots), and rebuild without running code.

    No `__init__` or `__post_init__` runs again: they may compute other values than the object has.
    """
    slots = [
        name
        for base in cls.__mro__
        for name in _as_names(base.__dict__.get("__slots__", ()))
        if name not in ("__dict__", "__weakref__")
    ]

    def names(obj: Any) -> list[str]:
        held = [name for name in slots if hasattr(obj, name)]
        return held + list(obj.__dict__) if hasattr(obj, "__dict__") else held

    def flatten(obj: Any) -> tuple[Sequence[Any], Any]:
        return [getattr(obj, name) for name in names(obj)], None

    def blank(obj: Any) -> Any:
        new = object.__new__(cls)
        new_names = names(obj)
        for name in new_names:
            object.__setattr__(new, name, getattr(obj, name))
        return new

    def unflatten(children: Sequence[Any], new: Any) -> Any:
        for name, child in zip(names(new), children, strict=True):
            object.__setattr__(new, name, child)
        return new

    return _Kind(flatten, unflatten, blank)


def _as_names(slots: str | Iterable[str]) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _register_jagged() -> None:
    """KJT, JT and KT by their attributes: those that their `to` moves, and all others as they are."""

    def moved(cls: type, *names: str, forget: tuple[str, ...] = ()) -> None:
        def flatten(obj: Any) -> tuple[Sequence[Any], Any]:
            state = obj.__dict__
            return [state[name] for name in names], state

        def unflatten(children: Sequence[Any], state: dict[str, Any]) -> Any:
            new = object.__new__(cls)
            new.__dict__.update(state)
            new.__dict__.update(zip(names, children, strict=True))
            for name in forget:
                new.__dict__[name] = None
            return new

        register_batch_type(cls, flatten, unflatten)

    # What to_dict() answered on the host holds host tensors. TorchRec's own `to` carries it along; a device KJT
    # whose to_dict() is on the host is of no use to anyone, so it is computed again where it is asked for.
    moved(
        KeyedJaggedTensor, "_values", "_weights", "_lengths", "_offsets", "_inverse_indices", forget=("_jt_dict",)
    )
    moved(JaggedTensor, "_values", "_weights", "_lengths", "_offsets")
    moved(KeyedTensor, "_values")


_register_jagged()
