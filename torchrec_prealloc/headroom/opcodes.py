"""A pickle of plain values, read without the pickle module, and forgotten while it is read.

A memory snapshot is a pickle of dicts, lists, strings and numbers. `pickle.load` would import whatever a file names,
and would build several bytes of objects for each byte of the file. This reader knows the opcodes of plain values only,
so there is nothing in it that imports or calls; and it gives each dict and list, as soon as it has been read, to a
`Reduction`, which answers with the little that is to be kept in its place.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, Protocol

from torchrec_prealloc.errors import CommandError

WINDOW = 4 << 20
"""Bytes of the file that are looked at together."""
LONGEST_STRING = 16 << 20
MOST_VALUES, DEEPEST = 1 << 20, 64
"""Of a dict or list in one part (pickle makes parts of 1,000), and of dicts and lists in each other."""
_OPERANDS = 300
"""More bytes than an opcode has, but for long strings."""
_INTERNED, _CACHED_LISTS = 1 << 16, 1 << 14


class SnapshotError(CommandError):
    """A file is no memory snapshot, or not a whole one."""


class HostileError(SnapshotError):
    """A file tries to import or call something."""


class Open:
    """A dict or list of which nothing was read yet (and which stays so, when it is empty)."""

    __slots__ = ("is_list", "place")

    def __init__(self, is_list: bool) -> None:
        self.is_list = is_list
        self.place = -1
        """Where the memo has it; -1: nowhere."""


class Readable(Protocol):
    """A file, or what reads like one."""

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, at most `size`; none at the end."""


class Reduction(Protocol):
    """What is kept of a pickle."""

    def mapping(self, items: dict[str, Any]) -> Any:
        """What stands for a dict, of whose values the dicts and lists have been reduced already."""

    def sequence(self, items: list[Any]) -> Any:
        """What stands for a list with these items. Lists of more than 1,000 items come in parts; this is the first."""

    def extend(self, kept: Any, items: list[Any]) -> Any:
        """What stands for `kept`, which `sequence` gave, and a further part."""

    def is_constant(self, kept: Any) -> bool:
        """Whether what `sequence` gave may stand for each list with the same items, also with a part more."""


# A list of objects that were all met before, as a stack of frames nearly always is: `]`, its MEMOIZE or PUT, MARK,
# GETs, APPENDS. One look-up for what would else be fifty opcodes.
_LIST_OF_GETS = re.compile(rb"\](\x94|q.|r....)?\(((?:h.|j....){1,1000})e", re.DOTALL)
_GETS = re.compile(rb"h(.)|j(....)", re.DOTALL)

_CALLS = {
    ord("c"): "GLOBAL",
    ord("\x93"): "STACK_GLOBAL",
    ord("i"): "INST",
    ord("o"): "OBJ",
    ord("\x81"): "NEWOBJ",
    ord("\x92"): "NEWOBJ_EX",
    ord("R"): "REDUCE",
    ord("b"): "BUILD",
    ord("P"): "PERSID",
    ord("Q"): "BINPERSID",
    ord("\x82"): "EXT1",
    ord("\x83"): "EXT2",
    ord("\x84"): "EXT4",
}


