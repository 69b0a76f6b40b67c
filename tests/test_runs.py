"""Runs of equal tensors: what is remembered of one batch must fit the next, or not be used."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchrec_prealloc.plain import is_plain, leaf
from torchrec_prealloc.runs import MIN_MEMBERS, Structure, structure_of
from torchrec_prealloc.transfer import TransferEngine

CPU = torch.device("cpu")
MIB = 1 << 20


def structure(tensors: list[Tensor]) -> Structure:
    leaves = [leaf(tensor, index) if is_plain(tensor) else None for index, tensor in enumerate(tensors)]
    return structure_of(leaves, tensors, MIB)


def rows(count: int = 8, width: int = 16, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.arange(width, dtype=dtype) + number for number in range(count)]


def test_tensors_of_one_form_are_a_run_wherever_they_stand() -> None:
    tensors = [torch.zeros(3), *rows(5), torch.zeros(7), *rows(4)]
    (run,) = structure(tensors).runs
    assert list(run.members) == [1, 2, 3, 4, 5, 7, 8, 9, 10]
    assert structure(tensors).singles == (0, 6)


def test_members_that_follow_one_another_are_a_range() -> None:
    (run,) = structure([torch.zeros(3), *rows(6)]).runs
    assert run.members == range(1, 7)


@pytest.mark.parametrize(
    "tensors",
    [
        rows(MIN_MEMBERS - 1),
        [torch.zeros(width) for width in range(1, 9)],
        list(torch.zeros(8, 16).unbind()),
        [torch.zeros(16).requires_grad_() for _ in range(8)],
        [torch.zeros(16, 2).t() for _ in range(8)],
        [torch.zeros(0) for _ in range(8)],
        [torch.zeros(MIB) for _ in range(4)],
        [torch.zeros(16).to_sparse() for _ in range(8)],
        [torch.zeros(16)] * 8,
    ],
    ids=["few", "other shapes", "one storage", "gradient", "transposed", "empty", "large", "sparse", "one tensor"],
)
def test_what_is_no_run(tensors: list[Tensor]) -> None:
    assert structure(tensors).runs == ()


# Each changes one thing in a batch of 8 equal tensors and one other.
CHANGES: dict[str, Callable[[list[Tensor]], None]] = {
    "another shape": lambda batch: batch.__setitem__(3, torch.zeros(9)),
    "another dtype of the same size": lambda batch: batch.__setitem__(3, torch.arange(16, dtype=torch.int32)),
    "another dtype": lambda batch: batch.__setitem__(3, torch.arange(16, dtype=torch.float64)),
    "a gradient": lambda batch: batch.__setitem__(3, torch.arange(16.0).requires_grad_()),
    "a view of more": lambda batch: batch.__setitem__(3, torch.arange(32.0)[::2]),
    "a view of another member": lambda batch: batch.__setitem__(3, batch[4].view(16)),
    "the same tensor twice": lambda batch: batch.__setitem__(3, batch[4]),
    "the other is a view of a member": lambda batch: batch.__setitem__(8, batch[4].view(4, 4)),
    "the other is a member": lambda batch: batch.__setitem__(8, batch[4]),
    "sparse": lambda batch: batch.__setitem__(3, torch.arange(16.0).to_sparse()),
    "all other shapes": lambda batch: batch.__setitem__(slice(0, 8), [torch.ones(2, 3) * n for n in range(8)]),
    "empty": lambda batch: batch.__setitem__(3, torch.zeros(0)),
    "a subclass": lambda batch: batch.__setitem__(3, torch.nn.Parameter(torch.arange(16.0), requires_grad=False)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_batch_that_differs_from_the_last_arrives_right(change: str, device: torch.device) -> None:
    if change == "sparse" and device.type == "mtia":
        pytest.skip("the simulator has no sparse tensors")
    engine = TransferEngine(device)
    for _ in range(2):
        engine.start([*rows(), torch.zeros(5)]).wait()
    batch = [*rows(), torch.zeros(5)]
    CHANGES[change](batch)
    arrived = engine.start(batch).wait()
    for host, moved in zip(batch, arrived, strict=True):
        assert (moved.dtype, moved.shape, moved.requires_grad) == (host.dtype, host.shape, host.requires_grad)
        assert moved.detach().cpu().to_dense().equal(host.detach().to_dense())
    shared = {key: [n for n, one in enumerate(batch) if one is batch[key]] for key in range(9)}
    for same in shared.values():
        assert len({id(arrived[n]) for n in same}) == 1


@pytest.mark.parametrize("width", [1, 3, 16, 17])
def test_members_start_aligned_and_do_not_touch(width: int, device: torch.device) -> None:
    arrived = TransferEngine(device).start(rows(9, width, torch.int16)).wait()
    addresses = sorted(tensor.data_ptr() for tensor in arrived)
    assert all(address % 64 == addresses[0] % 64 for address in addresses)
    assert min(b - a for a, b in itertools.pairwise(addresses)) >= 2 * width


def test_sizes_may_change_from_batch_to_batch_without_a_new_search(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransferEngine(CPU)
    engine.start(rows(8, 16)).wait()

    def searched(*args: object) -> None:
        raise AssertionError("a new search")

    monkeypatch.setattr("torchrec_prealloc.shipment.structure_of", searched)
    for width in (5, 64, 1):
        assert [t.tolist() for t in engine.start(rows(8, width)).wait()] == [t.tolist() for t in rows(8, width)]
