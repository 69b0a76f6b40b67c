"""Related objects as one message, in which an object that they share is written once.

>>> spec, same = {"mesh": list(range(4096))}, "x"
>>> spec_in, spec_out = [spec, same], [spec, same]
>>> decoded_in, decoded_out = loads_all(dumps_all([spec_in, spec_out]))
>>> decoded_in[0] is decoded_out[0]
True

What is shared:

- **One object stays one object** in all members, whatever it is, cycles included.
- **Equal but separate immutable objects** (long strings and bytes, tuples of names and numbers) are written once and
  become one object.
- **Equal but separate lists of names and numbers** (the keys of each batch) are written once and stay separate lists.
  Other mutable objects that are merely equal have nothing in common.

It is all pickle: whatever pickle takes works (`__reduce_ex__`, `copyreg`); what pickle alone refuses (lambdas,
closures, local classes) is written by cloudpickle; what both refuse is refused with the path to it. A process group is
never written: a `ShardingEnv` arrives without it.

**Security**: to decode is to run what the message says. Decode only what your own processes wrote. `allowed` limits
what a message may import to the names that you give.

`stream.py` shares objects between messages.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from torchrec_prealloc.batch_types import field_names

PROTOCOL = 5
MIN_LENGTH = 64
"""Characters or bytes from which an equal string is found."""
MIN_ITEMS = 8
"""Items from which an equal tuple or list is found."""
PATIENCE = 1000
"""Objects that are looked at in vain, in search of equal ones, before the search is given up."""


class CodecError(TypeError):
    """An object cannot be written, or a message may not be read. The message names the object and the reason."""


def dumps_all(members: Sequence[Any] | Mapping[str, Any]) -> bytes:
    """Write related objects as one message.

    Args:
        members: the objects. In a mapping they have names, which head the paths in errors.

    Raises:
        CodecError: something in them cannot be pickled; the message has the path to it, as in `spec.out[3].fn`.
    """
    names = tuple(members) if isinstance(members, Mapping) else None
    values = tuple(members.values() if isinstance(members, Mapping) else members)
    equal = _find_equal(values)
    for plain in (True, False):
        buffer = io.BytesIO()
        pickler: Any = _pickler(plain, equal.references)(buffer, PROTOCOL)
        try:
            pickler.dump(equal.contents)
            pickler.dump((names, values))  # the same pickler: what it has written it refers to
            return buffer.getvalue()
        except REFUSALS as error:
            refused = error
    raise refusal(members, refused) from refused


def loads_all(message: bytes, allowed: Collection[Any] | None = None) -> Any:
    """Read what `dumps_all` wrote: a list of the members, or a dict where they had names.

    Args:
        message: from one of your own processes.
        allowed: what the message may import, as `Unpickler` takes it. None: everything.

    Raises:
        CodecError: the message wants to import something else.
    """
    unpickler = Unpickler(message, allowed)
    contents = unpickler.load()
    lists: dict[int, list[Any]] = {}

    def load(reference: tuple[int, int | None]) -> Any:
        index, number = reference
        if number is None:
            return contents[index]
        if number not in lists:
            lists[number] = list(contents[index])
        return lists[number]

    unpickler.persistent_load = load  # type: ignore[method-assign]
    names, values = unpickler.load()
    return list(values) if names is None else dict(zip(names, values, strict=True))


# Pickling --------------------------------------------------------------------------------------------------------

REFUSALS = (pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError)
"""What pickling an object that cannot be pickled raises. Among them is RecursionError."""


def _pickler(plain: bool, references: Mapping[int, Any]) -> Any:
    """pickle's own pickler, or the one that also writes functions and classes which cannot be imported."""
    methods: dict[str, Any] = {}
    if references:  # asking for each object costs as much as pickling a small one
        methods["persistent_id"] = lambda self, obj: references.get(id(obj))
    if plain:
        return type("Pickler", (pickle.Pickler,), methods) if methods else pickle.Pickler
    return type("Pickler", (by_value(),), {**methods, "dispatch_table": dispatch()})


def by_value() -> Any:
    """cloudpickle's pickler where it is installed."""
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        return pickle.Pickler
    return cloudpickle.Pickler


def dispatch() -> dict[type, Callable[[Any], Any]]:
    """How `by_value` reduces classes for which their own way is not wanted: its table and ours."""
    table = dict(getattr(by_value(), "dispatch_table", copyreg.dispatch_table))
    for env in _loaded("torchrec.distributed.types", "ShardingEnv", "ShardingEnv2D"):
        table[env] = _without_groups
    return table


def _without_groups(env: Any) -> Any:
    """Its process groups belong to this process."""
    groups = _loaded("torch.distributed", "ProcessGroup")
    state = {name: None if isinstance(value, groups) else value for name, value in vars(env).items()}
    return copyreg.__newobj__, (type(env),), state  # type: ignore[attr-defined]


def _loaded(module: str, *names: str) -> tuple[type, ...]:
    """Classes of a module that was imported: before that there are no objects of them."""
    loaded = sys.modules.get(module)
    return tuple(cls for name in names if isinstance(cls := getattr(loaded, name, None), type))


