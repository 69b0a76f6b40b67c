"""Every shipped config and example makes the pipeline that it says."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kinds import KINDS, by_name
from recsys import make_batches, pinned, sharded, unsharded

import torchrec_prealloc
from torchrec_prealloc import (
    PreallocConfig,
    add_prealloc_flags,
    build_pipeline,
    launch,
    prealloc_pipeline,
    simulator,
    versions,
)
from torchrec_prealloc.pipelines import PreallocPipeline

CONFIGS = Path(__file__).parent.parent / "configs"
CPU = torch.device("cpu")


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, CONFIGS / "uses" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_a_config_for_each_pipeline_that_is_made_of_a_model() -> None:
    targets = [yaml.safe_load(file.read_text())["pipeline"]["_target_"] for file in CONFIGS.glob("*.yaml")]
    names = [target.rpartition(".")[2].removeprefix("Prealloc") for target in targets]
    assert sorted(set(names)) == sorted(set(versions.PIPELINES) - {"StagedTrainPipeline"})


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
@pytest.mark.usefixtures("one_rank")
def test_a_config_trains_or_evaluates(file: Path, simulated_accelerator: torch.device) -> None:
    section = yaml.safe_load(file.read_text())["pipeline"]
    name = section["_target_"].rpartition(".")[2].removeprefix("Prealloc")
    kind = next(kind for kind in KINDS.values() if kind.cls == name)
    kind.theirs()
    with kind.names(simulated_accelerator):
        model, optimizer = kind.make(simulated_accelerator)
        model.train(kind.trains)
        pipeline = build_pipeline(file, model, optimizer, simulated_accelerator)
        assert isinstance(pipeline, PreallocPipeline)
        if kind.ranks == 1 and name != "TrainPipelinePT2":
            iterator = iter(kind.batches(3, simulated_accelerator))
            assert torch.isfinite(pipeline.progress(iterator)[0])


def test_the_options_that_are_shown_as_defaults_are_all_there_are_and_the_defaults() -> None:
    section = yaml.safe_load((CONFIGS / "sparse_dist.yaml").read_text())["pipeline"]
    assert section["prealloc"] == dataclasses.asdict(PreallocConfig())


def test_the_flags_are_those_of_the_parser() -> None:
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
    add_prealloc_flags(parser)
    args = parser.parse_args([f"@{CONFIGS / 'uses' / 'flags.txt'}"])
    assert PreallocConfig.from_args(args) == PreallocConfig(direct_bytes=1 << 18)


def test_the_hydra_config_builds() -> None:
    model, optimizer = unsharded(CPU)
    pipeline = build_pipeline(CONFIGS / "uses" / "hydra.yaml", model, optimizer, CPU)
    assert type(pipeline) is torchrec_prealloc.PreallocTrainPipelineSparseDist


def test_torchrecs_benchmark_makes_ours_with_its_own_keys() -> None:
    """What its benchmark does with the YAML's section, while the launcher's names are in place."""
    pytest.importorskip("torchrec.distributed.test_utils.pipeline_config", reason="this TorchRec has no PipelineConfig")
    from torchrec.distributed.test_utils import pipeline_config

    section = yaml.safe_load((CONFIGS / "uses" / "benchmark.yaml").read_text())["PipelineConfig"]
    known = {field.name for field in dataclasses.fields(pipeline_config.PipelineConfig)}  # the last came with 1.7
    section = {key: value for key, value in section.items() if key in known}
    model, optimizer = unsharded(CPU)
    try:
        with torchrec_prealloc.enable():
            pipeline = pipeline_config.PipelineConfig(**section).generate_pipeline(model, optimizer, CPU)
    finally:
        launch.disable()
    assert type(pipeline) is torchrec_prealloc.PreallocTrainPipelineSparseDist


@pytest.mark.usefixtures("one_rank")
def test_a_factory_preallocates_its_own_subclass() -> None:
    create = load("factory").create_train_pipeline
    seen = []
    for preallocate in (False, True):
        checked: list[Any] = []
        pipeline = create(*sharded(CPU), CPU, True, preallocate, check=checked.append)
        iterator = iter(make_batches(4))
        seen.append([float(pipeline.progress(iterator)[0]) for _ in range(4)])
        assert len(checked) == 4
        assert isinstance(pipeline, PreallocPipeline) == preallocate
    assert seen[0] == seen[1]
    assert isinstance(create(*unsharded(CPU), CPU, False, True), PreallocPipeline)


@pytest.mark.parametrize("way", ["replaced", "with_our_stage"])
def test_both_ways_to_stage_a_copy_are_ordered(way: str, simulated_accelerator: torch.device) -> None:
    batches = make_batches(8, wobble=True)
    for schedule in ("lazy", "eager", "random"):
        with simulator.checked(schedule, 4):  # type: ignore[arg-type]
            pipeline = getattr(load("staged"), way)(simulated_accelerator)
            iterator, sums = iter(pinned(batches)), []
            while (batch := pipeline.progress(iterator)) is not None:
                sums.append(batch.dense_features.sum() + batch.sparse_features.values().sum())
                del batch
            values = [float(value) for value in sums]
        assert values == [float(batch.dense_features.sum() + batch.sparse_features.values().sum()) for batch in batches]


def test_staged_batches_belong_to_the_stream_that_computes(simulated_accelerator: torch.device) -> None:
    """Which may be another than the one that is current where `progress` is called."""
    module: Any = torch.get_device_module(simulated_accelerator)
    compute, cls = module.Stream(), prealloc_pipeline(load("staged").StagedTrainPipeline)
    stages = [load("staged").PipelineStage("copy", by_name(simulated_accelerator), module.Stream())]
    batches = pinned(make_batches(4))
    iterator = iter(batches)
    with module.stream(compute):
        torch.ones(1, device=simulated_accelerator)
    before = simulator.stats().streams[(0, compute.stream_id)].allocated
    with simulator.checked("random", 4):
        batch = cls(stages, compute_stream=compute).progress(iterator)
        assert simulator.stats().streams[(0, compute.stream_id)].allocated > before
        with module.stream(compute):
            total = batch.dense_features.sum()
        compute.synchronize()
    assert float(total) == float(batches[0].dense_features.sum())
