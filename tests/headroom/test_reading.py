"""What a snapshot's file says arrives; a file that is none, or not whole, ends with one line that names it."""

from __future__ import annotations

import gzip
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchrec_prealloc.headroom.cause import UNKNOWN, Kind
from torchrec_prealloc.headroom.opcodes import HostileError, SnapshotError
from torchrec_prealloc.headroom.reading import read_snapshot
from torchrec_prealloc.headroom.snapshot import ACTIONS, ALLOCATED, INACTIVE, PENDING, Snapshot

from .written import COPY, SLOT, SLOTS, Written, random_history

many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80, deadline=None)


def rows(snapshot: Snapshot, device: int = 0) -> list[tuple[Any, ...]]:
    trace = snapshot.traces[device]
    return [
        (ACTIONS[action], snapshot.streams[stream], address, size, time)
        for action, stream, address, size, time in zip(
            trace.action, trace.stream, trace.address, trace.size, trace.time, strict=True
        )
    ]


def expected_rows(entries: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(e["action"], e["stream"], e["addr"], e["size"], e["time_us"]) for e in entries]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_history_and_state_arrive(tmp_path: Path, protocol: int) -> None:
    written = random_history(1, events=2_500)
    path = tmp_path / "rank3.pickle"
    path.write_bytes(pickle.dumps(written.snapshot(), protocol))
    snapshot = read_snapshot(path)
    assert snapshot.name == "rank3"
    assert rows(snapshot) == expected_rows(written.trace)
    assert snapshot.settings["expandable_segments"] is False
    states = {"active_allocated": ALLOCATED, "active_pending_free": PENDING, "inactive": INACTIVE}
    for segment, original in zip(snapshot.segments, written.snapshot()["segments"], strict=True):
        assert (segment.device, segment.address, segment.size) == (0, original["address"], SLOT * SLOTS)
        assert snapshot.streams[segment.stream] == original["stream"]
        assert [tuple(block)[:4] for block in segment.blocks] == [
            (b["address"], b["size"], b["requested_size"], states[b["state"]]) for b in original["blocks"]
        ]


@pytest.mark.usefixtures("simulated_accelerator")
def test_a_snapshot_of_the_simulator_arrives(tmp_path: Path, simulated_accelerator: Any) -> None:
    import torch

    from torchrec_prealloc import simulator

    simulator.record_memory_history(True)
    try:
        kept = [torch.empty(size, device=simulated_accelerator) for size in (10, 3_000_000)]
        del kept[0]
        simulator.dump_snapshot(tmp_path / "simulated.pickle")
    finally:
        simulator.record_memory_history(False)
    original = pickle.loads((tmp_path / "simulated.pickle").read_bytes())
    snapshot = read_snapshot(tmp_path / "simulated.pickle")
    assert rows(snapshot) == expected_rows(original["device_traces"][0])
    assert len(snapshot.segments) == len(original["segments"])
    assert [entry["size"] for entry in original["device_traces"][0] if entry["action"] == "alloc"] == [40, 12_000_000]
    assert any(Path(__file__).name in cause.site for cause in snapshot.causes)


def test_streams_are_as_they_are_named_and_causes_by_their_frames(tmp_path: Path) -> None:
    written = Written()
    written.alloc(94_000_000_000_000, 10, COPY)
    snapshot = read_snapshot(written.dump(tmp_path / "s.pickle"))
    assert snapshot.streams == [94_000_000_000_000]
    assert [snapshot.causes[number].kind for number in snapshot.traces[0].cause] == [Kind.COPY, Kind.COPY]
    assert snapshot.causes[snapshot.traces[0].cause[0]].site == "_to_device, train_pipeline/utils.py:144"


def test_without_stacks_nothing_is_known_of_causes(tmp_path: Path) -> None:
    written = Written(stacks=False)
    written.alloc(7, 10)
    snapshot = read_snapshot(written.dump(tmp_path / "s.pickle"))
    assert (snapshot.stacks, snapshot.causes) == (0, [UNKNOWN])


def test_gzip_is_read_by_its_content(tmp_path: Path) -> None:
    data = pickle.dumps(random_history(1).snapshot())
    for name in ("a.pickle.gz", "b.pickle"):
        (tmp_path / name).write_bytes(gzip.compress(data))
        assert len(read_snapshot(tmp_path / name).traces[0]) == 120
    assert read_snapshot(tmp_path / "a.pickle.gz").name == "a"


def test_progress_is_the_files_bytes(tmp_path: Path) -> None:
    path = random_history(1).dump(tmp_path / "s.pickle")
    read: list[int] = []
    read_snapshot(path, read.append)
    assert sum(read) == path.stat().st_size


@many
@given(length=st.integers(0, 1 << 20), packed=st.booleans())
def test_every_prefix_of_a_file_is_refused_with_one_line(length: int, packed: bool, tmp_path: Path) -> None:
    data = pickle.dumps(random_history(1, events=20).snapshot())
    data = gzip.compress(data) if packed else data
    path = tmp_path / "s.pickle"
    path.write_bytes(data[: length % len(data)])
    with pytest.raises(SnapshotError) as refused:
        read_snapshot(path)
    assert str(refused.value).startswith(f"{path} is ")
    assert "\n" not in str(refused.value)


