"""Classes with their own `to`: which of them a walk over their fields serves as well as running `to`.

What a class' `to` does is the truth: it may leave a field on the host, change a dtype, compute something. So the first
batch of a class goes through its `to`, under capture. If the result differs from the host's object in nothing but
that the tensors of some fields moved, then from then on those fields are walked, which is several times faster, and the
others are kept as they are. If it differs in anything else, or the host's object was changed, `to` runs under capture
for every batch of the class. Subclasses decide for themselves. An object in a field that has its own `to` must come out
as its own `to` gives it, or the outer `to` runs for every batch.

**Checked on each batch** that is walked: the class, the names of its fields, each field's type, a tensor field's
dtype and device, and the value of each field that is None, bool, int, float, str or Enum: the flags that a `to` may
branch on. A combination not seen before goes through `to` and is learned by itself, and so does a batch with tensors in
a list, dict or object that had none when its class was learned. A number or string that took more than `MAX_VALUES`
values is no flag (a batch size, an id), and its value is no longer looked at. Cost: about 0.3 µs a field.

**Not seen at once**: a `to` that branches on something else, such as globals, shapes, or what a nested container holds.
Every `RECHECK`-th walked batch of a class goes through `to` again; if that gives something else, the class is no longer
walked, and a warning says so.

A class whose `to` cannot run under capture at all is left to run plainly (`Learned.opaque`).
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_prealloc.batch import tensors_in
from torchrec_prealloc.batch_types import OWN_TO, Kind, field_names, fields_kind, is_made_of_fields, kind_of

MAX_VALUES = 8
RECHECK = 1000
MAX_SIGNATURES = 1000
"""Combinations of flags that are kept for a class; with more, it starts to learn anew."""

Captured = Mapping[int, Sequence[Tensor]]
"""The device tensors for the `id` of each host tensor that was moved as it is."""

KeptBy = Callable[[Any], "frozenset[str] | None"]
"""The fields that a nested object's own `to` leaves on the host; None where it has to run for each object."""


class Verdict(NamedTuple):
    """What `to` does with the fields of objects of one signature."""

    moved: frozenset[str]
    kept: frozenset[str]
    """Fields whose tensors stayed on the host."""
    unsettled: tuple[str, ...]
    """Fields that may hold tensors, but held none."""
    kind: Kind
    """Walks all fields but `kept`."""


