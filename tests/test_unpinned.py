"""Batches in memory that is not pinned are said once, with the reason."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from arrivals import CPU, assert_same, engine_for, race_free
from torchrec import KeyedJaggedTensor

from torchrec_prealloc import unpinned


@pytest.fixture(autouse=True)
def _nothing_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpinned, "_checked", {})


@dataclasses.dataclass
class Unpinnable:
    """A batch class that a DataLoader cannot pin."""

    x: Any
    y: Any = None


class OnlyTo:
    """Another, with its own `to`."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device, non_blocking: bool = False) -> OnlyTo:
        return OnlyTo(self.x.to(device, non_blocking=non_blocking))


def said(batches: list[Any], device: torch.device) -> list[str]:
    engine = engine_for(device)
    with warnings.catch_warnings(record=True) as caught, race_free(device):
        warnings.simplefilter("always")
        for batch in batches:
            engine.start(batch).wait()
        engine.close()
    return [str(warning.message) for warning in caught]


def test_it_is_said_once_with_count_bytes_and_reason(simulated_accelerator: torch.device) -> None:
    for make in (lambda: Unpinnable(torch.ones(4), [torch.ones(1000)]), lambda: OnlyTo(torch.ones(1004))):
        (message,) = said([make() for _ in range(5)], simulated_accelerator)
        name = type(make()).__name__
        count = "2 of 2" if name == "Unpinnable" else "1 of 1"
        assert message.startswith(f"batch of class {name}: {count} tensors (4016 bytes) are not in pinned memory")
        assert f"DataLoader(pin_memory=True) cannot pin class {name}: it has no pin_memory()" in message


def test_the_class_in_a_container_that_cannot_be_pinned_is_named(simulated_accelerator: torch.device) -> None:
    (message,) = said([{"a": [torch.ones(2)], "b": (Unpinnable(torch.ones(3)),)}], simulated_accelerator)
    assert message.startswith("batch of class dict: 2 of 2 tensors (20 bytes)")
    assert "cannot pin class Unpinnable" in message


def test_a_batch_that_could_be_pinned_is_told_how(simulated_accelerator: torch.device) -> None:
    kjt = KeyedJaggedTensor(["f"], torch.arange(3), lengths=torch.tensor([3]))
    host = {"a": torch.ones(2), "k": kjt, "s": "text", "e": torch.empty(0)}
    (message,) = said([host], simulated_accelerator)
    assert "3 of 3 tensors (40 bytes)" in message
    assert message.endswith("give the DataLoader pin_memory=True")


def test_pinned_batches_and_the_cpu_are_not_said(simulated_accelerator: torch.device) -> None:
    pinned = torch.ones(2000).pin_memory()
    assert said([{"a": pinned, "b": pinned[:3].clone().pin_memory(), "c": 1}, [pinned]], simulated_accelerator) == []
    assert said([{"a": torch.ones(3)}], CPU) == []


def test_only_the_first_batches_of_a_class_are_asked(
    simulated_accelerator: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    is_pinned = torch.Tensor.is_pinned

    def counting(tensor: torch.Tensor, *args: Any) -> bool:
        nonlocal asked
        asked += 1
        return is_pinned(tensor, *args)

    batch = [torch.ones(3).pin_memory() for _ in range(7)]
    monkeypatch.setattr(torch.Tensor, "is_pinned", counting)
    assert said([batch] * 10, simulated_accelerator) == []
    assert asked == 7 * unpinned.CHECKED


def test_large_unpinned_tensors_arrive_through_pinned_memory(simulated_accelerator: torch.device) -> None:
    host = [torch.arange(3000), torch.arange(3000.0)[::2]]
    engine = engine_for(simulated_accelerator)
    with race_free(simulated_accelerator):
        with pytest.warns(UserWarning, match="not in pinned memory"):
            transfer = engine.start(host)
        arrived = transfer.wait()  # by then the thread in the background has queued them too
        sources = engine._staging.reading
        assert sources
        assert all(source.is_pinned() for source in sources)
        assert_same(arrived, [tensor.to(simulated_accelerator) for tensor in host])
        engine.close()
