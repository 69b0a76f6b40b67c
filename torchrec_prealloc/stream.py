"""Messages in which objects that earlier messages have written are referred to.

>>> keys = [f"feature_{i}" for i in range(500)]
>>> encoder, decoder = Encoder(), Decoder()
>>> first, second = encoder.dumps({"step": 1, "keys": keys}), encoder.dumps({"step": 2, "keys": list(keys)})
>>> len(second) < len(first) / 10
True
>>> decoder.loads(first)["keys"] == decoder.loads(second)["keys"]
True

Each object of a message is pickled by itself and named by the hash of its bytes; in other objects it is that name. What
is immutable through and through has one name wherever it comes from. What is mutable has a name that is made of its
bytes and its identity: the same object with the same contents is one object at the decoder, over all messages; changed,
it is another one, and what was decoded before stays as it was. A list of names and numbers refers to its contents,
which have one name. Objects in a cycle, and around one, are written where they are, and anew in each message.

A message brings the objects that the encoder has not written yet. A decoder that missed them (it came late, it was
restarted, a message was lost) says which: `MissingError.names`. `Encoder.define(names)` is a message that brings them,
and `Decoder(fetch=...)` asks for it by itself.

Objects that were decoded are the decoder's, until it forgets them: who changes one changes it for later messages.
Security is as in `codec.py`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import io
import itertools
import os
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from torchrec_prealloc.codec import (
    MIN_ITEMS,
    MIN_LENGTH,
    PROTOCOL,
    REFUSALS,
    CodecError,
    Unpickler,
    by_value,
    dispatch,
    refusal,
)

NAME_BYTES = 12
REMEMBERED = 4096
"""Objects that either side remembers."""
MAX_ATTEMPTS = 16
"""Objects of a cycle that are found one by one, before a message is written as one piece."""


class MissingError(CodecError):
    """A message refers to objects that the decoder has not got.

    Attributes:
        names: of these objects; `Encoder.define` takes them.
    """

    def __init__(self, names: Sequence[bytes]) -> None:
        self.names = tuple(names)
        hexed = ", ".join(name.hex() for name in self.names[:3]) + (", ..." if len(self.names) > 3 else "")
        super().__init__(
            f"the message refers to {len(self.names)} objects of messages that were not decoded here ({hexed}); decode "
            "Encoder.define(error.names) first, or give Decoder(fetch=encoder.define)"
        )

    def __reduce__(self) -> Any:
        return MissingError, (self.names,)


class _Piece(NamedTuple):
    """One object, pickled with names in place of the objects it refers to."""

    body: bytes
    needs: tuple[bytes, ...]
    """Their names."""


class _Cycle(Exception):
    """An object was met inside itself."""


class Encoder:
    """Writes the messages of one stream.

    Args:
        remembered: objects that are remembered, and kept alive; the ones that were not used for longest are forgotten,
            and written again when they come back.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._stream = os.urandom(8)
        self._pieces: OrderedDict[bytes, _Piece] = OrderedDict()
        self._identities: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        self._numbers = 0

    def dumps(self, obj: Any) -> bytes:
        """The message for `obj`.

        Raises:
            CodecError: something in it cannot be pickled; the message has the path to it, as in `.out[3].fn`.
        """
        whole: set[int] = set()
        for attempt in itertools.count():
            message = _Message(self, whole, everything=attempt > MAX_ATTEMPTS)
            try:
                root = message.write(obj)
            except _Cycle:
                continue
            except REFUSALS as error:
                raise refusal([obj], error) from error
            new = [name for name in message.pieces if name not in self._pieces]
            self._remember(message)
            return _join(message.pieces, new, root)
        raise AssertionError  # a message in one piece has no cycles between its pieces

    def define(self, names: Iterable[bytes]) -> bytes:
        """A message that brings the objects of these names, and what they refer to; it decodes to None.

        Raises:
            CodecError: one is not remembered any more. The next message that has the object writes it again.
        """
        wanted: dict[bytes, _Piece] = {}

        def add(name: bytes) -> None:
            if name in wanted:
                return
            if name not in self._pieces:
                raise CodecError(f"the encoder has forgotten the object {name.hex()}; give Encoder(remembered=) more")
            for needed in self._pieces[name].needs:
                add(needed)
            wanted[name] = self._pieces[name]

        for name in names:
            add(name)
        return _join(wanted, list(wanted), _Piece(pickle.dumps((None,), PROTOCOL), ()))

    def identity(self, obj: Any) -> bytes:
        """What tells a mutable object from all others of all streams."""
        known = self._identities.get(id(obj))
        if known is None:
            self._numbers += 1
            known = self._identities[id(obj)] = obj, self._numbers
        self._identities.move_to_end(id(obj))
        return self._stream + known[1].to_bytes(8, "little")

    def _remember(self, message: _Message) -> None:
        for name in message.pieces:
            self._pieces[name] = message.pieces[name]
            self._pieces.move_to_end(name)
        for memory in (self._pieces, self._identities):
            while len(memory) > max(self._remembered, len(message.pieces)):
                memory.popitem(last=False)