class Learned:
    """What is known of one class with its own `to`, on one type of device."""

    def __init__(self, cls: type) -> None:
        self.opaque = False
        """Whether `to` cannot run under capture."""
        self.ran = False
        """Whether `to` has run under capture."""
        self._cls = cls
        self._verdicts: dict[Any, Verdict | None] = {}
        self._kinds: dict[frozenset[str], Kind] = {}
        self._values: dict[str, set[Any]] = {}
        self._no_flags: set[str] = set()
        self._until_recheck = RECHECK
        self._trusted = is_made_of_fields(cls)

    def kind(self, obj: Any) -> Kind | None:
        """How to walk `obj`; None where its `to` has to run. Counts as one batch."""
        verdict = self.verdict(obj)
        if verdict is None:
            return None
        self._until_recheck -= 1
        return verdict.kind if self._until_recheck > 0 else None

    def verdict(self, obj: Any) -> Verdict | None:
        """What `to` does with `obj`; None where that is not known, or is more than moving fields."""
        if not self._trusted:
            return None
        verdict = self._verdicts.get(self._signature(obj))
        if verdict is None or any(tensors_in(getattr(obj, name)) for name in verdict.unsettled):
            return None
        return verdict

    def is_learning(self, obj: Any) -> bool:
        """Whether `learn` would learn something from `obj`."""
        return self._trusted and self._verdicts.get(self._signature(obj), _MISSING) is not None

    def learn(
        self,
        obj: Any,
        before: Mapping[str, Any],
        moved: Any,
        captured: Captured,
        kept_by: KeptBy,
        device: torch.device,
    ) -> None:
        """Compare the host's object with what its `to` made of it.

        Args:
            obj: the host's object; `is_learning(obj)` before `to` ran.
            before: `contents(obj)` before `to` ran.
            moved: what `to` gave.
            captured: the conversions that it made.
            kept_by: answers for nested objects with their own `to`.
            device: the target.
        """
        fates = _fates(obj, before, moved, _Comparison(captured, kept_by, device))
        signature = self._signature(obj)
        known = self._verdicts.get(signature)
        if self._until_recheck <= 0:
            self._until_recheck = RECHECK
        if known is not None and not _agree(known, fates):
            self._distrust()
            return
        self._note_values(obj)
        if len(self._verdicts) >= MAX_SIGNATURES:
            self._verdicts.clear()
        self._verdicts[self._signature(obj)] = None if fates is None else self._judge(obj, fates, known)

    def give_up(self, error: Exception) -> None:
        """`to` failed under capture, and not without."""
        self.opaque = True
        name = self._cls.__name__
        warnings.warn(
            f"{name}.to cannot run while its copies are observed ({type(error).__name__}: {error}), so it runs plainly "
            "and its copies do not overlap with computation. To have them overlap, say what moves with "
            f"register_batch_type({name}, flatten, unflatten)",
            stacklevel=2,
        )

    def _judge(self, obj: Any, fates: Mapping[str, Fate], known: Verdict | None) -> Verdict:
        moved = {name for name, fate in fates.items() if fate is Fate.MOVED}
        kept = {name for name, fate in fates.items() if fate is Fate.KEPT}
        if known is not None:
            moved |= known.moved
            kept |= known.kept
        open_names = [name for name in fates if name not in moved and name not in kept]
        unsettled = tuple(name for name in open_names if kind_of(type(getattr(obj, name))) is not None)
        left = frozenset(kept)
        if left not in self._kinds:
            self._kinds[left] = fields_kind(self._cls, left)
        return Verdict(frozenset(moved), left, unsettled, self._kinds[left])

    def _distrust(self) -> None:
        self._trusted = False
        self._verdicts.clear()
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
            elif value is None or cls is bool or (isinstance(value, _FLAGS) and name not in self._no_flags):
                entries.append((name, cls, value))
            else:
                entries.append((name, cls))
        return tuple(entries)

    def _note_values(self, obj: Any) -> None:
        for name in field_names(obj):
            value = getattr(obj, name)
            if not isinstance(value, _FLAGS) or name in self._no_flags:
                continue
            seen = self._values.setdefault(name, set())
            seen.add(value)
            if len(seen) > MAX_VALUES:
                self._no_flags.add(name)
                self._verdicts.clear()


_FLAGS = (int, float, str, enum.Enum)
_MISSING: Any = object()


# Comparing a host object with what `to` made of it ---------------------------------------------------------------


class Fate(enum.Enum):
    """What became of a field."""

    MOVED = "a walk into it gives what `to` gave"
    KEPT = "its tensors are the host's"
    NEUTRAL = "it holds no tensors"
    OTHER = "it is something else than the same object around other tensors"


class _Comparison:
    """One comparison of a host's object with what `to` made of it."""

    def __init__(self, captured: Captured, kept_by: KeptBy, device: torch.device) -> None:
        self.captured = captured
        self.kept_by = kept_by
        self.device = device
        self.fates: dict[tuple[int, int], Fate] = {}
        """Of the pairs of containers met, by `id`: they may be shared, and may hold themselves."""


def contents(obj: Any) -> dict[str, Any]:
    """The fields of an object, with the items of those that are lists and dicts."""
    return {name: _items(getattr(obj, name)) for name in field_names(obj)}


def _items(value: Any) -> Any:
    if isinstance(value, list):
        return (value, *value)
    if isinstance(value, dict):
        return (value, *value, *value.values())
    return (value,)


def _is_changed(obj: Any, before: Mapping[str, Any]) -> bool:
    now = contents(obj)
    return list(now) != list(before) or any(
        len(now[name]) != len(was) or any(new is not old for new, old in zip(now[name], was, strict=True))
        for name, was in before.items()
    )


