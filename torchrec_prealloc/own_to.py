"""Classes with their own `to`: which of them a walk over their fields serves as well as running `to`.

What a class' `to` does is the truth: it may leave a field on the host, change a dtype, compute something. So the first
batch of a class goes through its `to`, under capture. If the result differs from the host's object in nothing but
that the tensors of some fields moved, then from then on those fields are walked, which is several times faster, and the
others are kept as they are. If it differs in anything else, `to` runs under capture for every batch of the class.

**Checked on each batch** that is walked: the class, the names of its fields, each field's type, a tensor field's
dtype and device, and the value of each field that is None, bool, int, float, str or Enum: the flags that a `to` may
branch on. A combination not seen before goes through `to` and is learned by itself. A number or string that took
more than `MAX_VALUES` values is no flag (a batch size, an id), and its value is no longer looked at. Cost: about 0.3 µs
a field.

**Not seen at once**: a `to` that branches on something else, such as globals or what a nested container holds. Every
`RECHECK`-th walked batch of a class goes through `to` again; if that gives something else, the class is no longer
walked, and a warning says so.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torchrec_prealloc.batch_types import OWN_TO, Kind, field_names, fields_kind, kind_of

MAX_VALUES = 8
RECHECK = 1000

Captured = Mapping[int, Sequence[Tensor]]
"""The device tensors for the `id` of each host tensor that was moved as it is."""


class Learned:
    """What is known of one class with its own `to`, on one type of device."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._kept: dict[Any, frozenset[str] | None] = {}
        self._kinds: dict[frozenset[str], Kind] = {}
        self._values: dict[str, set[Any]] = {}
        self._no_flags: set[str] = set()
        self._until_recheck = RECHECK
        self._trusted = True

    def kind(self, obj: Any) -> Kind | None:
        """How to walk `obj`; None where its `to` has to run."""
        if not self._trusted:
            return None
        kept = self._kept.get(self._signature(obj))
        if kept is None:
            return None
        self._until_recheck -= 1
        return self._kinds[kept] if self._until_recheck > 0 else None

    def learn(self, obj: Any, moved: Any, captured: Captured) -> None:
        """Compare the host's object with what its `to` made of it."""
        if not self._trusted:
            return
        kept = _kept_fields(obj, moved, captured)
        if self._until_recheck <= 0:
            self._until_recheck = RECHECK
            if self._kept.get(self._signature(obj), kept) != kept:
                self._distrust()
                return
        self._note_values(obj)
        self._kept[self._signature(obj)] = kept
        if kept is not None and kept not in self._kinds:
            self._kinds[kept] = fields_kind(self._cls, kept)

    def _distrust(self) -> None:
        self._trusted = False
        warnings.warn(
            f"{self._cls.__name__}.to moved other fields than it did for the same kind of batch before; from now on it "
            "runs for every batch. To have it fast, say what moves with register_batch_type",
            stacklevel=2,
        )

    def _signature(self, obj: Any) -> tuple[Any, ...]:
        entries: list[Any] = []
        for name in field_names(obj):
            value = getattr(obj, name)
            cls = type(value)
            if cls is Tensor:
                entries.append((name, value.dtype, value.device))
            elif value is None or cls is bool or (_is_flag(value) and name not in self._no_flags):
                entries.append((name, cls, value))
            else:
                entries.append((name, cls))
        return tuple(entries)

    def _note_values(self, obj: Any) -> None:
        for name in field_names(obj):
            value = getattr(obj, name)
            if not _is_flag(value) or name in self._no_flags:
                continue
            seen = self._values.setdefault(name, set())
            seen.add(value)
            if len(seen) > MAX_VALUES:
                self._no_flags.add(name)
                self._kept.clear()


def _is_flag(value: Any) -> bool:
    return isinstance(value, (int, float, str, enum.Enum))


# Comparing a host object with what `to` made of it ---------------------------------------------------------------


class _Fate(enum.Enum):
    MOVED = "its tensors are on the device"
    KEPT = "its tensors are the host's"
    NEUTRAL = "it holds no tensors"
    OTHER = "it is something else than the same object around other tensors"


def _kept_fields(obj: Any, moved: Any, captured: Captured) -> frozenset[str] | None:
    """The fields whose tensors stayed on the host; None where walking the other fields would not give `moved`."""
    if moved is obj or type(moved) is not type(obj) or field_names(moved) != field_names(obj):
        return None
    fates = {name: _fate(getattr(obj, name), getattr(moved, name), captured) for name in field_names(obj)}
    if _Fate.OTHER in fates.values():
        return None
    return frozenset(name for name, fate in fates.items() if fate is _Fate.KEPT)


def _fate(old: Any, new: Any, captured: Captured) -> _Fate:
    if isinstance(old, Tensor):
        if new is old:
            return _Fate.KEPT
        same = any(new is target for target in captured.get(id(old), ())) and new.dtype == old.dtype
        return _Fate.MOVED if same else _Fate.OTHER
    kind = kind_of(type(old))
    if kind is None:
        return _Fate.NEUTRAL if _equal(old, new) else _Fate.OTHER
    if type(new) is not type(old):
        return _Fate.OTHER
    if kind is OWN_TO:
        kind = fields_kind(type(old))
        if field_names(old) != field_names(new):
            return _Fate.OTHER
    children, rest = kind.flatten(old)
    new_children, new_rest = kind.flatten(new)
    if len(children) != len(new_children) or not _same_rest(old, new, children, rest, new_rest):
        return _Fate.OTHER
    fates = {_fate(child, other, captured) for child, other in zip(children, new_children, strict=True)}
    if _Fate.OTHER in fates or {_Fate.MOVED, _Fate.KEPT} <= fates:
        return _Fate.OTHER
    return next((fate for fate in (_Fate.MOVED, _Fate.KEPT) if fate in fates), _Fate.NEUTRAL)


_NO_DICT: Any = object()


def _same_rest(old: Any, new: Any, children: Sequence[Any], rest: Any, new_rest: Any) -> bool:
    """Whether two objects of one type agree in what is not among their children."""
    if isinstance(old, dict):
        return list(old) == list(new)
    if rest is old or rest is None:
        return True
    if rest is getattr(old, "__dict__", _NO_DICT):
        # Attributes beside the children: metadata, and caches that `to` may drop.
        moved = {id(child) for child in children}
        beside = (name for name, value in rest.items() if value is not None and id(value) not in moved)
        return all(new_rest[name] is None or _equal(rest[name], new_rest[name]) for name in beside)
    return _equal(rest, new_rest)


def _equal(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    try:
        same = old == new
        return same if isinstance(same, bool) else bool(same.all())
    except Exception:  # whatever a foreign __eq__ raises: not known to be equal
        return False
