"""Snapshots of any size, written as they are made: the pickle's opcodes themselves, as pickle writes them for torch's.

Every dict, list and string is memoized, frames are written once and referred to, and lists come in parts of 1,000.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_FRAMES, _STACKS = 400, 300
_STREAMS = (0, 94_210_000_000_000)


class _Writer:
    """Counts what it memoizes."""

    def __init__(self) -> None:
        self.memo = 0
        self._places: dict[str, int] = {}

    def text(self, value: str) -> bytes:
        if value in self._places:
            return self.get(self._places[value])
        self._places[value] = self.memo
        self.memo += 1
        data = value.encode()
        return b"\x8c" + bytes([len(data)]) + data + b"\x94"

    @staticmethod
    def get(place: int) -> bytes:
        return b"h" + bytes([place]) if place < 256 else b"j" + struct.pack("<I", place)

    @staticmethod
    def number(value: int) -> bytes:
        if value < 256:
            return b"K" + bytes([value])
        if value < 1 << 16:
            return b"M" + struct.pack("<H", value)
        if value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        size = value.bit_length() // 8 + 1
        return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)

    def open(self, opcode: bytes) -> bytes:
        self.memo += 1
        return opcode + b"\x94"

    def frame(self, number: int) -> bytes:
        name, filename = f"function_{number}", f"/opt/site-packages/torch/nn/modules/module_{number % 40}.py"
        named = self.open(b"}") + b"(" + self.text("name") + self.text(name)
        return named + self.text("filename") + self.text(filename) + self.text("line") + self.number(number) + b"u"


def write_large(path: Path, size: int, depth: int) -> int:
    """Write a snapshot of about `size` bytes with stacks of `depth` frames (0: none). The number of its entries."""
    entries = 0
    with path.open("wb") as file:
        for entry in _parts(file, depth):
            file.write(entry)
            entries += 1
            if entries % 1_000 == 0:
                if file.tell() >= size:
                    break
                file.write(b"e(")
        file.write(b"eau.")
    return entries


def _parts(file: BinaryIO, depth: int) -> Iterator[bytes]:
    """Writes what comes before the first entry, then gives entries without an end."""
    chance, write = random.Random(0), _Writer()
    file.write(b"\x80\x04" + write.open(b"}") + b"(" + write.text("segments") + write.open(b"]"))
    file.write(write.text("device_traces") + write.open(b"]") + write.open(b"]") + b"(")
    frames: list[int] = []
    live: list[tuple[int, int, int]] = []
    stacks: list[bytes] = []
    time = 1_700_000_000_000_000
    while True:
        if live and (len(live) > 200 or chance.random() < 0.5):
            address, size, stream = live.pop(chance.randrange(len(live)))
            actions = ["free_requested", "free_completed"]
        else:
            address, size = 0x7F00_0000_0000 + 512 * chance.randrange(1 << 30), chance.randrange(1, 1 << 22)
            stream = chance.choice(_STREAMS)
            live.append((address, size, stream))
            actions = ["alloc"]
        for action in actions:
            time += chance.randrange(100)
            items: list[tuple[str, Any]] = [("action", action), ("addr", address), ("size", size), ("stream", stream)]
            items += [("time_us", time), ("compile_context", "N/A"), ("user_metadata", "")]
            entry = [write.open(b"}"), b"("]
            for key, value in items:
                entry += [write.text(key), write.text(value) if type(value) is str else write.number(value)]
            if depth:
                entry += [write.text("frames"), write.open(b"]"), b"("]
                if not frames:
                    for number in range(_FRAMES):
                        frames.append(write.memo)
                        entry.append(write.frame(number))
                    chosen = [[chance.choice(frames) for _ in range(depth)] for _ in range(_STACKS)]
                    stacks = [b"".join(map(write.get, stack)) for stack in chosen]
                else:
                    entry.append(chance.choice(stacks))
                entry.append(b"e")
            yield b"".join([*entry, b"u"])
