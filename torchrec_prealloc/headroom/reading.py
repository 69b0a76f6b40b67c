"""Read a file of `torch.cuda.memory._dump_snapshot`, or say in one line why it is none."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from torchrec_prealloc.headroom.opcodes import Open, PlainPickle, Readable, SnapshotError
from torchrec_prealloc.headroom.reduction import MOST_BYTES, Kept
from torchrec_prealloc.headroom.snapshot import FREE, SNAPSHOT, Segment, Snapshot, Trace

_GZIP, _ZIP, _PROTOCOL = b"\x1f\x8b", b"PK\x03\x04", b"\x80"
"""First bytes of files; the last of a pickle that is not of the oldest protocols."""


def read_snapshot(path: Path, progress: Callable[[int], object] = lambda _: None) -> Snapshot:
    """Read a snapshot; nothing in it is imported or called, and no more is kept of it than a `Snapshot`.

    Args:
        path: `.pickle` as `_dump_snapshot` writes it, or the same through gzip.
        progress: called with each number of bytes of the file that has been read.

    Raises:
        SnapshotError: the file is missing, empty, cut off, malformed, hostile, or something else. One line.
    """
    try:
        with path.open("rb") as raw:
            start = raw.read(4)
            raw.seek(0)
            if not start:
                raise SnapshotError("is empty")
            if start == _ZIP:
                raise SnapshotError("is a zip (of torch.save?), not a pickle of torch.cuda.memory._dump_snapshot")
            counted: Any = _Counted(raw, progress)
            file: Readable = gzip.GzipFile(fileobj=counted) if start[:2] == _GZIP else counted
            return _read(file, path, is_pickle=start[:1] == _PROTOCOL or start[:2] == _GZIP)
    except SnapshotError as error:
        raise type(error)(f"{path} {error}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SnapshotError(f"{path} is cut off or damaged: {error}") from None
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror or error}") from None


class _Counted:
    """A file that says how much of it has been read."""

    def __init__(self, file: BinaryIO, progress: Callable[[int], object]) -> None:
        self._file, self._progress = file, progress

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._progress(len(data))
        return data


def _read(file: Readable, path: Path, is_pickle: bool) -> Snapshot:
    kept = Kept()
    try:
        whole = PlainPickle(file, kept).load()
    except SnapshotError as error:
        if is_pickle or "to import" in str(error):
            raise
        raise SnapshotError("is no snapshot, since it is no pickle") from None
    except (TypeError, OverflowError, ValueError) as error:  # a column is given what is no number, or too large a one
        raise SnapshotError(f"is no snapshot: a value does not fit ({error})") from None
    if type(whole) is not dict or type(whole.get("segments")) is Trace:
        raise SnapshotError("is a pickle, but no memory snapshot: it has no 'segments'")
    segments, traces, settings = (whole.get(key) for key in ("segments", "device_traces", "allocator_settings"))
    if type(segments) not in (list, Open) or type(traces) not in (list, Open, type(None)):
        raise SnapshotError("is a pickle, but no memory snapshot: it has no 'segments'")
    histories = [trace if type(trace) is Trace else Trace() for trace in _items(traces)]
    for trace in histories:
        _check(trace)
    return Snapshot(
        name=path.name.removesuffix(".gz").rsplit(".", 1)[0],
        segments=[segment for segment in _items(segments) if type(segment) is Segment],
        traces=histories,
        streams=kept.streams.values,
        causes=kept.causes.values,
        stacks=kept.stacks,
        settings=settings if type(settings) is dict else {},
    )


def _items(kept: Any) -> list[Any]:
    return kept if type(kept) is list else []


def _check(trace: Trace) -> None:
    """Sizes and times that no device has would leave the range of the sums."""
    for what, column, end in (("size", trace.size, MOST_BYTES), ("time", trace.time, 1 << 62)):
        numbers = np.frombuffer(column, np.int64)
        action = np.frombuffer(trace.action, np.uint8)
        counts = (action < SNAPSHOT) | (action == FREE)  # a failed allocation may have wanted anything
        wrong = numbers[counts & ((numbers < 0) | (numbers >= end))]
        if len(wrong):
            raise SnapshotError(f"is no snapshot: a {what} of {int(wrong[0]):,} in its history")
