"""The YAML of the estimate: descriptions, functions, loaders, models; and a line for each thing that is wrong."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

from torchrec_prealloc import versions
from torchrec_prealloc.estimation.config import read_settings
from torchrec_prealloc.estimation.description import Description
from torchrec_prealloc.estimation.estimate import EstimateError, estimate
from torchrec_prealloc.estimation.stand_in import stand_in

from . import trainer_stub

PIPELINE = {"_target_": "torchrec.distributed.train_pipeline.TrainPipelineBase"}
STUB = trainer_stub.__name__


def config(**entries: Any) -> dict[str, Any]:
    return {"pipeline": PIPELINE, **entries}


def first(count: int, **entries: Any) -> list[Any]:
    return list(itertools.islice(read_settings(config(**entries)).batches(), count))


def test_a_description_is_what_it_says() -> None:
    (batch,) = first(
        1, batch={"rows": 10, "sparse": {"a": 2, "b": [0, 3]}, "dense": 4, "tensors": {"x": [2, 3, "uint8"], "y": 5}}
    )
    assert batch.dense_features.shape == (10, 4)
    assert batch.labels.shape == (10,)
    assert (batch.x.shape, batch.x.dtype) == ((10, 2, 3), torch.uint8)
    assert (batch.y.shape, batch.y.dtype) == ((10, 5), torch.float32)
    sparse = batch.sparse_features
    assert (sparse.keys(), sparse.stride()) == (["a", "b"], 10)
    assert sparse.lengths()[:10].tolist() == [2] * 10
    assert set(sparse.lengths()[10:].tolist()) <= {0, 1, 2, 3}
    assert int(sparse.lengths().sum()) == len(sparse.values())


@given(least=st.integers(1, 50), more=st.integers(0, 50), seed=st.integers(0, 9))
def test_rows_are_drawn_from_their_range_and_the_same_for_each_way(least: int, more: int, seed: int) -> None:
    described = Description((least, least + more), {"f": (0, 2)}, 2)
    once, again = ([len(b.labels) for b in itertools.islice(described.batches(seed), 6)] for _ in range(2))
    assert once == again
    assert all(least <= rows <= least + more for rows in once)


def test_a_wobble_takes_rows_away() -> None:
    settings = read_settings(config(batch={"rows": 100}), wobble=0.25)
    rows = {len(batch.labels) for batch in itertools.islice(settings.batches(), 400)}
    assert (min(rows), max(rows)) == (75, 100)
    with pytest.raises(EstimateError, match=r"^batches\.rows: missing; a wobble needs"):
        read_settings(config(batches={"_target_": f"{STUB}.make_loader"}), wobble=0.25)


def test_a_function_makes_each_batch_with_its_options() -> None:
    trainer_stub.calls.clear()
    batches = first(3, batch={"_target_": f"{STUB}:make_batch", "rows": [4, 6], "seed": 5})
    assert [len(batch.labels) for batch in batches] == [rows for rows, _ in trainer_stub.calls]
    assert {seed for _, seed in trainer_stub.calls} == {5}
    assert all(4 <= rows <= 6 for rows, _ in trainer_stub.calls)
    assert len(first(1, batch={"_target_": f"{STUB}.make_batch"})[0].labels) == 8


@pytest.mark.parametrize("name", ["make_loader", "make_generator"])
def test_a_loader_is_read_over_and_over(name: str) -> None:
    batches = first(7, batches={"_target_": f"{STUB}.{name}"})
    again = 2 if name == "make_loader" else 3
    assert torch.equal(batches[0].dense_features, batches[again].dense_features)


def test_options_steps_and_ahead_are_those_of_the_file() -> None:
    content = config(batch={"rows": 1}, steps=5, host_ahead=False)
    content["pipeline"] = {"_target_": "TrainPipelineSparseDist", "execute_all_batches": False}
    settings = read_settings(content)
    assert settings.pipeline_class is TrainPipelineSparseDist
    assert (settings.options, settings.steps, settings.ahead) == ({"execute_all_batches": False}, 5, False)
    assert settings.model is stand_in


@pytest.mark.parametrize(
    "target",
    [
        "TrainPipelineBase",
        "PreallocTrainPipelineBase",
        "torchrec_prealloc.PreallocTrainPipelineBase",
        "torchrec.distributed.train_pipeline.train_pipelines.TrainPipelineBase",
    ],
)
def test_a_pipeline_class_may_be_named_in_any_way(target: str) -> None:
    content = {"pipeline": {"_target_": target}, "batch": {"rows": 1}}
    assert read_settings(content).pipeline_class is TrainPipelineBase


@pytest.mark.usefixtures("simulated_accelerator")
def test_a_model_of_the_trainers_is_built_on_the_device() -> None:
    trainer_stub.calls.clear()
    settings = read_settings(config(batch={"rows": 64}, model={"_target_": f"{STUB}.build", "width": 7}, steps=2))
    estimate(settings.pipeline_class, settings.batches, model=settings.model, steps=2)
    assert trainer_stub.calls == [("mtia", 7)] * 3


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, r"^batch: missing; write batch:"),
        ({"batch": {"rows": 1}, "batches": {"_target_": "x.y"}}, r"^batch: missing; write"),
        ({"batch": 5}, r"^batch: 5 is no mapping with _target_ or rows$"),
        ({"batches": {"rows": 5}}, r"^batches: .* is no mapping with _target_$"),
        ({"batch": {"dense": 4}}, r"^batch\.rows: missing"),
        ({"batch": {"rows": 0}}, r"^batch\.rows: 0 is neither a whole number of at least 1 nor \[smallest"),
        ({"batch": {"rows": [8, 4]}}, r"^batch\.rows: \[8, 4\] is neither"),
        ({"batch": {"rows": 1, "row": 1}}, r"^batch\.row: unknown; did you mean rows\?"),
        ({"batch": {"rows": 1, "dense": -1}}, r"^batch\.dense: -1 is not a whole number of at least 0"),
        ({"batch": {"rows": 1, "sparse": 3}}, r"^batch\.sparse: 3 is no mapping of names"),
        ({"batch": {"rows": 1, "sparse": {"f": "x"}}}, r"^batch\.sparse\.f: 'x' is neither"),
        ({"batch": {"rows": 1, "tensors": {"x": [3, "half8"]}}}, r"^batch\.tensors\.x: .* is no shape and type"),
        ({"batch": {"rows": 1}, "steps": 0}, r"^steps: 0 is not a whole number of at least 1"),
        ({"batch": {"rows": 1}, "host_ahead": 1}, r"^host_ahead: 1 is not a bool"),
        ({"batch": {"rows": 1}, "stepps": 4}, r"^stepps: unknown; did you mean steps\?"),
        ({"batch": {"rows": 1}, "model": "m"}, r"^model: 'm' is no mapping with _target_"),
        ({"batch": {"_target_": "no_such.module:f"}}, r"^batch\._target_: cannot import no_such\.module"),
        ({"batch": {"_target_": "plain"}}, r"^batch\._target_: cannot import plain"),
        ({"batch": {"_target_": f"{STUB}.no_function"}}, r"trainer_stub has no function no_function$"),
        ({"batches": {"_target_": 4}}, r"^batches\._target_: missing; name a function"),
    ],
)
def test_what_is_wrong_is_one_line(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(EstimateError, match=message):
        read_settings(config(**entries))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("torchrec.distributed.train_pipeline.TrainPipelineBse", r"TrainPipelineBse; did you mean TrainPipelineBase"),
        ("TrainPipelineBse", r"knows no TorchRec pipeline TrainPipelineBse; there are: TrainPipelineBase, "),
        (None, r"^pipeline\._target_: missing"),
        ("torch.nn.Linear", r"^pipeline\._target_: torch\.nn\.Linear is no train pipeline"),
        ("my_trainer.TrainPipelineBase", r"^pipeline\._target_: cannot import my_trainer"),
    ],
)
def test_a_class_that_is_not_there_is_named(target: Any, message: str) -> None:
    with pytest.raises(EstimateError, match=message):
        read_settings({"pipeline": {"_target_": target}, "batch": {"rows": 1}})


@pytest.mark.parametrize(
    "target", ["TrainPipelinePEC", "torchrec.distributed.train_pipeline.pec_train_pipeline.TrainPipelinePEC"]
)
def test_a_pipeline_that_the_installed_torchrec_lacks_is_said_with_its_version(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(versions.PIPELINES, "TrainPipelinePEC", ("no_module", "99.0"))
    with pytest.raises(EstimateError, match=r"TorchRec \S+ has no TrainPipelinePEC: it came with TorchRec 99"):
        read_settings({"pipeline": {"_target_": target}, "batch": {"rows": 1}})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"batch": {"_target_": f"{STUB}.fails"}}, r"^batch\._target_: fails failed: FileNotFoundError: no shard /0$"),
        ({"batch": {"_target_": f"{STUB}.make_batch", "size": 3}}, r"^batch\._target_: make_batch failed: TypeError"),
        ({"batches": {"_target_": f"{STUB}.fails"}}, r"^batches\._target_: fails failed"),
        ({"batches": {"_target_": f"{STUB}.nothing"}}, r"^batches\._target_: gave no batch$"),
        (
            {"batches": {"_target_": f"{STUB}.no_pair", "device": 1}},
            r"^batches\._target_: a int is no iterable of batches$",
        ),
        ({"batch": {"rows": 1}, "model": {"_target_": f"{STUB}.no_pair"}}, r"return \(model, optimizer\)$"),
        ({"batch": {"rows": 1}, "model": {"_target_": f"{STUB}.fails"}}, r"^model\._target_: fails failed"),
    ],
)
@pytest.mark.usefixtures("simulated_accelerator")
def test_functions_that_fail_are_named(entries: dict[str, Any], message: str) -> None:
    settings = read_settings(config(**entries))
    with pytest.raises(EstimateError, match=message):
        estimate(settings.pipeline_class, settings.batches, model=settings.model, steps=2)


@pytest.mark.parametrize("text", ["batch: [", "batch: {rows: 1}", "- 1"])
def test_a_file_that_is_no_config_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(EstimateError, match=r"broken\.yaml: "):
        read_settings(file)
    with pytest.raises(EstimateError, match=r"none\.yaml: cannot be read"):
        read_settings(tmp_path / "none.yaml")


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[2] / "configs" / "uses").glob("estimate*.yaml")))
@pytest.mark.usefixtures("simulated_accelerator")
def test_shipped_examples_run_and_are_short(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(file.parents[2]))
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 10
    assert yaml.safe_load(file.read_text())["pipeline"]
    settings = read_settings(file)
    found = estimate(
        settings.pipeline_class, settings.batches, model=settings.model, options=settings.options, steps=3
    )
    assert found.batch_bytes > 0
