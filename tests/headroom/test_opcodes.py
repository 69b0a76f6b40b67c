"""The reader gives what pickle gives, of plain values; whatever else a file holds, it ends with one clear error."""

from __future__ import annotations

import contextlib
import copyreg
import io
import os
import pickle
import pickletools
import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_prealloc.headroom import opcodes
from torchrec_prealloc.headroom.opcodes import HostileError, Open, PlainPickle, SnapshotError


class Everything:
    """Keeps a pickle as it is, but for tuples, which the reader drops."""

    def mapping(self, items: dict[str, Any]) -> Any:
        return items

    def sequence(self, items: list[Any]) -> Any:
        return Items(items)

    def extend(self, kept: Any, items: list[Any]) -> Any:
        kept.extend(items)
        return kept

    def is_constant(self, kept: Any) -> bool:
        return False


class Items(list[Any]):
    """A list (the reader takes no bare one for something that it may add to)."""


def read(data: bytes) -> Any:
    return plain(PlainPickle(io.BytesIO(data), Everything()).load())


def plain(value: Any) -> Any:
    """With empty dicts and lists in place of what was never filled."""
    if isinstance(value, Open):
        return [] if value.is_list else {}
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


scalars = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30)
protocols = st.integers(2, pickle.HIGHEST_PROTOCOL)


@given(values, protocols, st.booleans())
def test_plain_values_arrive(value: Any, protocol: int, optimized: bool) -> None:
    data = pickle.dumps([value, value], protocol)  # shared, so that the second is a reference
    assert read(pickletools.optimize(data) if optimized else data) == [value, value]


def test_long_lists_dicts_and_strings_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opcodes, "WINDOW", 1_000)  # so that they cross it
    frames = [{"line": number} for number in range(300)]
    value = {
        "numbers": list(range(2_500)),
        "long": "x" * 10_000,
        "texts": [chr(97 + size % 26) * size for size in range(200, 900, 7)],
        "keys": {str(number): number for number in range(2_500)},
        "stacks": [frames[start:] for start in range(250)],
        "deep": frames * 5,
    }
    assert read(pickle.dumps(value)) == value


@given(values, protocols, st.data())
def test_every_prefix_is_cut_off(value: Any, protocol: int, data: st.DataObject) -> None:
    whole = pickle.dumps({"a": value}, protocol)
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(SnapshotError, match="is cut off"):
        read(whole[:length])


@given(values, protocols, st.data())
def test_damage_is_an_error_or_another_value(value: Any, protocol: int, data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps({"a": value}, protocol))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(SnapshotError):
        read(bytes(whole))


@given(st.binary(max_size=200))
def test_any_bytes_are_an_error_or_a_value(data: bytes) -> None:
    with contextlib.suppress(SnapshotError):
        read(data)


class Call:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Built:
    """Pickled as NEWOBJ and BUILD of a class."""

    def __init__(self) -> None:
        self.value = 1


class Persistent(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return "the id" if isinstance(value, Call) else None


def persistent(protocol: int) -> bytes:
    file = io.BytesIO()
    Persistent(file, protocol).dump({"segments": Call(print)})
    return file.getvalue()


def by_extension_code() -> bytes:
    copyreg.add_extension("subprocess", "Popen", 200)
    try:
        return pickle.dumps([subprocess.Popen], 2)
    finally:
        copyreg.remove_extension("subprocess", "Popen", 200)


HOSTILE = {
    "GLOBAL": (pickle.dumps([Call(os.system, "true")], 2), f"to import {os.name}.system"),
    "STACK_GLOBAL": (pickle.dumps({"segments": [Call(os.system, "true")]}, 4), f"to import {os.name}.system"),
    "eval": (pickle.dumps(Call(eval, "1/0")), "to import builtins.eval"),
    "NEWOBJ": (pickle.dumps(Built(), 4), "to import headroom.test_opcodes.Built"),
    "INST": (b"(S'true'\nios\nsystem\n.".replace(b"S'true'\n", b"K\x01"), "to import os.system"),
    "OBJ": (b"(K\x01K\x02o.", "to make or call an object"),
    "NEWOBJ alone": (b"K\x01)\x81.", "to make or call an object"),
    "NEWOBJ_EX": (b"K\x01)}\x92.", "to make or call an object"),
    "REDUCE": (b"K\x01)R.", "to make or call an object"),
    "BUILD": (b"}}b.", "to make or call an object"),
    "BINPERSID": (persistent(4), "to load the persistent object"),
    "PERSID": (b"Pthe id\n.", "to load the persistent object 'the id'"),
    "EXT1": (by_extension_code(), "to import by the extension code 200"),
    "EXT2": (b"\x83\x00\x02.", "to import by the extension code 512"),
    "EXT4": (b"\x84\x00\x00\x01\x00.", "to import by the extension code 65536"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_imports_or_calls_is_refused_and_named(name: str) -> None:
    data, what = HOSTILE[name]
    with pytest.raises(HostileError, match="a snapshot holds only plain values") as refused:
        read(data)
    assert what in str(refused.value)


def test_nothing_hostile_has_run(tmp_path: Any) -> None:
    made = tmp_path / "made"
    data = pickle.dumps({"segments": [], "device_traces": [Call(os.system, f"touch {made}")]})
    with pytest.raises(HostileError):
        read(data)
    assert not made.exists()
    pickle.loads(data)  # it would have
    assert made.exists()


def test_the_reader_uses_no_pickle() -> None:
    names = {name for name in vars(opcodes) if "pickle" in name.lower()}
    assert names == {"PlainPickle"}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x80\x09N.", "pickle protocol 9"),
        (b"(" * 1_000, "nested too deep"),
        (b"q\x05.", "memo is not in order"),
        (b"h\x05.", "cut off"),  # near the end nobody can tell
        (b"X\xff\xff\xff\x7f" + b"a" * 400, "a string of 2,147,483,647 bytes"),
        (b"\x8b\xff\xff\xff\x7f" + b"a" * 400, "a number of"),
        (b"\x8c\x01\xff.", "no text"),
        (b"}(K\x01u.", "no value for one"),
        (b"}(}\x8c\x01aK\x01sK\x01u.", "keys that are no strings"),
        (b"K\x01(K\x01e.", "no list"),
        (b"K\x01(\x8c\x01aK\x01u.", "no dict"),
        (b"I1\n.", "no opcode of a pickle of plain values is 0x49"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, said: str) -> None:
    with pytest.raises(SnapshotError, match=said):
        read(data)


def test_a_pile_of_values_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opcodes, "WINDOW", 1_000)
    monkeypatch.setattr(opcodes, "MOST_VALUES", 5_000)
    with pytest.raises(SnapshotError, match="more than 5,000 values"):
        read(b"]" * 10_000)