class Decoder:
    """Reads the messages of one stream.

    Args:
        allowed: what messages may import, as `loads_all` takes it.
        fetch: `fetch(names) -> message` asks the encoder's side for what is missing: `encoder.define`, or what reaches
            it in another process.
        remembered: objects that are remembered; at least as many as the encoder remembers.
    """

    def __init__(
        self,
        allowed: Collection[Any] | None = None,
        fetch: Callable[[Sequence[bytes]], bytes] | None = None,
        remembered: int = 2 * REMEMBERED,
    ) -> None:
        self._allowed = allowed
        self._fetch = fetch
        self._remembered = remembered
        self._objects: OrderedDict[bytes, Any] = OrderedDict()

    def loads(self, message: bytes) -> Any:
        """The object of a message. What it brings is remembered.

        Raises:
            MissingError: it refers to objects that were in other messages. Nothing of the message is lost: decode it
                again when they are there.
            CodecError: it wants to import what is not allowed.
        """
        pieces, body, needs = self._read(message)
        brought = {name for name, _ in pieces}
        missing = [name for name in needs if name not in brought and name not in self._objects]
        if missing and self._fetch is not None:
            self.loads(self._fetch(missing))
            missing = [name for name in missing if name not in self._objects]
        if missing:
            raise MissingError(missing)
        for name, piece in pieces:
            if name not in self._objects:
                self._objects[name] = self._load(piece)
        for name in (*brought, *needs):
            self._objects.move_to_end(name)
        obj = self._load(body)[0]
        while len(self._objects) > max(self._remembered, len(brought) + len(needs)):
            self._objects.popitem(last=False)
        return obj

    def _read(self, message: bytes) -> tuple[list[tuple[bytes, bytes]], bytes, list[bytes]]:
        pieces, body, needs = Unpickler(message, allowed=()).load()
        return pieces, body, needs

    def _load(self, body: bytes) -> Any:
        unpickler = Unpickler(body, self._allowed)
        unpickler.persistent_load = self._objects.__getitem__  # type: ignore[method-assign]
        return unpickler.load()


def _join(pieces: dict[bytes, _Piece], new: Sequence[bytes], root: _Piece) -> bytes:
    brought = [(name, pieces[name].body) for name in new]
    needs = dict.fromkeys(root.needs)
    for name in new:
        needs.update(dict.fromkeys(pieces[name].needs))
    for name in new:
        needs.pop(name, None)
    return pickle.dumps((brought, root.body, list(needs)), PROTOCOL)


# One message -----------------------------------------------------------------------------------------------------


class _Message:
    """The pieces of one message.

    Args:
        encoder: of the stream.
        whole: the ids of objects that have to be in the root's own piece, since they are in a cycle, or around one.
        everything: whether all mutable objects have to be.
    """

    def __init__(self, encoder: Encoder, whole: set[int], everything: bool) -> None:
        self.pieces: dict[bytes, _Piece] = {}
        """By name, each after those it refers to."""
        self._encoder = encoder
        self._whole = whole
        self._everything = everything
        self._open: list[int] = []
        self._done: dict[int, tuple[bytes, bool]] = {}
        self._kept: list[Any] = []
        self.pickler = _pickler_with(tuple(dispatch().items()))

    def write(self, obj: Any) -> _Piece:
        """The piece of the message itself: a tuple of `obj`."""
        return _Writer(self, (obj,), is_root=True).piece()

    def refer(self, obj: Any, by: _Writer) -> bytes | None:
        """The name of an object; None where it is written in place."""
        if not _is_worth_a_name(obj):
            return None
        if id(obj) not in self._done:
            if id(obj) in self._whole or id(obj) in self._open or (self._everything and not _is_plain(obj)):
                self._in_place(by)
                return None
            self._open.append(id(obj))
            writer = _Writer(self, obj)
            piece = writer.piece()
            self._open.pop()
            self.keep(obj)
            kind = b"" if writer.is_immutable else self._encoder.identity(obj)
            name = hashlib.blake2b(kind + piece.body, digest_size=NAME_BYTES).digest()
            self.pieces[name] = piece
            self._done[id(obj)] = name, writer.is_immutable
        name, is_immutable = self._done[id(obj)]
        by.is_immutable &= is_immutable
        by.needs[name] = None
        return name

    def keep(self, obj: Any) -> None:
        """Keep an object, so that no other gets its id."""
        self._kept.append(obj)

    def _in_place(self, by: _Writer) -> None:
        if not by.is_root:
            self._whole.update(self._open)
            raise _Cycle
        by.is_immutable = False


