"""What a `to` sees while its conversions are queued: the values that it would see without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from arrivals import CPU, assert_same, engine_for, race_free, reference
from torch import Tensor

from torchrec_prealloc import shipment
from torchrec_prealloc.batch_types import BatchError
from torchrec_prealloc.capture import Capture, runs_in
from torchrec_prealloc.transfer import TransferEngine

pytestmark = pytest.mark.filterwarnings("ignore:batch of class")


@pytest.fixture(autouse=True)
def _nothing_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipment, "_learned", {})


def batch_class(to: Callable[[Any, torch.device], dict[str, Any]]) -> type:
    """A class with fields of any names, whose `to` gives an object with the fields that `to` returns."""

    class Batch:
        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)

        def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
            return Batch(**to(self, device))

    return Batch


def check(to: Callable[[Any, torch.device], dict[str, Any]], device: torch.device, **fields: Any) -> Any:
    cls = batch_class(to)
    copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in fields.items()}
    engine = engine_for(device)
    with race_free(device):
        arrived = engine.start(cls(**fields)).wait()
        assert_same(arrived.__dict__, reference(cls(**copies), device).__dict__)
        engine.close()
    assert not engine._pending
    return engine


def values(count: int = 6) -> Tensor:
    return torch.arange(float(count))


TOS: dict[str, Callable[[Any, torch.device], dict[str, Any]]] = {
    "another dtype": lambda b, d: {"x": b.x.to(d, torch.float16), "y": b.y.to(d).to(torch.float64)},
    "a wider dtype": lambda b, d: {name: b.x[:100].to(d, torch.complex128) for name in "abc"},
    "a wider dtype, large": lambda b, d: {name: b.x.to(d, torch.complex128) for name in "abc"},
    "device and dtype by keyword": lambda b, d: {"x": b.x.to(device=d, dtype=torch.int32, non_blocking=True)},
    "to the device of a tensor": lambda b, d: {"x": b.x.to(b.y.to(d))},
    "arithmetic on a moved tensor": lambda b, d: {"x": b.x.to(d) * 2 + b.y.to(d)},
    "arithmetic on a view of a moved tensor": lambda b, d: {"x": b.x.to(d)[2:].t().contiguous() + 1},
    "in place on a moved tensor": lambda b, d: {"x": b.x.to(d).mul_(2), "y": b.y.to(d)},
    "in place on the host after it moved": lambda b, d: {"x": b.x.to(d), "z": b.x.mul_(2), "y": b.y.to(d)},
    "in place on a view of the host after it moved": lambda b, d: {"x": b.x.to(d), "z": b.x[1:].zero_()},
    "one tensor twice, one of them changed": lambda b, d: {"x": b.x.to(d).add_(1), "z": b.x.to(d)},
    "a number of a moved tensor": lambda b, d: {"x": b.x.to(d), "sum": float(b.x.to(d).sum()), "l": b.x.to(d).tolist()},
    "a branch on a moved tensor": lambda b, d: {"x": b.x.to(d) if bool((b.x.to(d) > 2).any()) else None},
    "an index on the device": lambda b, d: {"x": b.x.to(d)[(b.y.to(d) % 3).long()]},
    "moved and back": lambda b, d: {"x": b.x.to(d).cpu(), "y": b.y},
    "made on the device": lambda b, d: {"x": torch.ones(3, device=d) + b.x.to(d)[:3]},
    "contiguous first": lambda b, d: {"x": b.x[::2].to(d), "y": b.y.reshape(2, 3).t().to(d)},
    "memory format": lambda b, d: {"x": b.x[:4].reshape(1, 2, 2, 1).to(d, memory_format=torch.channels_last)},
    "left on the host": lambda b, d: {"x": b.x, "y": b.y.to(d)},
    "stacked": lambda b, d: {"x": torch.stack([b.x.to(d), b.y.to(d)]), "y": torch.cat([b.x.to(d), b.y.to(d)])},
    "as numpy on the host": lambda b, d: {"x": b.x.to(d), "n": float(b.x.numpy().sum())},
    "a gradient": lambda b, d: {"x": b.x.clone().requires_grad_().to(d).detach()},
}


@pytest.mark.parametrize("size", [6, 6000])
@pytest.mark.parametrize("name", TOS)
def test_a_to_sees_and_gives_what_it_would_without_the_engine(name: str, size: int, device: torch.device) -> None:
    y = values(size)[:6] if "reshape" in name or name == "contiguous first" else values(size)
    check(TOS[name], device, x=values(size) + 1, y=y)


def test_memory_that_is_read_without_an_operation_is_there_on_the_cpu() -> None:
    def to(batch: Any, device: torch.device) -> dict[str, Any]:
        x = batch.x.to(device)
        return {"x": x, "n": x.numpy().copy(), "l": batch.x.to(device).tolist(), "a": np.asarray(batch.x.to(device))}

    check(to, CPU, x=values())


def test_conversions_are_gathered_into_one_copy(device: torch.device) -> None:
    engine = check(
        lambda b, d: {name: b.__dict__[name].to(d, torch.float64) for name in b.__dict__},
        device,
        **{f"t{i}": values(4) for i in range(50)},
    )
    assert engine.stats.copies == engine.stats.allocations == 1


def test_memory_for_conversions_grows_with_the_batches_and_a_small_batch_takes_little(device: torch.device) -> None:
    def doubled(batch: Any, device: torch.device) -> dict[str, Any]:
        return {name: tensor.to(device, torch.float64) for name, tensor in batch.__dict__.items()}

    cls, engine, sizes = batch_class(doubled), TransferEngine(device), []
    for count in (1, 320, 320, 1):
        engine.stats.reset()
        arrived = engine.start(cls(**{f"t{i}": values(128) for i in range(count)})).wait()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in vars(arrived).values()}
        assert engine.stats.allocations == engine.stats.copies == len(storages)
        sizes.append(sorted(storages.values()))
    engine.close()
    # 320 KiB of which nothing is known, then with room for what was there before.
    assert sizes == [[64 << 10], [64 << 10, 128 << 10, 256 << 10], [320 << 10], [320 << 10]]


def test_arithmetic_costs_a_second_copy_and_no_more(device: torch.device) -> None:
    engine = check(
        lambda b, d: {"x": b.x.to(d) + b.y.to(d), "z": b.z.to(d).half()}, device, x=values(), y=values(), z=values()
    )
    assert engine.stats.copies == 2


def test_a_freed_tensor_is_refused_and_nothing_crashes(device: torch.device) -> None:
    freed = values()
    part = freed[2:3]
    freed.untyped_storage().resize_(0)
    engine = engine_for(device)
    cls = batch_class(lambda b, d: {"x": b.x.to(d)})
    for batch in (cls(x=freed), [freed], {"x": part}):
        with pytest.raises(BatchError, match=r"a Tensor of shape .* storage that has 0: its memory was freed"):
            engine.start(batch)
        assert not engine._pending
    assert_same(engine.start([values()]).wait(), [values().to(device)])
    engine.close()


def test_a_tensor_that_claims_more_than_its_storage_is_refused(device: torch.device) -> None:
    whole = torch.zeros(100)
    for lying in (whole[10:], whole[10:][::2], whole.reshape(10, 10).t()):
        whole.untyped_storage().resize_(400)
        kept = lying[:]
        whole.untyped_storage().resize_(80)
        with pytest.raises(BatchError, match="of a storage that has 80"):
            engine_for(device).start([kept])


def test_an_error_of_an_operation_is_told_from_another() -> None:
    def caught(failing: Callable[[], Any]) -> Exception:
        capture = Capture(CPU, lambda source, form: source, lambda reuse: None)
        with pytest.raises((RuntimeError, ValueError)) as error, capture:
            failing()
        return error.value

    assert runs_in(caught(lambda: torch.ones(2).view(5)), Capture)
    assert not runs_in(caught(lambda: int("x")), Capture)