class PlainPickle:
    """Reads one pickle.

    Args:
        file: at its beginning.
        reduction: what is kept of it.
    """

    def __init__(self, file: Readable, reduction: Reduction) -> None:
        self._file, self._reduction = file, reduction
        self._buffer, self._at = b"", 0
        self._before = 0  # bytes of the file before the buffer
        self._limit, self._at_end = -1, False
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each MARK
        self._memo: list[Any] = []
        self._strings: dict[str, str] = {}
        self._lists: dict[bytes, Any] = {}
        self._others = self._other_opcodes()

    def load(self) -> Any:
        """What stands for the whole.

        Raises:
            HostileError: it names something to import or call; nothing was.
            SnapshotError: it is cut off, malformed, or uses what a snapshot has no use for.
        """
        try:
            return self._run()
        except (IndexError, struct.error):  # the stack, the memo, or the buffer is shorter than an opcode wants it
            if self._at_end and len(self._buffer) - self._at < _OPERANDS:
                raise self._cut_off() from None
            raise self._malformed("an opcode without its operands") from None
        except UnicodeDecodeError:
            raise self._malformed("a string that is no text") from None
        finally:  # the table of opcodes refers to this object, which would keep all this for long
            self._buffer = b""
            for kept in (self._memo, self._stack, self._below, self._strings, self._lists, self._others):
                kept.clear()

    def _run(self) -> Any:
        # The loop of every byte: what it needs is local, and written back before a method is called.
        buffer, limit = b"", -1
        at, stack, memo, below = self._at, self._stack, self._memo, self._below
        while True:
            if at > limit:
                self._at, self._stack = at, stack
                self._refill()
                at, buffer, limit = self._at, self._buffer, self._limit
                if not buffer:
                    raise self._cut_off()
            op = buffer[at]
            if op == 0x68:  # BINGET
                stack.append(memo[buffer[at + 1]])
                at += 2
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(buffer[at + 1 : at + 5], "little")])
                at += 5
            elif op == 0x94:  # MEMOIZE
                value = stack[-1]
                if type(value) is Open:
                    value.place = len(memo)
                memo.append(value)
                at += 1
            elif op == 0x8A:  # LONG1
                end = at + 2 + buffer[at + 1]
                stack.append(int.from_bytes(buffer[at + 2 : end], "little", signed=True))
                at = end
            elif op == 0x4B:  # BININT1
                stack.append(buffer[at + 1])
                at += 2
            elif op == 0x4D:  # BININT2
                stack.append(buffer[at + 1] | buffer[at + 2] << 8)
                at += 3
            elif op == 0x4A:  # BININT
                stack.append(int.from_bytes(buffer[at + 1 : at + 5], "little", signed=True))
                at += 5
            elif op == 0x28:  # MARK
                below.append(stack)
                stack = []
                at += 1
                if len(below) > DEEPEST:
                    raise self._malformed("values nested too deep")
            elif op == 0x7D:  # EMPTY_DICT, with its MEMOIZE
                opened = Open(False)
                stack.append(opened)
                at += 1
                if buffer[at] == 0x94:
                    opened.place = len(memo)
                    memo.append(opened)
                    at += 1
            elif op == 0x2E:  # STOP
                return stack[-1]
            else:
                self._at, self._stack = at + 1, stack
                if op == 0x5D and (found := _LIST_OF_GETS.match(buffer, at)):
                    self._list_of_gets(found)
                else:
                    other = self._others.get(op)
                    if other is None:
                        raise self._refusal(op)
                    other()
                at, stack = self._at, self._stack
                if buffer is not self._buffer:
                    buffer, limit = self._buffer, self._limit

    # The file ----------------------------------------------------------------------------------------------------

    def _refill(self, wanted: int = 0) -> None:
        """Let the buffer begin where reading is, and hold a window, or `wanted` bytes, where the file has them."""
        if len(self._stack) > MOST_VALUES:
            raise self._malformed(f"more than {MOST_VALUES:,} values in one dict or list")
        rest = self._buffer[self._at :]
        self._before += min(self._at, len(self._buffer))
        self._at = 0
        parts, missing = [rest], max(WINDOW, wanted) - len(rest)
        while missing > 0 and not self._at_end:
            more = self._file.read(missing)
            self._at_end = not more
            parts.append(more)
            missing -= len(more)
        self._buffer = b"".join(parts)
        # Where the last opcode may begin: its operands are then in the buffer too, unless the file ends before.
        self._limit = len(self._buffer) - (1 if self._at_end else _OPERANDS)

    def _sized(self, size: int) -> bytes:
        """The next bytes."""
        if self._at + size > len(self._buffer):
            if size > LONGEST_STRING:
                raise self._malformed(f"a string of {size:,} bytes")
            self._refill(size)
            if size > len(self._buffer):
                raise self._cut_off()
        start = self._at
        self._at += size
        return self._buffer[start : self._at]

    def _number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self._sized(size), "little", signed=signed)

    def _cut_off(self) -> SnapshotError:
        size = self._before + len(self._buffer)
        return SnapshotError(f"is cut off: it ends after {size:,} bytes, without an end mark")

    def _malformed(self, what: str) -> SnapshotError:
        return SnapshotError(f"is no snapshot: {what} (at byte {self._before + self._at:,})")

    def _refusal(self, op: int) -> SnapshotError:
        name = _CALLS.get(op)
        if name is None:
            return self._malformed(f"no opcode of a pickle of plain values is {op:#04x}")
        named = ""
        if name in ("GLOBAL", "INST"):
            module, function = self._line(), self._line()
            named = f"to import {module}.{function}"
        elif name == "STACK_GLOBAL":
            named = f"to import {'.'.join(map(str, self._stack[-2:]))}"
        elif name == "PERSID":
            named = f"to load the persistent object {self._line()!r}"
        elif name == "BINPERSID":
            named = f"to load the persistent object {str(self._stack[-1:])[:80]}"
        elif name.startswith("EXT"):
            named = f"to import by the extension code {self._number(int(name[3]))}"
        else:
            named = "to make or call an object"
        place = self._before + self._at
        return HostileError(
            f"is refused: it tries {named} (opcode {name}, near byte {place:,}), and a snapshot holds only plain values"
        )

    def _line(self) -> str:
        end = self._buffer.find(b"\n", self._at, self._at + 1000)
        line = self._buffer[self._at : end if end >= 0 else self._at + 100]
        self._at += len(line) + 1
        return line.decode("utf-8", "replace")

    # Values ------------------------------------------------------------------------------------------------------

    def _to_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._below.pop()
        return items

    def _put(self, place: int) -> None:
        if place != len(self._memo):
            raise self._malformed("its memo is not in order")
        value = self._stack[-1]
        if type(value) is Open:
            value.place = place
        self._memo.append(value)

    def _string(self, size_bytes: int) -> None:
        text = self._sized(self._number(size_bytes)).decode("utf-8", "surrogatepass")
        known = self._strings.get(text)
        if known is None:
            known = text
            if len(self._strings) < _INTERNED:
                self._strings[text] = text
        self._stack.append(known)

    def _replace_top(self, value: Any) -> None:
        """Let `value` stand where the dict or list on top of the stack stood, also in the memo."""
        opened = self._stack[-1]
        if type(opened) is Open and opened.place >= 0:
            self._memo[opened.place] = value
        self._stack[-1] = value

    def _set_items(self, items: list[Any]) -> None:
        top = self._stack[-1]
        try:
            new = dict(zip(items[::2], items[1::2], strict=True))
        except (TypeError, ValueError):
            raise self._malformed("a dict has keys that are no strings, or no value for one") from None
        if type(top) is Open and not top.is_list:
            self._replace_top(self._reduction.mapping(new))
        elif type(top) is dict:
            top.update(new)
        elif top is not None:
            raise self._malformed("items for something that is no dict")

    def _append(self, items: list[Any]) -> None:
        if not items:
            return
        top = self._stack[-1]
        if type(top) is Open and top.is_list:
            self._replace_top(self._reduction.sequence(items))
        elif type(top) in (Open, dict, str, int):
            raise self._malformed("items for something that is no list")
        else:
            self._stack[-1] = self._reduction.extend(top, items)

    def _list_of_gets(self, found: re.Match[bytes]) -> None:
        memoized, gets = found.groups()
        value = self._lists.get(gets)
        if value is None:
            places = [
                short[0] if short else int.from_bytes(long, "little") for short, long in _GETS.findall(gets)
            ]
            value = self._reduction.sequence([self._memo[place] for place in places])
            if self._reduction.is_constant(value) and len(self._lists) < _CACHED_LISTS:
                self._lists[gets] = value
        self._stack.append(value)
        if memoized:
            if len(memoized) > 1 and int.from_bytes(memoized[1:], "little") != len(self._memo):
                raise self._malformed("its memo is not in order")
            self._memo.append(value)
        self._at = found.end()

    def _tuple(self, size: int, taken: int = 0) -> None:
        """Of a snapshot's tuples (the ids of memory pools) nothing is kept. `taken` are off the stack already."""
        for _ in range(size):
            self._stack.pop()
        self._stack.append(())

    def _protocol(self) -> None:
        version = self._number(1)
        if version > 5:
            raise self._malformed(f"pickle protocol {version}")

    def _bytes(self, size_bytes: int) -> None:
        self._sized(self._number(size_bytes))
        self._stack.append(None)

    def _long4(self) -> None:
        if (size := self._number(4)) > 255:
            raise self._malformed(f"a number of {size:,} bytes")
        self._stack.append(self._number(size, signed=True))

    def _other_opcodes(self) -> dict[int, Callable[[], object]]:
        """The opcodes that are met less often, each without its first byte."""

        def push(value: Any) -> Callable[[], None]:
            return lambda: self._stack.append(value)

        return {
            0x80: self._protocol,
            0x95: lambda: self._number(8),  # FRAME: how much is in the file's next part is of no use here
            ord("N"): push(None),
            0x88: push(True),
            0x89: push(False),
            ord("G"): lambda: self._stack.append(struct.unpack(">d", self._sized(8))[0]),
            0x8B: self._long4,
            0x8C: lambda: self._string(1),
            ord("X"): lambda: self._string(4),
            0x8D: lambda: self._string(8),
            ord("C"): lambda: self._bytes(1),
            ord("B"): lambda: self._bytes(4),
            0x8E: lambda: self._bytes(8),
            ord(")"): push(()),
            0x85: lambda: self._tuple(1),
            0x86: lambda: self._tuple(2),
            0x87: lambda: self._tuple(3),
            ord("t"): lambda: self._tuple(0, len(self._to_mark())),
            ord("a"): lambda: self._append([self._stack.pop()]),
            ord("e"): lambda: self._append(self._to_mark()),
            ord("]"): lambda: self._stack.append(Open(True)),
            ord("u"): lambda: self._set_items(self._to_mark()),
            ord("s"): lambda: self._set_items([self._stack.pop(-2), self._stack.pop()]),
            ord("q"): lambda: self._put(self._number(1)),
            ord("r"): lambda: self._put(self._number(4)),
            ord("0"): lambda: self._stack.pop(),
        }