class _Writer:
    """Pickles one object, with names in place of others."""

    def __init__(self, message: _Message, obj: Any, is_root: bool = False) -> None:
        self.is_root = is_root
        self.is_immutable = _is_immutable(type(obj))
        self.needs: dict[bytes, None] = {}
        self._is_opaque = isinstance(obj, torch.Tensor)  # it makes new storages each time it is taken apart
        self._message = message
        self._obj = obj
        self._own = {id(obj)}
        """What is written in place, although it would be worth a name: parts that pickle takes objects apart into."""

    def piece(self) -> _Piece:
        """The object's bytes."""
        if type(self._obj) is tuple and _is_plain(self._obj):
            return _Piece(pickle.dumps(self._obj, PROTOCOL), ())
        buffer = io.BytesIO()
        pickler = self._message.pickler(buffer, PROTOCOL)
        pickler.writer = self
        obj = self._obj
        if type(obj) is list and _is_plain(obj):
            obj = _Listed(obj)
            self._own.add(id(obj))
        pickler.dump(obj)
        return _Piece(buffer.getvalue(), tuple(self.needs))

    def refer(self, obj: Any) -> bytes | None:
        """The name to write for an object, if any."""
        return None if self._is_opaque or id(obj) in self._own else self._message.refer(obj, self)

    def takes_apart(self, reduced: Any, is_code: bool) -> Any:
        """Note the parts of an object that is written here; those of a function or class are made for the occasion."""
        if isinstance(reduced, tuple):
            self._message.keep(reduced)
            self._own.update(map(id, reduced))
            states = reduced[2] if len(reduced) > 2 and isinstance(reduced[2], tuple) else ()
            self._own.update(map(id, states))
            if is_code:
                made = [item for part in (reduced[1], *states) for item in _items(part) if type(item) in _BUILTIN]
                cells = [cell for part in reduced[1] for cell in _items(part) if isinstance(cell, types.CellType)]
                self._own.update(map(id, made + cells))
        return reduced


class _Listed:
    """Stands for a list of names and numbers while it is written: a list made of a tuple."""

    def __init__(self, obj: list[Any]) -> None:
        self.content = tuple(obj)

    def __reduce__(self) -> Any:
        return list, (self.content,)


def _items(part: Any) -> Iterable[Any]:
    return part.values() if isinstance(part, dict) else part if isinstance(part, (list, tuple)) else ()


@functools.cache
def _pickler_with(reducers: tuple[tuple[type, Any], ...]) -> Any:
    base: Any = by_value()
    table = dict(reducers)

    class Pickler(base):
        dispatch_table = table
        writer: _Writer

        def persistent_id(self, obj: Any) -> bytes | None:
            return self.writer.refer(obj)

        def reducer_override(self, obj: Any) -> Any:
            reduced = super().reducer_override(obj) if hasattr(base, "reducer_override") else NotImplemented
            if reduced is NotImplemented and not isinstance(obj, _BY_NAME):
                reduce = table.get(type(obj))
                reduced = obj.__reduce_ex__(PROTOCOL) if reduce is None else reduce(obj)
            return self.writer.takes_apart(reduced, isinstance(obj, _BY_NAME))

    return Pickler


# What is worth a name --------------------------------------------------------------------------------------------

_BY_NAME = (type, types.FunctionType)
_BUILTIN = (dict, list, tuple)
_NUMBERS = {int, float, bool, complex, type(None), type(...), type(NotImplemented)}
_CONSTANTS = (enum.Enum, types.BuiltinFunctionType, types.ModuleType, torch.dtype, torch.layout, torch.memory_format)
_IMMUTABLE = {str, bytes, tuple, frozenset, range, slice, torch.Size, torch.device}


def _is_worth_a_name(obj: Any) -> bool:
    cls = type(obj)
    if cls in _NUMBERS:
        return False
    if cls is str or cls is bytes:
        return len(obj) >= MIN_LENGTH
    if cls is tuple:
        return len(obj) >= MIN_ITEMS or not set(map(type, obj)) <= {*_NUMBERS, str, bytes}
    if isinstance(obj, _BY_NAME):
        return not _is_importable(obj)
    return not isinstance(obj, _CONSTANTS)


def _is_plain(obj: Any) -> bool:
    """Whether an object is a long string, or a long tuple or list of names and numbers."""
    cls = type(obj)
    if cls in (tuple, list):
        return len(obj) >= MIN_ITEMS and set(map(type, obj)) <= {*_NUMBERS, str, bytes}
    return cls is str or cls is bytes


def _is_importable(obj: Any) -> bool:
    found: Any = sys.modules.get(obj.__module__) if obj.__module__ != "__main__" else None
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def _is_immutable(cls: type) -> bool:
    if cls in _IMMUTABLE or (issubclass(cls, tuple) and not hasattr(cls, "__dict__")):
        return True
    parameters = getattr(cls, "__dataclass_params__", None) if dataclasses.is_dataclass(cls) else None
    return bool(parameters and parameters.frozen and parameters.eq)
