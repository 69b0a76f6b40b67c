"""A snapshot is read within twice its size of memory, however large; measured in a process of its own."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchrec_prealloc.headroom.opcodes import WINDOW
from torchrec_prealloc.headroom.reading import read_snapshot
from torchrec_prealloc.headroom.snapshot import ACTIONS

from . import peak
from .large import write_large

MB = 1_000_000


def measured(path: Path) -> dict[str, Any]:
    run = subprocess.run([sys.executable, peak.__file__, str(path)], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    figures: dict[str, Any] = json.loads(run.stdout)
    return figures


@pytest.mark.parametrize("depth", [0, 30])
def test_what_is_read_and_reported_is_within_twice_the_files_size(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "large.pickle"
    entries = write_large(path, 12 * MB, depth)
    figures = measured(path)
    assert figures["entries"] == entries
    assert figures["lines"] > 20
    assert figures["peak"] - figures["before"] <= 2 * figures["size"] + 2 * WINDOW


@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 30])
def test_a_whole_process_is_within_twice_a_large_files_size(tmp_path: Path, depth: int) -> None:
    """Python, numpy and all: the larger the file, the less they count."""
    path = tmp_path / "large.pickle"
    write_large(path, 200 * MB, depth)
    figures = measured(path)
    print(figures)
    assert figures["peak"] <= 2 * figures["size"]


@pytest.mark.parametrize("depth", [0, 30])
def test_a_large_snapshot_is_one_that_pickle_reads(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "large.pickle"
    entries = write_large(path, MB, depth)
    (trace,) = pickle.loads(path.read_bytes())["device_traces"]
    assert len(trace) == entries
    assert len(trace[-1].get("frames", [])) == depth
    read = read_snapshot(path).traces[0]
    assert [ACTIONS[action] for action in read.action] == [entry["action"] for entry in trace]
    assert list(read.time) == [entry["time_us"] for entry in trace]
