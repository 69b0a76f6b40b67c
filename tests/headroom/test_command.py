"""`torchrec-prealloc headroom`: one screen for a file, a table for a folder, one line for what cannot be read."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrec_prealloc import cli
from torchrec_prealloc.headroom import command, replay

from .trained import snapshot_of
from .written import COPY, INPUT_DIST, OTHER, Written, random_history


def run(*arguments: object) -> int:
    return cli.main(["headroom", "--no-replay", *map(str, arguments)])


def copies(rounds: int = 3, extra: int = 0, stacks: bool = True) -> Written:
    """Copies on stream 7, input dist on stream 8, a model on stream 0."""
    written = Written(stacks)
    for _ in range(extra):
        written.segment(0)
    written.alloc(0, 1 << 20, OTHER)
    for _ in range(rounds):
        copied, dist = written.alloc(7, 1 << 20, COPY), written.alloc(8, 1 << 19, INPUT_DIST)
        written.free(copied, wait=True)
        written.free(dist)
        written.complete(copied)
    return written


def test_a_report_is_one_screen_with_all_that_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(copies().dump(tmp_path / "rank0.pickle")) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith("rank0: 22 events over 0.02 s, with stacks; main stream: 0 (the default stream)")
    (of_all,) = [line.split() for line in lines if line.startswith("all ")]
    assert of_all == ["all", "12.0", "2.5", "12.0", "2.0", "0.0", "10.0"]
    assert any(line.startswith("7         reserved   ") for line in lines)
    assert "Held by other streams than the main one at the peak: 8.0 MiB (67%)." in lines
    (copied,) = [line.split() for line in lines if line.startswith("7: TorchRec's copy")]
    assert copied[3:5] == ["1.0", "4.0"]
    assert copied[5:] == ["_to_device,", "train_pipeline/utils.py:144"]
    assert any(line.startswith("8: input dist") for line in lines)
    assert "Preallocation would give back at most 4.0 MiB (33%): 12.0 MiB reserved would become 8.0 MiB." in lines
    assert "Note" not in out


def test_over_time_is_drawn_for_each_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(copies(rounds=30).dump(tmp_path / "s.pickle"))
    out = capsys.readouterr().out
    head, *bars = out[out.index("Over time") : out.index("\n\nHeld by")].splitlines()
    assert head.endswith("a full bar is 4.0 MiB:")
    assert [line.split()[-2] for line in bars[::2]] == ["reserved"] * 3
    drawn = [bar[-58:] for bar in bars]  # the first events make the segments
    assert drawn[::2] == ["█" * 58] * 3
    assert [set(bar) for bar in drawn[1::2]] == [{"▂"}, {"▂", " "}, {"▁", " "}]  # copies come and go


@pytest.mark.parametrize(
    ("written", "how", "said"),
    [
        (copies(), {"history": False}, ["Recorded without history", "no history", "when it was written"]),
        (copies(stacks=False), {}, ["Recorded without stacks", "without stacks", "at most 8.0 MiB"]),
        (copies(), {"first": 9}, ["The history begins when 12.0 MiB were reserved already", "max_entries"]),
        (copies(extra=1), {}, ["with stacks"]),
    ],
)
def test_what_a_recording_lacks_is_said_with_the_remedy(
    written: Written, how: dict[str, Any], said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(written.dump(tmp_path / "s.pickle", **how)) == 0
    out = capsys.readouterr().out
    for text in said:
        assert text in out
    assert ("_record_memory_history(" in out) == ("Recorded without" in out)
    if how.get("history") is False:
        assert "cannot be told without the history" in out
        assert "Over time" not in out


def test_failed_allocations_expandable_segments_and_another_main_stream_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = copies()
    written.alloc(9, 1 << 20)
    written.alloc(9, 1 << 20)
    written.trace.append({"action": "oom", "device_free": 5, "size": 10, "stream": 0, "time_us": 1_800_000_000_000_000})
    snapshot = written.snapshot()
    snapshot["allocator_settings"]["expandable_segments"] = True
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(snapshot))
    run(tmp_path / "s.pickle")
    out = capsys.readouterr().out.replace("\n  ", " ")
    assert "1 allocations failed" in out
    assert "expandable_segments is on" in out
    assert "say --main-stream 9" in out


def test_ours_has_nothing_to_give_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = Written()
    frames = [{"name": "allocate", "filename": "/x/torchrec_prealloc/buffers.py", "line": 1}, *COPY]
    written.alloc(0, 1 << 20, frames)
    run(written.dump(tmp_path / "s.pickle"))
    out = capsys.readouterr().out
    assert "No stream but the main one holds memory." in out
    assert "Nothing to give back" in out
    assert "this run has torchrec_prealloc: batches of 1.0 MiB" in out


def test_a_folder_is_a_table_of_its_ranks_and_the_worst(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 2, 10):
        copies(extra=rank).dump(tmp_path / f"rank{rank}.pickle")
    (tmp_path / "rank3.pickle.gz").write_bytes(gzip.compress(pickle.dumps(copies(extra=3).snapshot())))
    (tmp_path / "rank4.pickle").write_bytes(b"\x80\x04")
    (tmp_path / "notes.txt").write_text("no snapshot")
    assert run(tmp_path) == 0
    out = capsys.readouterr().out
    table = [line.split() for line in out.splitlines() if line.startswith("rank")]
    assert [row[0] for row in table[:5]] == ["rank0", "rank2", "rank3", "rank4.pickle", "rank10"]
    assert table[0][1:7] == ["12.0", "2.5", "8.0", "4.0", "8.0", "4.0"]
    assert table[4][1] == "48.0"
    assert "is cut off: it ends after 2 bytes" in out
    assert "1 of 5 files could not be read." in out
    assert "The rank that reserves most is rank10.pickle." in out
    assert "rank10: " in out


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("s.pickle", b"", "s.pickle is empty"),
        ("s.pickle", pickle.dumps(random_history(1).snapshot())[:-100], "s.pickle is cut off"),
        ("s.pickle", b"cos\nsystem\n(S'x'\ntR.", "s.pickle is refused: it tries to import os.system"),
        ("s.pickle", pickle.dumps({"segments": [], "device_traces": [[]]}), "s.pickle says of no memory at all"),
        ("other.pickle", b"", "s.pickle cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    name: str, data: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(data)
    assert run(tmp_path / "s.pickle") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if line.startswith("torchrec-prealloc headroom: ")]
    assert said in line


def test_a_stream_that_is_not_there_and_an_empty_folder_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(copies().dump(tmp_path / "s.txt"), "--main-stream", 5) == 1
    assert "has no stream 5 that holds memory; there are: 0, 7, 8" in capsys.readouterr().err
    assert run(tmp_path) == 1
    assert "has no snapshot in it: no file that ends in .pickle" in capsys.readouterr().err


def test_out_has_the_figures_and_a_picture_of_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, Path]] = []
    monkeypatch.setattr(command, "_draw", lambda found, path: drawn.append((found.name, path)))
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        copies(extra=2 * rank).dump(tmp_path / "ranks" / f"rank{rank}.pickle")
    out = tmp_path / "new" / "out"
    assert run(tmp_path / "ranks", "--out", out, "--plot", tmp_path / "worst.png") == 0
    written = json.loads((out / "headroom.json").read_text())
    assert [(one["name"], one["picture"]) for one in written] == [("rank0", "rank0.png"), ("rank1", "rank1.png")]
    assert written[0]["peak_reserved"] == 12 << 20
    assert written[0]["estimate"]["gives_back"] == 4 << 20
    assert written[0]["streams"][1]["peak_allocated_by_kind"] == {"TorchRec's copy": 1 << 20}
    assert drawn == [
        ("rank0", out / "rank0.png"),
        ("rank1", out / "rank1.png"),
        ("rank1", tmp_path / "worst.png"),
    ]


def test_the_estimate_is_replayed_unless_it_cannot_be(
    simulated_accelerator: torch.device,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torchrec.distributed.train_pipeline import TrainPipelineBase

    snapshot_of(TrainPipelineBase, simulated_accelerator, tmp_path / "s.pickle", steps=6)
    assert cli.main(["headroom", str(tmp_path / "s.pickle")]) == 0
    out = capsys.readouterr().out
    assert "Preallocation would give back about " in out
    assert "the history run again" in out
    monkeypatch.setattr(replay, "unavailable", lambda: "no C++ compiler: install g++")
    assert cli.main(["headroom", str(tmp_path / "s.pickle")]) == 0
    out = capsys.readouterr().out
    assert "Preallocation would give back at most " in out
    assert "Nothing was run again: no C++ compiler: install g++" in out


def test_a_picture_is_drawn_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert run(copies().dump(tmp_path / "s.pickle"), "--plot", tmp_path / "s.png") == 0
    assert f"Written: {tmp_path / 's.png'}" in capsys.readouterr().out
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = copies().dump(tmp_path / "s.pickle")
    assert run(path, "--plot", tmp_path) == 1
    assert f"{tmp_path} cannot be written: Is a directory" in capsys.readouterr().err
    assert run(path, "--out", path) == 1
    assert f"{path} cannot be made: File exists" in capsys.readouterr().err
