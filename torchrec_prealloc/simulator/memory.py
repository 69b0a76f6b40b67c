"""What the simulated device's caching allocator holds: statistics, limits, snapshots in PyTorch's format."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from typing import Any

from torchrec_prealloc.simulator.build import load


@dataclass(frozen=True)
class StreamStats:
    """Bytes of one stream's pool, or of a whole device, as PyTorch counts them.

    Allocated is held by tensors (rounded to 512 bytes), active also counts what was freed but is still waiting for
    the streams of ``record_stream``, reserved is what the pool has taken from the device.
    """

    allocated: int
    active: int
    reserved: int
    peak_allocated: int
    peak_active: int
    peak_reserved: int
    memory_stats: dict[str, int]  #: the same and more, with the keys of ``torch.cuda.memory_stats()``


@dataclass(frozen=True)
class PinnedStats:
    """Bytes of pinned host memory."""

    allocated: int
    peak_allocated: int
    registered: int  #: by :func:`register_host`
    deferred_frees: int  #: count: frees that waited for a queued copy, as PyTorch's host allocator lets them


@dataclass(frozen=True)
class Stats:
    """All statistics. A stream is named (device index, stream id); the id of a default stream is 0."""

    streams: dict[tuple[int, int], StreamStats]
    devices: dict[int, StreamStats]
    pinned: PinnedStats


def _stream_stats(raw: dict[str, int]) -> StreamStats:
    def value(what: str, which: str) -> int:
        return raw[f"{what}_bytes.all.{which}"]

    return StreamStats(
        allocated=value("allocated", "current"),
        active=value("active", "current"),
        reserved=value("reserved", "current"),
        peak_allocated=value("allocated", "peak"),
        peak_active=value("active", "peak"),
        peak_reserved=value("reserved", "peak"),
        memory_stats=raw,
    )


def stats() -> Stats:
    """The memory of every stream that has allocated anything, of every device, and of the host's pinned memory."""
    extension = load()
    raw = {key: _stream_stats(value) for key, value in extension.stats().items()}
    return Stats(
        streams={key: value for key, value in raw.items() if key[1] is not None},
        devices={key[0]: value for key, value in raw.items() if key[1] is None},
        pinned=PinnedStats(**extension.pinned_stats()),
    )


def reset_peak_stats() -> None:
    """Sets every peak to the current value, on all devices."""
    load().reset_peak_stats()


def empty_cache() -> None:
    """Gives back all segments without a block in use, as ``torch.cuda.empty_cache()`` does."""
    load().empty_cache()


def set_memory_limit(limit: int | None) -> None:
    """Limits the reserved bytes of each device; None lifts it.

    Beyond it an allocation first gives back cached segments, and then raises ``torch.OutOfMemoryError``.
    """
    load().set_memory_limit(limit)


def record_memory_history(enabled: bool, max_entries: int = 100_000) -> None:
    """Starts (forgetting what it had) or stops recording allocations and frees, with their Python stacks."""
    load().record_history(max_entries if enabled else 0)


def snapshot() -> dict[str, Any]:
    """The allocator's state in the format of ``torch.cuda.memory._snapshot()``, for PyTorch's own viewers."""
    extension = load()
    one_of: dict[tuple[str, int, str], dict[str, Any]] = {}

    def shared(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:  # a frame is written once, as PyTorch does
        return [one_of.setdefault((frame["filename"], frame["line"], frame["name"]), frame) for frame in frames]

    segments: list[dict[str, Any]] = extension.segments()
    for segment in segments:
        blocks = segment["blocks"]
        for framed in (segment, *blocks):
            framed["frames"] = shared(framed["frames"])
        segment["allocated_size"] = sum(b["size"] for b in blocks if b["state"] == "active_allocated")
        segment["active_size"] = sum(b["size"] for b in blocks if b["state"] != "inactive")
        segment["requested_size"] = sum(b["requested_size"] for b in blocks if b["state"] != "inactive")
        segment["segment_pool_id"] = (0, 0)
        segment["is_expandable"] = False
    devices = len(stats().devices)
    traces: list[list[dict[str, Any]]] = [[] for _ in range(devices)]
    for entry in extension.trace():
        trace = traces[entry.pop("device")]
        if frames := shared(entry.pop("frames")):  # PyTorch leaves the key out where no stack was recorded
            entry["frames"] = frames
        trace.append({**entry, "compile_context": "N/A", "user_metadata": "", "segment_pool_id": (0, 0)})
    return {"segments": segments, "device_traces": traces, "allocator_settings": {}, "external_annotations": []}


def dump_snapshot(path: str | os.PathLike[str]) -> None:
    """Writes :func:`snapshot` as a pickle, which https://pytorch.org/memory_viz shows."""
    with open(path, "wb") as file:
        pickle.dump(snapshot(), file)
