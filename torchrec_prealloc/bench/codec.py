"""What it costs to write objects that share others, beside pickle and cloudpickle.

One by one, each object carries what it shares. In one list, pickle writes what is one object once; that is the least
that our message can cost. All ways are timed in turns, in one process; times are medians, and ratios are taken turn by
turn.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import pickle
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchrec_prealloc.bench.machine import CPU
from torchrec_prealloc.bench.table import Column, Figure, Row
from torchrec_prealloc.codec import PROTOCOL, by_value, dumps_all, loads_all
from torchrec_prealloc.stream import Decoder, Encoder

NAME = "codec"
SUMMARY = "Size and time of objects that share others, written as one message or stream, beside pickle and cloudpickle."

LEAVES, DEVICES, MESSAGES, KEYS = 10_000, 4_096, 1_000, 500
SAMPLE = 100
"""Objects that a quick run writes one by one; they are all alike, and the time is multiplied."""
ROUNDS = 9

COLUMNS = (
    Column("ms", "ms", digits=2, better="low"),
    Column("ms_min", "ms min", digits=2),
    Column("ms_max", "ms max", digits=2),
    Column("kb", "KB", digits=1, better="low"),
    Column("faster", "× faster than one by one", digits=1, better="high"),
    Column("smaller", "× smaller than one by one", digits=1, better="high"),
    Column("faster_cloud", "× faster than cloudpickle one by one", digits=1, better="high"),
    Column("beside_list", "time / pickle of the list", digits=2, better="low"),
    Column("beside_base", "time / row before", digits=2, better="low"),
    Column("baseline", "baseline"),
    Column("on", "measured on"),
)
PICTURE = ("ms", "kb")
_ONE_BY_ONE = "pickle, one by one"

_SHARDINGS, _MESSAGES = f"{LEAVES:,} shardings, one mesh of {DEVICES:,}", f"{MESSAGES:,} messages of {KEYS} keys"
_REFERENCES, _UNIQUE = "twice the shardings", "twice the shardings, twice the mesh"


@dataclasses.dataclass(frozen=True)
class Targets:
    """What the figures are held to."""

    shardings_smaller: float = 50.0
    shardings_faster: float = 20.0
    beside_list: float = 1.2
    messages_smaller: float = 10.0
    doubled: float = 2.2

    def missed(self, rows: Iterable[Row]) -> list[str]:
        """What the rows do not hold to, in words."""
        of = {row.name: row.figures for row in rows}
        least = [
            (_SHARDINGS, "smaller", self.shardings_smaller),
            (_SHARDINGS, "faster", self.shardings_faster),
            (_SHARDINGS, "faster_cloud", self.shardings_faster),
            (_MESSAGES, "smaller", self.messages_smaller),
        ]
        most = [
            (_SHARDINGS, "beside_list", self.beside_list),
            (_REFERENCES, "beside_base", self.doubled),
            (_UNIQUE, "beside_base", self.doubled),
        ]
        said = [f"{name}: {key} {_float(of[name], key):.2f}, not {limit}" for name, key, limit in least
                if _float(of[name], key) < limit]  # fmt: skip
        return said + [f"{name}: {key} {_float(of[name], key):.2f}, over {limit}" for name, key, limit in most
                       if _float(of[name], key) > limit]  # fmt: skip


def _float(figures: Mapping[str, Any], key: str) -> float:
    return float(figures[key] or 0)


TARGETS = Targets()
missed = TARGETS.missed


class _Mesh:
    """Something like a DeviceMesh."""

    def __init__(self, devices: int) -> None:
        self.devices = [f"cuda:{index}" for index in range(devices)]
        self.names = ("data", "model")


@dataclasses.dataclass(frozen=True)
class _Sharding:
    mesh: _Mesh
    spec: tuple[str | None, ...]
    memory: str


def _shardings(leaves: int, devices: int) -> list[_Sharding]:
    mesh = _Mesh(devices)
    return [_Sharding(mesh, ("data", None, "model")[index % 3 :], "device") for index in range(leaves)]


def run(full: bool = False) -> list[Row]:
    """One row for each set of objects; `full` writes each of them one by one."""
    return [*_spec_rows(full), _stream_row()]


def _spec_rows(full: bool) -> list[Row]:
    spec, more, most = _shardings(LEAVES, DEVICES), _shardings(2 * LEAVES, DEVICES), _shardings(2 * LEAVES, 2 * DEVICES)
    sample = spec if full else spec[:SAMPLE]
    scale = len(spec) / len(sample)
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: dumps_all(spec),
        "list": lambda: pickle.dumps(spec, PROTOCOL),
        "each": lambda: [pickle.dumps(one, PROTOCOL) for one in sample],
        "cloud": lambda: [_cloud_dumps(one) for one in sample],
        "more": lambda: dumps_all(more),
        "most": lambda: dumps_all(most),
    }
    times = _alternate(ways, 2 if full else ROUNDS)
    alone = sum(len(pickle.dumps(one, PROTOCOL)) for one in sample) * scale
    assert loads_all(dumps_all(spec))[0].mesh.devices == spec[0].mesh.devices
    size = len(dumps_all(spec))
    first: dict[str, Figure | None] = {
        **_times(times["ours"]),
        "kb": size / 1e3,
        "smaller": alone / size,
        "faster": _ratio(times["each"], times["ours"]) * scale,
        "faster_cloud": _ratio(times["cloud"], times["ours"]) * scale,
        "beside_list": _ratio(times["ours"], times["list"]),
        "baseline": _ONE_BY_ONE,
        "on": CPU,
    }
    rows = [Row(_SHARDINGS, first)]
    for name, before, key, members in ((_REFERENCES, "ours", "more", more), (_UNIQUE, "more", "most", most)):
        figures = {**_times(times[key]), "kb": len(dumps_all(members)) / 1e3}
        times_base = _ratio(times[key], times[before])
        rows.append(Row(name, {**figures, "beside_base": times_base, "baseline": rows[-1].name, "on": CPU}))
    return rows


def _stream_row() -> Row:
    keys = [f"feature_{index}" for index in range(KEYS)]
    # Equal keys in a list of their own, as each batch has them that comes from another process.
    messages = [{"keys": ["".join(key) for key in keys], "stride": 32, "step": step} for step in range(MESSAGES)]
    written: list[bytes] = []

    def encode() -> None:
        encoder = Encoder()
        written[:] = [encoder.dumps(message) for message in messages]

    times = _alternate({"ours": encode, "each": lambda: [pickle.dumps(one, PROTOCOL) for one in messages]}, 3)
    decoder = Decoder(allowed=())
    assert [decoder.loads(message) for message in written] == messages
    size, alone = sum(map(len, written)), sum(len(pickle.dumps(one, PROTOCOL)) for one in messages)
    faster = _ratio(times["each"], times["ours"])
    figures = {**_times(times["ours"]), "kb": size / 1e3, "smaller": alone / size, "faster": faster}
    return Row(_MESSAGES, {**figures, "baseline": _ONE_BY_ONE, "on": CPU})


def _cloud_dumps(obj: Any) -> bytes:
    buffer = io.BytesIO()
    by_value()(buffer, PROTOCOL).dump(obj)
    return buffer.getvalue()


def _alternate(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            gc.collect()
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in times.items()}  # the first round warms up


def _times(seconds: list[float]) -> dict[str, float]:
    return {"ms": statistics.median(seconds) * 1e3, "ms_min": min(seconds) * 1e3, "ms_max": max(seconds) * 1e3}


def _ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))
