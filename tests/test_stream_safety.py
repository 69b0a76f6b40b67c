"""Our pipelines under the race checker: every schedule, many seeds, every kind of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recsys import losses, make_batches, outputs, pinned, sharded, unsharded

from torchrec_prealloc import PreallocTrainPipelineBase, PreallocTrainPipelineSparseDist

STEPS = 8
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "base": (PreallocTrainPipelineBase, unsharded, {}),
    "base, ring": (PreallocTrainPipelineBase, unsharded, {"prealloc": {"buffers": "ring"}}),
    "base, all direct": (PreallocTrainPipelineBase, unsharded, {"prealloc": {"direct_bytes": 64}}),
    "sparse_dist": (PreallocTrainPipelineSparseDist, sharded, {}),
    "sparse_dist, ring": (PreallocTrainPipelineSparseDist, sharded, {"prealloc": {"buffers": "ring"}}),
    "sparse_dist, freed early": (PreallocTrainPipelineSparseDist, sharded, {"free_features_storage_early": True}),
    "sparse_dist, pieces": (PreallocTrainPipelineSparseDist, sharded, {"prealloc": {"chunk_bytes": 256}}),
    "sparse_dist, unpinned": (PreallocTrainPipelineSparseDist, sharded, {}),
}


def check(kind: str, device: torch.device, schedules: list[tuple[Any, int]]) -> None:
    """Losses as on the CPU and no report, under each schedule and seed."""
    from torchrec_prealloc import simulator

    cls, make, options = KINDS[kind]
    batches = make_batches(STEPS, wobble=True)
    expected = losses(cls(*make(torch.device("cpu")), torch.device("cpu"), **options), batches)
    ready = batches if "unpinned" in kind else pinned(batches)
    for schedule, seed in schedules:
        model, optimizer = make(device)
        with simulator.checked(schedule=schedule, seed=seed):
            seen = outputs(cls(model, optimizer, device, **options), ready)
        assert [float(loss) for loss, _ in seen] == expected, (schedule, seed)


@pytest.mark.filterwarnings("ignore:.*not in pinned memory", "ignore:.*ring_slots")
@pytest.mark.parametrize("kind", KINDS)
def test_no_schedule_and_none_of_many_seeds_shows_a_race(
    kind: str, simulated_accelerator: torch.device, one_rank: None
) -> None:
    check(kind, simulated_accelerator, [("lazy", 0), ("eager", 0), *(("random", seed) for seed in range(25))])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*not in pinned memory", "ignore:.*ring_slots")
@pytest.mark.parametrize("kind", KINDS)
def test_none_of_thousands_of_seeds_shows_a_race(
    kind: str, simulated_accelerator: torch.device, one_rank: None
) -> None:
    check(kind, simulated_accelerator, [("random", seed) for seed in range(1000, 1625)])