@many
@given(place=st.integers(0, 1 << 20), value=st.integers(0, 255))
def test_a_damaged_file_gives_a_snapshot_or_one_line(place: int, value: int, tmp_path: Path) -> None:
    data = bytearray(pickle.dumps(random_history(1, events=20).snapshot()))
    data[place % len(data)] = value
    path = tmp_path / "s.pickle"
    path.write_bytes(bytes(data))
    try:
        said = str(read_snapshot(path).name)
    except SnapshotError as error:
        said = str(error)
    assert "\n" not in said


def other(value: Any) -> bytes:
    return pickle.dumps(value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b"\x89PNG\r\n\x1a\n", "is no snapshot, since it is no pickle"),
        (json.dumps({"segments": []}).encode(), "since it is no pickle"),
        (b"cos\nsystem\n(S'exit 1'\ntR.", "tries to import os.system"),
        (b"\x1f\x8b\x08\x00" + b"\xff" * 30, "cut off or damaged"),
        (other([1, 2]), "no 'segments'"),
        (other({"a": 1}), "no 'segments'"),
        (other({"segments": 5}), "no 'segments'"),
        (other("text"), "no 'segments'"),
        (other({"segments": [], "device_traces": [[{"action": "alloc", "addr": "x"}]]}), "does not fit"),
        (other({"segments": [], "device_traces": [[{"action": "alloc", "addr": 1 << 70}]]}), "does not fit"),
        (other({"segments": [], "device_traces": [[{"action": "alloc", "stream": "x"}]]}), "'x' where a number"),
        (other({"segments": [], "device_traces": [[{"action": "alloc", "size": -5}]]}), "a size of -5 in its history"),
        (other({"segments": [], "device_traces": [[{"action": "alloc", "size": 1 << 60}]]}), "a size of 1,152,921"),
        (other({"segments": [], "device_traces": [[{"action": "alloc", "time_us": -1}]]}), "a time of -1"),
        (other({"segments": [{"blocks": [], "total_size": 1, "device": -1}]}), "'-1' where a number from 0 to 1023"),
        (other({"segments": [], "device_traces": [[{"action": "alloc"}, 5]]}), "no list of dicts"),
        (other({"segments": [{"blocks": [], "total_size": None}]}), "'None' where a number"),
        (other({"segments": [{"blocks": [{"state": "inactive", "size": 1}, 3], "total_size": 1}]}), "no list of dicts"),
        (other({"segments": [{"filename": 1, "name": "x"}]}), "a frame's name"),
    ],
)
def test_what_is_no_snapshot_is_said(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match=said):
        read_snapshot(path)


def test_an_entry_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """It was forgotten when it had been read; PyTorch writes no such file."""
    written = Written()
    written.alloc(0, 10)
    written.trace.append(written.trace[-1])
    with pytest.raises(SnapshotError, match="no list of dicts"):
        read_snapshot(written.dump(tmp_path / "s.pickle"))


def test_a_zip_and_what_cannot_be_opened_are_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as file:
        file.writestr("data.pkl", b"x")
    with pytest.raises(SnapshotError, match=r"is a zip \(of torch.save\?\)"):
        read_snapshot(tmp_path / "model.pt")
    with pytest.raises(SnapshotError, match="No such file"):
        read_snapshot(tmp_path / "missing.pickle")
    with pytest.raises(SnapshotError, match="Is a directory"):
        read_snapshot(tmp_path)


class Hostile:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("exit 1",)


def test_a_hostile_snapshot_is_refused_by_what_it_tried(tmp_path: Path) -> None:
    whole = random_history(1).snapshot()
    whole["device_traces"][0][50]["user_metadata"] = Hostile()
    path = tmp_path / "s.pickle"
    for data in (pickle.dumps(whole), gzip.compress(pickle.dumps(whole)), pickle.dumps(whole, 2)):
        path.write_bytes(data)
        with pytest.raises(HostileError, match=r"s.pickle is refused: it tries to import posix.system"):
            read_snapshot(path)


def test_what_newer_and_older_versions_write_is_read(tmp_path: Path) -> None:
    old_block = {"size": 512, "state": "active_allocated", "history": [{"addr": 1, "real_size": 10, "frames": []}]}
    segment = {"address": 1, "total_size": 512, "stream": 0, "segment_type": "small", "blocks": [old_block]}
    events = [
        {"action": "alloc", "addr": 1, "size": 10, "stream": 0},
        {"action": "free", "addr": 1, "size": 10, "stream": 0},
        {"action": "oom", "device_free": 5, "size": 10, "stream": 0},
        {"action": "workspace_snapshot", "addr": 0, "size": 0, "stream": 0, "new": {"x": [1.5, None, True, b"y"]}},
    ]
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [events], "new": {"key": [1, [2]]}}))
    snapshot = read_snapshot(path)
    assert [ACTIONS[action] for action in snapshot.traces[0].action] == ["alloc", "free", "oom", "other"]
    assert [tuple(block)[1:4] for block in snapshot.segments[0].blocks] == [(512, 512, ALLOCATED)]
    path.write_bytes(pickle.dumps({"segments": [segment]}))  # no device_traces at all
    assert read_snapshot(path).traces == []
