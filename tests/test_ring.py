"""Kept device memory: used again only when nobody has it, bounded, and rebuilt where it was freed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from recsys import FREES_EARLY, losses, make_batches, pinned, sharded, unsharded
from torch import Tensor

from torchrec_prealloc import PreallocConfig, PreallocTrainPipelineBase, PreallocTrainPipelineSparseDist
from torchrec_prealloc.ring import Ring
from torchrec_prealloc.transfer import TransferEngine

CPU = torch.device("cpu")
RING = PreallocConfig(buffers="ring")
MIB = 1 << 20


def ring(slots: int = 3) -> Ring:
    return Ring(CPU, divisions=8, slots=slots, record=lambda owner: "event")


def test_memory_is_used_again_at_the_same_address_once_nobody_refers_to_it() -> None:
    kept = ring()
    base, free = kept.take(1000, None)
    assert free is None
    address = base.data_ptr()
    view = base[10:20].view(torch.int16)
    del base
    kept.next_batch()
    other, _ = kept.take(1000, None)
    assert other.data_ptr() != address
    del view
    kept.next_batch()
    again, free = kept.take(990, None)
    assert again.data_ptr() == address
    assert free == "event"


def test_memory_of_one_stream_is_not_given_to_another() -> None:
    kept = ring()
    address = kept.take(1000, "one")[0].data_ptr()
    kept.next_batch()
    assert kept.take(1000, "another")[0].data_ptr() != address


def test_memory_whose_storage_was_freed_is_not_handed_out() -> None:
    kept = ring()
    base, _ = kept.take(1000, None)
    base.untyped_storage().resize_(0)
    del base
    kept.next_batch()
    assert kept.take(1000, None)[0].untyped_storage().nbytes() >= 1000
    assert kept.kept_bytes < 2000


def test_tensors_that_are_held_are_skipped_counted_and_reported_once() -> None:
    kept = ring(slots=2)
    held = []
    for _ in range(2):
        held.append(kept.take(1000, None)[0])
        kept.next_batch()
    with pytest.warns(UserWarning, match=r"kept for 2 batches is all in use.*prealloc\.ring_slots"):
        held.append(kept.take(1000, None)[0])
    kept.next_batch()
    held.append(kept.take(1000, None)[0])
    assert kept.skipped == 2
    assert len({base.data_ptr() for base in held}) == 4


def test_growing_batches_replace_what_is_kept() -> None:
    kept = ring(slots=2)
    for size in range(1000, 200_000, 1000):
        kept.take(size, None)
        kept.next_batch()
    assert kept.skipped == 0
    assert kept.kept_bytes <= 2 * 200_000 * 9 // 8


@pytest.mark.parametrize(
    ("cls", "make"), [(PreallocTrainPipelineBase, unsharded), (PreallocTrainPipelineSparseDist, sharded)]
)
@pytest.mark.parametrize("early", [False, True], ids=["", "freed early"])
def test_losses_are_those_of_memory_per_batch(
    cls: Any, make: Any, early: bool, device: torch.device, one_rank: None
) -> None:
    if early and cls is PreallocTrainPipelineBase:
        pytest.skip("TrainPipelineBase frees nothing early")
    if early and not FREES_EARLY:
        pytest.skip("this TorchRec frees nothing early")
    options = {"free_features_storage_early": True} if early else {}
    found = []
    for config in (None, RING):
        model, optimizer = make(device)
        batches = make_batches(12, wobble=True)
        ready = batches if device == CPU else pinned(batches)
        found.append(losses(cls(model, optimizer, device, prealloc=config, **options), ready))
    assert found[0] == found[1]


def test_after_the_first_batches_nothing_is_allocated(device: torch.device) -> None:
    engine = TransferEngine(device, config=RING)
    for step in range(30):
        batch = engine.start([torch.full((100,), float(step)), torch.zeros(MIB)]).wait()
        assert float(batch[0][3]) == step
        del batch
    assert engine.stats.allocations <= 4
    assert 4 * MIB < engine.stats.ring_bytes <= 9 * MIB
    assert engine.stats.ring_skipped == 0
    assert engine.stats.batches == 30


def test_a_tensor_that_is_kept_keeps_its_values(device: torch.device) -> None:
    engine = TransferEngine(device, config=RING)
    kept: list[Tensor] = []
    warnings.simplefilter("ignore")  # what is skipped is reported; that is proven above
    for step in range(20):
        kept.append(engine.start([torch.full((100,), float(step))]).wait()[0].detach())
    assert [float(tensor[9]) for tensor in kept] == list(range(20))


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random"])
def test_pipelines_do_not_race(schedule: Any, simulated_accelerator: torch.device, one_rank: None) -> None:
    from torchrec_prealloc import simulator

    expected = losses(PreallocTrainPipelineSparseDist(*sharded(CPU), CPU), make_batches(12, wobble=True))
    with simulator.checked(schedule=schedule, seed=3):
        model, optimizer = sharded(simulated_accelerator)
        pipeline = PreallocTrainPipelineSparseDist(model, optimizer, simulated_accelerator, prealloc=RING)
        iterator = iter(pinned(make_batches(12, wobble=True)))
        # The loss alone is kept: kept labels would keep the memory.
        assert [float(loss) for loss in [pipeline.progress(iterator)[0] for _ in range(12)]] == expected
    assert pipeline.transfer_stats.allocations < 12
