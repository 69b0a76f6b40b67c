"""Which types hold tensors, and how each is taken apart and put together again.

A type is understood in one of three ways, looked up once for each type:

1. A **registered** type says itself what it holds (`register_batch_type`). Registered here: `KeyedJaggedTensor`,
   `JaggedTensor`, `KeyedTensor`, `TensorDict`; dict, list, tuple and their subclasses, named tuples, dataclasses and
   attrs classes without a `to` of their own; and whatever `torch.utils._pytree` knows.
2. A class with **its own `to`** is asked what it moves (`own_to.py`).
3. Everything else (numbers, strings, numpy arrays, ...) is passed through untouched.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

try:
    from tensordict import TensorDict
except ImportError:  # TorchRec's early versions do without
    TensorDict = None

Flatten = Callable[[Any], tuple[Sequence[Any], Any]]
Unflatten = Callable[[Sequence[Any], Any], Any]


class BatchError(TypeError):
    """A batch, or something in it, cannot be understood. The message names the type, the reason and the remedy."""


class Kind(NamedTuple):
    """How to take instances of a type apart and put them together again."""

    flatten: Flatten
    unflatten: Unflatten
    blank: Callable[[Any], Any] | None = None
    """Makes the new object before its children, for types that can hold themselves; `unflatten` then fills it, given
    it as context."""
    choose: Callable[[Any, Any, bool], Kind] | None = None
    """`choose(obj, own_to, isolate)`: the kind for one object, for types that are taken apart in several ways."""


OWN_TO = Kind(lambda obj: ((), obj), lambda children, obj: obj)
"""Marks a class with its own `to`."""

_registered: dict[type, Kind] = {}
_resolved: dict[type, Kind | None] = {}


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
    register_kind(cls, Kind(flatten, unflatten))


def register_kind(cls: type, kind: Kind) -> None:
    """As `register_batch_type`, for types of this package."""
    _registered[cls] = kind
    _resolved.clear()


def has_its_own_way(cls: type) -> bool:
    """Whether a class was registered, here or with pytree: then it may be rebuilt in any way."""
    return cls in _registered or (cls in pytree.SUPPORTED_NODES and cls not in _PLAIN_CONTAINERS)


def check_understood(batch: Any) -> None:
    """Refuse a batch that is itself no tensor, no registered type and no class with its own `to`.

    Raises:
        BatchError: it is none of them.
    """
    if not isinstance(batch, Tensor) and kind_of(type(batch)) is None:
        raise BatchError(
            f"a batch of type {type(batch).__name__} is no tensor, no registered type and has no `to`; "
            "register its class with register_batch_type, or give it `to(device, non_blocking)`"
        )


def kind_of(cls: type) -> Kind | None:
    """The kind of a class; `OWN_TO` for one with its own `to`; None for what holds no tensors, and for tensors."""
    try:
        return _resolved[cls]
    except KeyError:
        kind = _resolved[cls] = _resolve(cls)
        return kind


def _resolve(cls: type) -> Kind | None:
    if cls in _registered:
        return _registered[cls]
    if issubclass(cls, Tensor):
        return None
    if callable(getattr(cls, "to", None)):
        return OWN_TO
    return _structure(cls)


_PLAIN_CONTAINERS = (dict, list, tuple, collections.OrderedDict, collections.defaultdict)


def _structure(cls: type) -> Kind | None:
    if cls is torch.Size:  # known to pytree, but never holds tensors
        return None
    if cls in pytree.SUPPORTED_NODES and cls not in _PLAIN_CONTAINERS:
        node = pytree.SUPPORTED_NODES[cls]
        return Kind(node.flatten_fn, lambda children, context: node.unflatten_fn(list(children), context))
    if issubclass(cls, dict):
        return Kind(lambda obj: (list(dict.values(obj)), None), _fill_dict, copy.copy)
    if issubclass(cls, list):
        return Kind(lambda obj: (obj, None), _fill_list, copy.copy)
    if issubclass(cls, tuple):
        return Kind(lambda obj: (obj, obj), _unflatten_tuple)
    if dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__"):
        return fields_kind(cls)
    return None


@functools.cache
def structure(cls: Any) -> Kind:
    """The kind of a class without regard to its own `to`."""
    return _registered.get(cls) or _structure(cls) or fields_kind(cls)


def _fill_list(children: Sequence[Any], new: list[Any]) -> list[Any]:
    list.__setitem__(new, slice(None), children)
    return new


def _fill_dict(children: Sequence[Any], new: dict[Any, Any]) -> dict[Any, Any]:
    # The copy has the same keys in the same order. dict.__setitem__: a subclass' own may have effects.
    for key, child in zip(list(new), children, strict=True):
        dict.__setitem__(new, key, child)
    return new


def _unflatten_tuple(children: Sequence[Any], old: tuple[Any, ...]) -> tuple[Any, ...]:
    cls: Any = type(old)
    if cls is tuple:
        return tuple(children)
    if hasattr(cls, "n_sequence_fields"):  # torch.return_types.*: CPython's struct sequences
        made: tuple[Any, ...] = cls(children)
        return made
    new: tuple[Any, ...] = tuple.__new__(cls, children)
    if hasattr(old, "__dict__"):
        new.__dict__.update(old.__dict__)
    return new


# Objects by their attributes -------------------------------------------------------------------------------------


@functools.cache
def _slots(cls: Any) -> tuple[str, ...]:
    names: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def field_names(obj: Any) -> list[str]:
    """The attributes that `obj` itself has, in its slots and its `__dict__`."""
    own = getattr(obj, "__dict__", ())
    slots = _slots(type(obj))  # type: ignore[arg-type]  # mypy takes no class for hashable
    return [*(name for name in slots if hasattr(obj, name)), *own] if slots else list(own)


def is_made_of_fields(cls: type) -> bool:
    """Whether objects of a class are nothing but their attributes: no dicts, tuples or other built-in types."""
    try:
        object.__new__(cls)
    except TypeError:
        return False
    return True


def fields_kind(cls: type, kept: Collection[str] = ()) -> Kind:
    """Instances of `cls` by their attributes, those named in `kept` as they are.

    Rebuilding runs no `__init__` or `__post_init__`: they may compute other values than the object has.
    """

    def names(obj: Any) -> list[str]:
        return [name for name in field_names(obj) if name not in kept] if kept else field_names(obj)

    def flatten(obj: Any) -> tuple[Sequence[Any], Any]:
        return [getattr(obj, name) for name in names(obj)], None

    bare = is_made_of_fields(cls)

    def blank(obj: Any) -> Any:
        new: Any = object.__new__(cls) if bare else copy.copy(obj)
        for name in field_names(obj):
            object.__setattr__(new, name, getattr(obj, name))
        return new

    def unflatten(children: Sequence[Any], new: Any) -> Any:
        for name, child in zip(names(new), children, strict=True):
            object.__setattr__(new, name, child)
        return new

    return Kind(flatten, unflatten, blank)


# TorchRec's jagged types -----------------------------------------------------------------------------------------


def _register_moved(cls: type, *moved: str, forgotten: tuple[str, ...] = ()) -> None:
    """Register `cls` by its attributes: `moved` go to the device, `forgotten` become None, others stay as they are."""

    def flatten(obj: Any) -> tuple[Sequence[Any], Any]:
        state = obj.__dict__
        return [state[name] for name in moved], state

    def unflatten(children: Sequence[Any], state: dict[str, Any]) -> Any:
        new: Any = object.__new__(cls)
        new.__dict__.update(state)
        new.__dict__.update(zip(moved, children, strict=True))
        for name in forgotten:
            new.__dict__[name] = None
        return new

    register_batch_type(cls, flatten, unflatten)


# `_jt_dict` is what to_dict() answered on the host. TorchRec's own `to` carries it along, host tensors and all; it is
# forgotten here, so that the device's KJT answers with device tensors.
_register_moved(
    KeyedJaggedTensor, "_values", "_weights", "_lengths", "_offsets", "_inverse_indices", forgotten=("_jt_dict",)
)
_register_moved(JaggedTensor, "_values", "_weights", "_lengths", "_offsets")
_register_moved(KeyedTensor, "_values")


# TensorDict ------------------------------------------------------------------------------------------------------


def _flatten_tensordict(td: Any) -> tuple[Sequence[Any], Any]:
    names = td.names if any(td.names) else None
    return list(td.values()), (list(td.keys()), td.batch_size, names, td.is_locked)


def _unflatten_tensordict(children: Sequence[Any], context: Any) -> Any:
    keys, batch_size, names, locked = context
    # As its own `to` does: where the tensors went is then the TensorDict's device, whatever it was before.
    device = next((child.device for child in children if child.device is not None), None)
    # Whether a TensorDict in it is locked is the outer one's to say, and it may be the host's own: a shallow copy.
    own = [child.copy() if isinstance(child, TensorDict) else child for child in children]
    new = TensorDict(dict(zip(keys, own, strict=True)), batch_size=batch_size, names=names, device=device)
    return new.lock_() if locked else new


# The class itself only: a tensorclass, a lazy stack and a subclass have a `to` that does more.
if TensorDict is not None:
    register_batch_type(TensorDict, _flatten_tensordict, _unflatten_tensordict)
