"""What is counted is what a device would be asked to do."""

from __future__ import annotations

import pytest
import torch
from torchrec.datasets.utils import Batch
from torchrec.distributed.test_utils.model_input import ModelInput
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_prealloc.bench.counting import OperationCounts, count_operations, count_to

CPU = torch.device("cpu")
META = torch.device("meta")


def jagged(weights: torch.Tensor | None = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b"], values=torch.arange(6), lengths=torch.tensor([1, 2, 1, 2]), weights=weights
    )


def model_input(dummies: int = 0) -> ModelInput:
    return ModelInput(
        float_features=torch.rand(2, 4),
        idlist_features=jagged(),
        idscore_features=jagged(torch.rand(6)),
        label=torch.rand(2),
        dummy=[torch.rand(3) for _ in range(dummies)],
    )


@pytest.mark.parametrize("device", [CPU, META], ids=str)
def test_one_copy_and_one_allocation_for_each_tensor_of_torchrecs_own_batch(device: torch.device) -> None:
    # float_features, label, values and lengths of both, weights of one
    assert count_to(model_input(), device) == OperationCounts(7, 7)
    assert count_to(model_input(dummies=10), device) == OperationCounts(17, 17)


def test_the_demos_batch_has_four_tensors() -> None:
    batch = Batch(dense_features=torch.rand(2, 3), sparse_features=jagged(), labels=torch.rand(2))
    assert count_to(batch, CPU) == OperationCounts(4, 4)
    assert count_to(batch, CPU, non_blocking=False) == OperationCounts(4, 4)


def test_in_place_copies_count_like_the_others() -> None:
    source = torch.rand(8)
    for device in (CPU, META):
        with count_operations(device) as counts:
            target = torch.empty_like(source, device=device)
            target.copy_(source)
        assert counts == OperationCounts(1, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(4),
        lambda: torch.empty_strided((4,), (1,)),
        lambda: torch.rand(4).new_empty(4),
    ],
)
def test_each_kind_of_allocation_counts(make: object) -> None:
    with count_operations(CPU) as counts:
        make()  # type: ignore[operator]
    assert counts.allocations >= 1


@pytest.mark.parametrize(
    "move",
    [
        lambda tensor: tensor.to("cpu"),
        lambda tensor: tensor.to(CPU, non_blocking=True),
        lambda tensor: tensor.to(device=CPU),
        lambda tensor: tensor.to(CPU, torch.float64),
        lambda tensor: tensor.to(torch.zeros(1)),
    ],
)
def test_every_spelling_of_to_counts_on_a_cpu(move: object) -> None:
    tensor = torch.rand(4)
    with count_operations(CPU) as counts:
        move(tensor)  # type: ignore[operator]
    assert counts == OperationCounts(1, 1)


def test_a_change_of_dtype_alone_moves_nothing_to_another_device() -> None:
    with count_operations(META) as counts:
        torch.rand(4).to(torch.float64)
    assert counts == OperationCounts(0, 0)


def test_a_change_of_dtype_on_the_device_allocates_but_moves_nothing_to_it() -> None:
    there = torch.rand(4, device=META)
    with count_operations(META) as counts:
        there.to(torch.float64)
    assert counts == OperationCounts(copies=0, allocations=1)


def test_what_is_there_already_is_not_copied_again() -> None:
    there = torch.rand(4, device=META)
    assert count_to(there, META) == OperationCounts(0, 0)


def test_empty_tensors_count_for_nothing() -> None:
    assert count_to(torch.empty(0), CPU) == OperationCounts(0, 0)


def test_outside_the_block_to_is_as_ever() -> None:
    tensor = torch.rand(4)
    with count_operations(CPU) as counts:
        assert tensor.to(CPU) is not tensor
    assert tensor.to(CPU) is tensor
    assert counts == OperationCounts(1, 1)
