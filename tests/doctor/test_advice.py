"""Each thing that costs time is told, with its remedy, and what costs none is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_arrival import TENSORS, Computes, numbers, pinned
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor

from doctor.batches import LeavesOne, Opaque, Plain, jagged
from torchrec_prealloc import explain, pack
from torchrec_prealloc.doctor.advice import LOOKED_AT, Cost

MIB = 1 << 20

pytestmark = pytest.mark.filterwarnings("ignore")


def narrow() -> KeyedJaggedTensor:
    return jagged().pin_memory()


def int64_lengths() -> Any:
    lengths, offsets = pinned(torch.tensor([1, 2, 3])), pinned(torch.tensor([0, 1, 3, 6]))
    return [JaggedTensor(pinned(numbers(6)), lengths=lengths, offsets=offsets)]


BATCHES: dict[str, tuple[Callable[[], Any], Cost, int]] = {
    "class without pin_memory": (lambda: LeavesOne(numbers(2), numbers(3)), Cost.UNPINNABLE, 1),
    "unpinned": (lambda: [numbers(2), pinned(numbers(2)), torch.empty(0)], Cost.UNPINNED, 1),
    "many": (lambda: [pinned(numbers(4)) for _ in range(100)], Cost.MANY_TENSORS, 100),
    "int64 lengths": (int64_lengths, Cost.INT64_LENGTHS, 2),
    "int64 values": (lambda: {"ids": pinned(torch.arange(1000))}, Cost.INT64_VALUES, 1),
    "gaps": (lambda: [pinned(numbers(8, 8))[:, ::2]], Cost.NOT_DENSE, 1),
    "grad": (lambda: [pinned(numbers(2)), numbers(2).requires_grad_()], Cost.REQUIRES_GRAD, 1),
    "subclass": (lambda: [pinned(numbers(2)), TENSORS["subclass"]()], Cost.OWN_TENSOR, 1),
    "conjugate": (lambda: [pinned(numbers(2)), TENSORS["conjugate view"]()], Cost.OWN_TENSOR, 1),
    "computes": (lambda: [Computes(pinned(numbers(2)))], Cost.OWN_TO, 0),
    "opaque": (lambda: [Opaque(pinned(numbers(2)))], Cost.OPAQUE, 0),
    "part of a storage": (lambda: [pinned(numbers(MIB))[5:7]], Cost.UNUSED_STORAGE, 1),
    "not understood": (lambda: [pinned(numbers(2)), Plain(numbers(3))], Cost.NOT_UNDERSTOOD, 0),
}


@pytest.mark.parametrize("name", BATCHES)
def test_what_costs_time_is_told(name: str, simulated_accelerator: torch.device) -> None:
    make, cost, leaves = BATCHES[name]
    found = explain(make(), simulated_accelerator)
    (advice,) = (one for one in found.advice if one.cost is cost)
    assert advice.leaves == leaves
    assert f"  - {advice.text} -> {advice.remedy}" in str(found)
    others = {one.cost for one in found.advice} - {cost}
    assert others <= {Cost.UNPINNABLE} if cost in (Cost.OWN_TO, Cost.OPAQUE) else not others


def test_a_batch_that_costs_nothing_has_no_advice(simulated_accelerator: torch.device) -> None:
    kjt = narrow()
    kjt._values = pinned(torch.full((2600,), 1 << 40))
    found = explain({"x": pinned(numbers(10)), "k": kjt}, simulated_accelerator)
    assert found.advice == ()
    assert "What costs time: nothing that is known." in str(found)


@pytest.mark.parametrize("name", ["sparse COO", "sparse CSR", "nested, jagged", "nested, strided", "quantized"])
def test_tensors_of_several_parts_are_told(name: str) -> None:
    (advice,) = (one for one in explain([TENSORS[name]()], "xpu").advice if one.cost is Cost.OWN_TENSOR)
    assert "moved by its own `to` on the main stream, not overlapped" in advice.text


def test_tensors_on_another_device_are_told(simulated_accelerator: torch.device) -> None:
    there = numbers(3).to(simulated_accelerator)
    (advice,) = explain([pinned(numbers(2)), there], "xpu").advice
    assert (advice.cost, advice.leaves) == (Cost.OTHER_DEVICE, 1)
    assert explain([pinned(numbers(2)), there], simulated_accelerator).advice == ()


def test_values_are_looked_at_up_to_a_number_and_the_largest_is_told(simulated_accelerator: torch.device) -> None:
    ids = torch.zeros(1000, dtype=torch.int64)
    ids[7], ids[8] = 41_999, -50_000
    (advice,) = explain(pinned(ids), simulated_accelerator).advice
    assert "none beyond 50,000 in this batch" in advice.text
    ids[9] = 1 << 31
    assert explain(pinned(ids), simulated_accelerator).advice == ()
    long = torch.zeros(LOOKED_AT + 10, dtype=torch.int64)
    long[-1] = 1 << 40
    (advice,) = explain(pinned(long), simulated_accelerator).advice
    assert f"in the first {LOOKED_AT:,} of this batch" in advice.text


def test_nothing_is_said_of_what_a_packed_batch_is_made_of(simulated_accelerator: torch.device) -> None:
    batch = {"ids": [torch.zeros(100, dtype=torch.int64) for _ in range(200)]}
    assert explain(pack(batch).pin_memory(), simulated_accelerator).advice == ()


def test_pinning_is_no_matter_on_a_cpu() -> None:
    assert explain([numbers(3)], "cpu").advice == ()


def test_without_an_accelerator_only_a_class_that_cannot_be_pinned_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert explain([numbers(3)]).advice == ()
    (advice,) = explain(LeavesOne(numbers(2), 3)).advice
    assert advice.cost is Cost.UNPINNABLE
    assert "give LeavesOne a pin_memory()" in advice.remedy
    assert explain(LeavesOne(numbers(2), 3), pinned=True).advice == (dataclasses.replace(advice, leaves=0, nbytes=0),)
    assert explain([numbers(3)], pinned=True).advice == ()


class Pinnable(LeavesOne):
    """Can be pinned."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Pinnable:
        return Pinnable(self.moved.to(device, non_blocking=non_blocking), self.left)

    def pin_memory(self) -> Pinnable:
        return Pinnable(self.moved.pin_memory(), self.left)


def test_a_class_that_can_be_pinned_is_not_blamed(simulated_accelerator: torch.device) -> None:
    (advice,) = explain(Pinnable(numbers(2), None), simulated_accelerator).advice
    assert advice.cost is Cost.UNPINNED
    assert advice.remedy == "DataLoader(pin_memory=True)"
    assert explain(Pinnable(numbers(2), None).pin_memory(), simulated_accelerator).advice == ()


def test_costs_can_be_left_out(simulated_accelerator: torch.device) -> None:
    tensor: Tensor = numbers(2)
    assert explain(tensor, simulated_accelerator).without({Cost.UNPINNED}).advice == ()
