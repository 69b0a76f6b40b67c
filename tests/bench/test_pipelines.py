"""The comparison of all pipelines says what it ran, where, and what it did not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from torchrec_prealloc import versions
from torchrec_prealloc.bench import pipelines
from torchrec_prealloc.bench.pipelines import MEMORY, SPEED, Kind
from torchrec_prealloc.bench.table import Row, Table


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, simulated_accelerator: torch.device) -> None:
    monkeypatch.setattr(pipelines, "TURNS", 2)
    monkeypatch.setattr(pipelines, "STEPS_A_TURN", 2)
    monkeypatch.setattr(pipelines, "MEMORY_STEPS", 5)


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> Sequence[Row]:
    monkeypatch.setattr(versions, "available", lambda: {name: versions.pipeline_class(name) for name in names})
    return list(pipelines.run())


@pytest.mark.usefixtures("quick")
def test_each_class_has_its_speed_on_the_cpu_and_its_memory_on_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TrainPipelineBase", "TrainPipelineSparseDist", "EvalPipelineSparseDist", "TrainPipelineSemiSync")
    rows = {row.name: row.figures for row in only(monkeypatch, *names)}
    speeds = {name for name in rows if name.endswith(SPEED)}
    assert speeds == {f"{name}: {SPEED}" for name in names[:3]}, "semi-sync does not run on a CPU"
    assert set(rows) - speeds == {f"{name}: {MEMORY}" for name in names}
    for name, figures in rows.items():
        assert figures["baseline"] == "TorchRec's own"
        assert figures["on"] == ("CPU" if name in speeds else "simulator")
        if name in speeds:
            assert float(figures["ratio_min"] or 0) <= float(figures["ratio"] or 0) <= float(figures["ratio_max"] or 0)
        else:
            assert figures["ratio"] == pytest.approx(float(figures["ours"] or 0) / float(figures["theirs"] or 1))
    for name in names[:2]:
        assert float(rows[f"{name}: {MEMORY}"]["ratio"] or 9) < 1
    Table("pipelines", pipelines.COLUMNS, tuple(Row(name, figures) for name, figures in rows.items()))


@pytest.mark.usefixtures("quick")
def test_what_is_not_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(cls: Any, options: Any) -> Any:
        raise RuntimeError("no such operator\nmore")

    names = ("StagedTrainPipeline", "TrainPipelineBase")
    monkeypatch.setattr(pipelines, "ways_of", fails)
    on = [row.figures["on"] for row in only(monkeypatch, *names)]
    assert on == ["not run: has no model", "not run: no such operator"]
    monkeypatch.setattr(pipelines, "KINDS", {"TrainPipelineBase": Kind(not_run="a reason")})
    assert [row.figures["on"] for row in only(monkeypatch, *names)] == ["not run: not known here", "not run: a reason"]


def test_every_class_of_torchrecs_is_known() -> None:
    assert set(pipelines.KINDS) == set(versions.PIPELINES)


def test_more_memory_than_torchrecs_is_said() -> None:
    rows = [
        Row(f"A: {MEMORY}", {"theirs": 100.0, "ours": 100.0 + pipelines.SLACK_MIB}),
        Row(f"B: {MEMORY}", {"theirs": 100.0, "ours": 101.0 + pipelines.SLACK_MIB}),
        Row(f"C: {SPEED}", {"theirs": 1.0, "ours": 100.0}),
        Row("D", {"on": "not run: a reason"}),
    ]
    assert pipelines.missed(rows) == [f"B: {MEMORY}: ours reserves 115.0 MiB, TorchRec's 100.0"]
