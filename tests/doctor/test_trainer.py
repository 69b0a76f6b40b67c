"""Each pipeline's first batch is explained, and stops its trainer, whatever thread it is copied in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kinds import KINDS

from torchrec_prealloc import launch
from torchrec_prealloc.doctor.trainer import TrainerStoppedError, Watch, _watched
from torchrec_prealloc.pipelines import PreallocPipeline

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def watch() -> Iterator[Watch]:
    watched = Watch(3, None, pinned=False)
    launch.enable()
    PreallocPipeline.engine_type = _watched(PreallocPipeline.engine_type, watched)
    yield watched
    launch.disable()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.ranks == 1])
def test_each_pipeline_is_stopped_and_its_batch_explained(
    name: str, watch: Watch, simulated_accelerator: torch.device
) -> None:
    kind = KINDS[name]
    cls = kind.ours()
    try:
        with pytest.raises(TrainerStoppedError):
            kind.run(cls, simulated_accelerator, 9)
    except RuntimeError as error:
        pytest.skip(f"{kind.cls} itself fails: {error}")
    assert watch.copied == 3
    assert watch.explanation is not None
    assert watch.trains_on == watch.explanation.device == simulated_accelerator
    assert watch.explanation.device_is_here
    assert all(leaf.pinned is not False for leaf in watch.explanation.leaves) or kind.dense_only
    assert str(watch).startswith(f"The trainer (on {simulated_accelerator}) was stopped after 3 batches. The first:")
