"""Which pipelines are compared, and that a wrong config is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed import train_pipeline as theirs

import torchrec_prealloc as ours
from torchrec_prealloc.errors import CommandError
from torchrec_prealloc.ways import BLOCKING, NON_BLOCKING, OURS, PREALLOCATED, read_section, three_ways, ways_of

CPU = torch.device("cpu")
SPARSE_DIST = "torchrec_prealloc.PreallocTrainPipelineSparseDist"


def built(section: dict[str, Any]) -> list[Any]:
    model = torch.nn.Linear(1, 1)
    return [way.build(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU) for way in three_ways(section)]


def test_two_ways_use_torchrecs_pipeline_and_one_ours() -> None:
    types = [type(pipeline) for pipeline in built({"_target_": SPARSE_DIST})]
    assert types == [
        theirs.TrainPipelineSparseDist,
        theirs.TrainPipelineSparseDist,
        ours.PreallocTrainPipelineSparseDist,
    ]


class Mine(theirs.TrainPipelineBase):  # type: ignore[type-arg]
    """A trainer's subclass of TorchRec's."""


class MineOfOurs(ours.PreallocTrainPipelineBase):  # type: ignore[misc,name-defined]
    """A trainer's subclass of ours."""


@pytest.mark.parametrize(
    ("cls", "first", "last"),
    [
        (theirs.TrainPipelineSparseDist, theirs.TrainPipelineSparseDist, ours.PreallocTrainPipelineSparseDist),
        (Mine, Mine, ours.prealloc_pipeline(Mine)),
        (ours.prealloc_pipeline(Mine), Mine, ours.prealloc_pipeline(Mine)),
        (MineOfOurs, MineOfOurs, MineOfOurs),
    ],
)
def test_any_pipeline_class_has_its_two(cls: type, first: type, last: type) -> None:
    model = torch.nn.Linear(1, 1)
    pipelines = [way.build(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU) for way in ways_of(cls)]
    assert [type(pipeline) for pipeline in pipelines] == [first, first, last]
    assert pipelines[2].prealloc.enabled
    if first is last:
        assert not pipelines[1].prealloc.enabled


def test_options_go_to_all_and_prealloc_only_to_ours() -> None:
    section = {"_target_": SPARSE_DIST, "execute_all_batches": False, "prealloc": {"direct_bytes": 77}}
    pipelines = built(section)
    assert [pipeline._execute_all_batches for pipeline in pipelines] == [False] * 3
    assert pipelines[2].prealloc.direct_bytes == 77


@pytest.mark.parametrize("target", OURS.values())
def test_ways_bear_the_names_of_the_first_benchmark(target: str) -> None:
    assert [way.name for way in three_ways({"_target_": target})] == [BLOCKING, NON_BLOCKING, PREALLOCATED]


def test_blocking_copy_moves_batches_before_the_pipeline_sees_them() -> None:
    moves = []

    class Batch:
        def to(self, device: torch.device, non_blocking: bool = False) -> str:
            moves.append((device, non_blocking))
            return "moved"

    blocking, non_blocking, preallocated = three_ways({"_target_": SPARSE_DIST})
    batch: Any = Batch()
    assert list(non_blocking.feed(iter([batch]), CPU)) == [batch]
    assert list(preallocated.feed(iter([batch]), CPU)) == [batch]
    assert moves == []
    assert list(blocking.feed(iter([batch]), CPU)) == ["moved"]
    assert moves == [(CPU, False)]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "pipeline._target_: missing"),
        ({"_target_": "torchrec.distributed.train_pipeline.TrainPipeline"}, "nothing to replace|no method of"),
        ({"_target_": "torchrec_prealloc.PreallocTrainPipelineNone"}, "has no PreallocTrainPipelineNone"),
        ({"_target_": SPARSE_DIST, "prealloc": {"direct_byte": 1}}, "prealloc.direct_byte: unknown option"),
    ],
)
def test_a_wrong_section_is_refused_at_once(section: dict[str, Any], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        three_ways(section)


def test_a_wrong_option_is_refused_when_the_first_pipeline_is_built() -> None:
    first, *_ = three_ways({"_target_": SPARSE_DIST, "execute_all": True})
    with pytest.raises(CommandError, match=r"pipeline\.execute_all: TrainPipelineSparseDist has no such option"):
        first.build(torch.nn.Linear(1, 1), None, CPU)


def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot be read"):
        read_section(tmp_path / "none.yaml")