def _agree(known: Verdict, fates: Mapping[str, Fate] | None) -> bool:
    opposite = {Fate.MOVED: known.kept, Fate.KEPT: known.moved}
    return fates is not None and not any(name in opposite.get(fate, ()) for name, fate in fates.items())


def _fates(obj: Any, before: Mapping[str, Any], moved: Any, comparison: _Comparison) -> dict[str, Fate] | None:
    """What became of each field; None where walking fields would not give `moved`."""
    if moved is obj or _is_changed(obj, before):
        return None
    try:
        fates = _field_fates(obj, moved, comparison)
    except RecursionError:
        return None
    return None if fates is None or Fate.OTHER in fates.values() else fates


def _field_fates(old: Any, new: Any, comparison: _Comparison) -> dict[str, Fate] | None:
    if type(new) is not type(old) or field_names(new) != field_names(old):
        return None
    comparison.fates[id(old), id(new)] = Fate.NEUTRAL
    return {name: _fate(getattr(old, name), getattr(new, name), comparison) for name in field_names(old)}


def _fate(old: Any, new: Any, comparison: _Comparison) -> Fate:
    if isinstance(old, Tensor):
        if new is old:
            # A tensor that was on the device already is to be found: readers on other streams hold its memory.
            return Fate.MOVED if old.device == comparison.device and not old.is_cpu else Fate.KEPT
        targets = comparison.captured.get(id(old), ())
        return Fate.MOVED if any(new is target for target in targets) and new.dtype == old.dtype else Fate.OTHER
    kind = kind_of(type(old))
    if kind is None:
        return Fate.NEUTRAL if _equal(old, new) else Fate.OTHER
    if type(new) is not type(old):
        return Fate.OTHER
    key = id(old), id(new)
    if key not in comparison.fates:
        comparison.fates[key] = Fate.NEUTRAL  # as long as it is not known: what counts is what else is in it
        fate = _nested_fate if kind is OWN_TO else _container_fate
        comparison.fates[key] = fate(old, new, comparison)
    return comparison.fates[key]


def _container_fate(old: Any, new: Any, comparison: _Comparison) -> Fate:
    kind: Any = kind_of(type(old))
    children, rest = kind.flatten(old)
    new_children, new_rest = kind.flatten(new)
    if len(children) != len(new_children) or not _same_rest(old, new, children, rest, new_rest):
        return Fate.OTHER
    fates = {_fate(child, other, comparison) for child, other in zip(children, new_children, strict=True)}
    if Fate.OTHER in fates or {Fate.MOVED, Fate.KEPT} <= fates:
        return Fate.OTHER
    return next((fate for fate in (Fate.MOVED, Fate.KEPT) if fate in fates), Fate.NEUTRAL)


def _nested_fate(old: Any, new: Any, comparison: _Comparison) -> Fate:
    """Of an object with its own `to`: a walk asks that `to`, so the outer one has to have done the same."""
    if new is old:
        return Fate.KEPT if tensors_in(old) else Fate.NEUTRAL
    left = comparison.kept_by(old)
    fates = None if left is None else _field_fates(old, new, comparison)
    if left is None or fates is None:
        return Fate.OTHER
    allowed = {name: (Fate.NEUTRAL, Fate.KEPT if name in left else Fate.MOVED) for name in fates}
    return Fate.MOVED if all(fate in allowed[name] for name, fate in fates.items()) else Fate.OTHER


_NO_DICT: Any = object()


def _same_rest(old: Any, new: Any, children: Sequence[Any], rest: Any, new_rest: Any) -> bool:
    """Whether two objects of one type agree in what is not among their children."""
    if isinstance(old, (dict, list, tuple)):
        same_keys = not isinstance(old, dict) or list(old) == list(new)
        return same_keys and _equal(getattr(old, "__dict__", None), getattr(new, "__dict__", None))
    if rest is None:
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
