"""Without a GPU the demo's memory columns are the simulator's, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrec_prealloc import simulator
from torchrec_prealloc.bench.table import Row, Table
from torchrec_prealloc.demo import simulated as module
from torchrec_prealloc.demo.report import COLUMNS, report, with_simulated
from torchrec_prealloc.demo.simulated import Simulated, simulate
from torchrec_prealloc.estimation.footprint import Footprint
from torchrec_prealloc.ways import BLOCKING, NON_BLOCKING, OURS, PREALLOCATED

WAYS = (BLOCKING, NON_BLOCKING, PREALLOCATED)
MEASURED = Table("way", COLUMNS, tuple(Row(way, {"steps_per_second": 1.0, "gpu_reserved_mib": None}) for way in WAYS))
SETTINGS = {"device": "cpu", "pipeline": {"_target_": OURS["base"]}, "ranks": 1, "steps": 3}


@pytest.mark.usefixtures("simulated_accelerator")
def test_the_demos_own_model_and_batches_are_run_in_another_process() -> None:
    found = simulate({"_target_": OURS["base"]}, 32, 20, print)
    assert found.problem == ""
    assert list(found.ways) == [*WAYS]
    blocking, non_blocking, ours = found.ways.values()
    assert {one.on for one in found.ways.values()} == {"simulator"}
    assert (blocking.side, ours.side) == (0, 0)
    assert non_blocking.side > 0
    assert ours.reserved <= non_blocking.reserved
    assert blocking.allocated > 4 * 32 * (943 + 2 * 1682)  # the tables of users, items and histories count


def test_a_simulator_that_cannot_be_built_is_a_line_and_the_table_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(simulator, "available", lambda: (False, "no C++ compiler ('g++'): install g++ 11 or later"))
    found = simulate({"_target_": OURS["base"]}, 32, 20, print)
    assert with_simulated(MEASURED, found) is MEASURED
    report(MEASURED, SETTINGS, tmp_path, found.problem)
    printed = capsys.readouterr().out
    assert "No simulated memory: no C++ compiler ('g++'): install g++ 11 or later\n" in printed
    assert "no GPU" in printed
    assert "simulated)" not in printed


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import sys; print('a'); print('b', file=sys.stderr); sys.exit('no memory left')", "no memory left"),
        ("import os; os._exit(7)", "its process ended with 7"),
        ("import os, sys; sys.exit(str([name for name in os.environ if 'RANK' in name]))", "[]"),
    ],
)
def test_a_process_that_fails_is_a_line_too(
    code: str, problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RANK", "3")  # torchrun's: the other process is no rank of that job
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(module, "__name__", "failing")
    monkeypatch.setattr(simulator, "available", lambda: (True, ""))
    monkeypatch.setattr(simulator, "built", lambda: False)
    said: list[str] = []
    assert simulate({"_target_": OURS["base"]}, 32, 20, said.append) == Simulated(problem=problem)
    assert "building the simulator (once" in said[0]


def test_the_simulators_columns_replace_the_gpus_and_are_marked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mib = 1 << 20
    table = with_simulated(
        MEASURED, Simulated({way: Footprint(3 * mib, 6 * mib, 2 * mib, "simulator") for way in WAYS})
    )
    assert [column.key for column in table.columns if column.key.startswith("gpu_")] == []
    assert all("(simulated)" in column.title for column in table.columns if column.key.startswith("simulated_"))
    assert table.rows[0].figures == {
        "steps_per_second": 1.0,
        "simulated_allocated_mib": 3,
        "simulated_reserved_mib": 6,
        "simulated_side_mib": 2,
    }
    report(table, SETTINGS, tmp_path)
    assert "no GPU was measured" in capsys.readouterr().out
