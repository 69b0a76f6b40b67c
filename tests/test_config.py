"""Options from code, YAML and command lines; what is wrong is refused by name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from recsys import unsharded
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

import torchrec_prealloc
from torchrec_prealloc import ConfigError, PreallocConfig, add_prealloc_flags, build_pipeline
from torchrec_prealloc.config import constructor_options

CPU = torch.device("cpu")
OURS = "torchrec_prealloc.PreallocTrainPipelineSparseDist"


def build(section: Any) -> Any:
    model, optimizer = unsharded(CPU)
    return build_pipeline({"pipeline": section}, model, optimizer, CPU)


def test_the_defaults_are_on() -> None:
    assert PreallocConfig().enabled


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enabled": "yes"}, r"prealloc\.enabled: 'yes' is not a bool"),
        ({"enabled": 1}, r"prealloc\.enabled: 1 is not a bool"),
        ({"direct_bytes": "1MB"}, r"prealloc\.direct_bytes: '1MB' is not an int of at least 1"),
        ({"direct_bytes": 0}, r"prealloc\.direct_bytes: 0 is not an int of at least 1"),
        ({"direct_bytes": True}, r"prealloc\.direct_bytes: True is not an int of at least 1"),
        ({"buffers": "rings"}, r"prealloc\.buffers: 'rings' is unknown; write per_batch or ring"),
        ({"ring_slots": 0}, r"prealloc\.ring_slots: 0 is not an int of at least 1"),
        ({"size_rounding": -1}, r"prealloc\.size_rounding: -1 is not an int of at least 0"),
        ({"direct_byte": 5}, r"prealloc\.direct_byte: unknown option; did you mean direct_bytes\?"),
        ({"zzz": 5}, r"prealloc\.zzz: unknown option; there are: buffers, chunk_bytes, direct_bytes, enabled"),
    ],
)
def test_a_wrong_option_is_refused_by_its_key(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PreallocConfig.of(options)


def test_options_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(ConfigError, match="prealloc: 3 is a int; give a mapping"):
        PreallocConfig.of(3)  # type: ignore[arg-type]


def test_a_hydra_target_among_the_options_is_no_option() -> None:
    options = {"_target_": "torchrec_prealloc.PreallocConfig", "direct_bytes": 5}
    assert PreallocConfig.of(options) == PreallocConfig(direct_bytes=5)


# Command lines ---------------------------------------------------------------------------------------------------


def parsed(*line: str) -> PreallocConfig:
    parser = argparse.ArgumentParser()
    add_prealloc_flags(parser)
    return PreallocConfig.from_args(parser.parse_args(line))


def test_a_trainer_is_torchrecs_own_unless_the_flag_is_given() -> None:
    assert not parsed().enabled
    assert parsed("--prealloc").enabled
    assert not parsed("--prealloc", "--no-prealloc").enabled


def test_each_option_has_a_flag() -> None:
    assert parsed("--prealloc", "--prealloc-direct-bytes", "77") == PreallocConfig(direct_bytes=77)


def test_arguments_without_our_flags_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"call add_prealloc_flags\(parser\)"):
        PreallocConfig.from_args(argparse.Namespace())


# Pipelines by name -----------------------------------------------------------------------------------------------


def test_swapping_one_line_makes_torchrecs_pipeline_ours() -> None:
    options = {"execute_all_batches": False}
    if "enable_inplace_copy_batch" in constructor_options(TrainPipelineSparseDist):  # from TorchRec 1.6 on
        options["enable_inplace_copy_batch"] = True
    theirs = build({"_target_": "torchrec.distributed.train_pipeline.TrainPipelineSparseDist", **options})
    ours = build({"_target_": OURS, **options})
    assert type(theirs) is TrainPipelineSparseDist
    assert type(ours) is torchrec_prealloc.PreallocTrainPipelineSparseDist
    assert isinstance(ours, TrainPipelineSparseDist)
    assert not theirs._execute_all_batches
    assert not ours._execute_all_batches


def test_options_reach_the_pipeline() -> None:
    assert build({"_target_": OURS, "prealloc": {"direct_bytes": 9}}).prealloc == PreallocConfig(direct_bytes=9)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, r"pipeline\._target_: missing"),
        ({"_target_": "nowhere.Pipeline"}, r"pipeline\._target_: cannot import nowhere"),
        ({"_target_": "Pipeline"}, r"pipeline\._target_: cannot import Pipeline"),
        (
            {"_target_": "torchrec_prealloc.PreallocTrainPipelineSparseDst"},
            r"torchrec_prealloc has no PreallocTrainPipelineSparseDst; did you mean PreallocTrainPipelineSparseDist\?",
        ),
        ({"_target_": "torch.nn.Linear"}, r"torch\.nn\.Linear is no train pipeline"),
        ({"_target_": "math.pi"}, r"math\.pi is no train pipeline"),
        ({"_target_": OURS, "execute_all_batchs": True}, r"no such option; did you mean execute_all_batches\?"),
        ({"_target_": OURS, "execute_all_batches": "no"}, r"pipeline\.execute_all_batches: 'no' is a str; give bool"),
        pytest.param(
            {"_target_": OURS, "dmp_collection_sync_interval_batches": 1.5},
            r"dmp_collection_sync_interval_batches: 1\.5 is a float; give int or null",
            marks=pytest.mark.skipif(
                "dmp_collection_sync_interval_batches" not in constructor_options(TrainPipelineSparseDist),
                reason="this TorchRec has no 2-D sharding",
            ),
        ),
        ({"_target_": OURS, "model": 1}, r"pipeline\.model: .* no such option"),
        ({"_target_": OURS, "prealloc": {"on": True}}, r"prealloc\.on: unknown option"),
    ],
)
def test_what_is_wrong_in_a_pipeline_section_is_named(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(section)


def test_a_file_without_a_pipeline_a_missing_file_and_no_yaml_are_named(tmp_path: Path) -> None:
    for text, message in (("a: 1", "no `pipeline:` mapping"), ("a: [", "not YAML"), ("", "no `pipeline:` mapping")):
        file = tmp_path / "config.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            build_pipeline(file, None, None, CPU)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read \(No such file"):
        build_pipeline(tmp_path / "absent.yaml", None, None, CPU)  # type: ignore[arg-type]