class Unpickler(pickle.Unpickler):
    """Reads a message, importing only what it may.

    Args:
        message: one or several pickles, one behind the other.
        allowed: None for everything, or what may be imported beside Python's and torch's plain types: classes and
            functions, their full names, or `"a.module.*"` for what is defined in that module.
    """

    def __init__(self, message: bytes, allowed: Collection[Any] | None = None) -> None:
        super().__init__(io.BytesIO(message))
        self._allowed = None if allowed is None else _PLAIN.union(map(_full_name, allowed)) if allowed else _PLAIN

    def find_class(self, module: str, name: str, /) -> Any:
        if self._allowed is None:
            return super().find_class(module, name)
        found = super().find_class(module, name) if self._may_import(module, name) else None
        # A module also has what it imported itself: `module.os.system` is none of its own.
        is_named = f"{module}.{name}" in self._allowed
        if found is None or not (is_named or getattr(found, "__module__", module) == module):
            raise CodecError(f"the message wants to import {module}.{name}, which is not among the allowed")
        return found

    def _may_import(self, module: str, name: str) -> bool:
        if module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout)):
            return True
        allowed = self._allowed or ()
        return f"{module}.{name}" in allowed or ("." not in name and f"{module}.*" in allowed)


_PLAIN = frozenset(
    {
        *(f"builtins.{name}" for name in ("bytearray", "complex", "frozenset", "list", "range", "set", "slice")),
        *(f"collections.{name}" for name in ("OrderedDict", "defaultdict", "deque")),
        "torch.Size",
        "torch.device",
    }
)


def _full_name(allowed: Any) -> str:
    return allowed if isinstance(allowed, str) else f"{allowed.__module__}.{allowed.__qualname__}"


# Equal objects ---------------------------------------------------------------------------------------------------

_STRIDE = 16
_SCALARS = {str, bytes, int, bool, type(None)}
"""No floats: 0.0 and -0.0 are equal."""


class _Equal(NamedTuple):
    """Objects that are equal to others."""

    contents: tuple[Any, ...]
    references: dict[int, tuple[int, int | None]]
    """By `id`: the index of the content, and for a list its own number."""


def _find_equal(roots: Sequence[Any]) -> _Equal:
    """Search for equal immutable objects and equal lists, all over the graph at once, as long as some are found."""
    found: dict[Any, list[Any]] = {}
    seen: set[int] = set()
    queue, patience = deque([iter(roots)]), PATIENCE
    while queue and patience > 0:
        children = queue.popleft()
        batch = list(islice(children, _STRIDE))
        patience -= len(batch)
        for child in batch:
            if (type(child) in _SCALARS and not _is_long(child)) or id(child) in seen:
                continue
            seen.add(id(child))
            value = _value(child)
            if value is None:
                queue.append(_children(child))
            elif value in found:
                found[value].append(child)
                patience += PATIENCE
            else:
                found[value] = [child]
        if batch:
            queue.append(children)
    several = {value: same for value, same in found.items() if len(same) > 1}
    contents = tuple(value[1] for value in several)
    references: dict[int, tuple[int, int | None]] = {}
    for index, same in enumerate(several.values()):
        for obj in (obj for obj in same if obj is not contents[index]):
            references[id(obj)] = index, len(references) if type(obj) is list else None
    return _Equal(contents, references)


def _is_long(obj: Any) -> bool:
    return type(obj) in (str, bytes) and len(obj) >= MIN_LENGTH


def _value(obj: Any) -> Any:
    """(type or types, content) of an object that can be found equal to others; None for all others."""
    cls = type(obj)
    if cls in _SCALARS:
        return cls, obj
    if cls in (tuple, list) and len(obj) >= MIN_ITEMS:
        # 1 and True are equal, and not the same.
        kinds = set(map(type, obj))
        if kinds <= _SCALARS:
            return (*kinds,) if len(kinds) == 1 else tuple(map(type, obj)), tuple(obj)
    return None


def _children(obj: Any) -> Iterator[Any]:
    cls = type(obj)
    if issubclass(cls, dict):
        yield from obj
        yield from obj.values()
    elif issubclass(cls, (list, tuple, set, frozenset)):
        yield from obj
    if not isinstance(obj, (type, types.ModuleType, types.FunctionType, torch.Tensor)):
        yield from getattr(obj, "__dict__", {}).values()


# What is refused -------------------------------------------------------------------------------------------------


def _dump_by_value(obj: Any) -> None:
    _pickler(False, {})(io.BytesIO(), PROTOCOL).dump(obj)


def refusal(members: Any, error: BaseException, dump: Callable[[Any], None] = _dump_by_value) -> CodecError:
    """The error for a list or dict of objects that cannot be pickled, with the path to what it is in them.

    Args:
        members: the list or dict.
        error: what was raised.
        dump: pickles an object in the way that was refused.
    """
    too_deep = isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError)
    path, obj = _refused(members, 1 if too_deep else 1000, dump)
    if too_deep:
        return CodecError(f"{path}: nests deeper than Python's recursion limit allows")
    return CodecError(f"{path}: a {type(obj).__module__}.{type(obj).__qualname__} cannot be pickled ({error})")


def _refused(members: Any, steps: int, dump: Callable[[Any], None]) -> tuple[str, Any]:
    path, obj = "", members
    # Names head the paths as they are: spec.out, not ['spec'].out.
    named = isinstance(members, Mapping)
    parts = ((str(name), members[name]) for name in members) if named else _parts(members)
    seen: set[int] = set()
    for _ in range(steps):
        for step, child in parts:
            if id(child) not in seen and not _succeeds(dump, child):
                seen.add(id(child))
                path, obj, parts = path + step, child, _parts(child)
                break
        else:
            break
    return path, obj


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple)):
        names = getattr(obj, "_fields", None)
        yield from ((f".{names[i]}" if names else f"[{i}]", item) for i, item in enumerate(obj))
    elif isinstance(obj, (set, frozenset)):
        yield from (("{...}", item) for item in obj)
    if not isinstance(obj, (type, types.ModuleType, types.FunctionType)):
        yield from ((f".{name}", getattr(obj, name)) for name in field_names(obj))


def _succeeds(dump: Callable[[Any], None], obj: Any) -> bool:
    try:
        dump(obj)
    except Exception:  # whatever a foreign __reduce__ raises
        return False
    return True
