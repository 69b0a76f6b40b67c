"""Operators give on the simulated device what they give on the CPU, and leave the CPU alone."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable

import fbgemm_gpu  # noqa: F401  registers the operators
import pytest
import torch
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from torchrec_prealloc import simulator

A = torch.arange(12.0).reshape(3, 4) - 5
OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda a: a + 1.5,
    "cpu scalar operand": lambda a: a * torch.tensor(2.0),
    "matmul": lambda a: a @ a.t(),
    "sum": lambda a: a.sum(1),
    "sort": lambda a: a.sort(descending=True)[0],
    "unique": lambda a: torch.unique(a > 0),
    "nonzero": lambda a: (a > 2).nonzero(),
    "boolean index": lambda a: a[a > 2],
    "index": lambda a: a[torch.tensor([2, 0], device=a.device)],
    "cat and split": lambda a: torch.cat(torch.split(a, [1, 2])),
    "views": lambda a: a.t()[1:].unflatten(1, (3, 1)).squeeze(-1),
    "out": lambda a: torch.add(a, a, out=torch.empty(0, device=a.device)),
    "out, strided": lambda a: torch.add(a, a, out=torch.empty(4, 3, device=a.device).t()),
    "in place through a view": lambda a: (b := a.clone(), b[1].add_(1))[0],
    "foreach": lambda a: torch.stack(torch._foreach_add([a, a], 1)),
    "complex": lambda a: torch.view_as_real(torch.fft.fft(a)),
    "bfloat16": lambda a: a.bfloat16() @ a.bfloat16().t(),
    "cast by copy": lambda a: torch.empty(3, 4, dtype=torch.int32, device=a.device).copy_(a),
    "broadcast by copy": lambda a: torch.empty(2, 3, 4, device=a.device).copy_(a),
    "transposed copy": lambda a: torch.empty(4, 3, device=a.device).t().copy_(a),
    "set_": lambda a: torch.empty(0, device=a.device).set_(a.untyped_storage(), 4, (2, 2), (2, 1)),
    "embedding_bag": lambda a: torch.nn.functional.embedding_bag(torch.tensor([[0, 2]], device=a.device), a),
    "deepcopy": copy.deepcopy,
    "cumsum of FBGEMM": lambda a: torch.ops.fbgemm.asynchronous_complete_cumsum(a[0].long()),
}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
@pytest.mark.parametrize("schedule", ["lazy", "random"])
def test_the_same_bits_as_on_the_cpu(
    device: torch.device, schedule: simulator.Schedule, operator: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    expected = operator(A.clone())
    with simulator.checked(schedule):
        result = operator(A.to(device))
        assert result.device == device
        assert torch.equal(result.cpu(), expected)


def test_gradients_the_second_too(device: torch.device) -> None:
    def second(target: torch.device) -> torch.Tensor:
        x = A.clone().to(target).requires_grad_()
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (result,) = torch.autograd.grad(first.sum(), x)
        return result.cpu()

    with simulator.checked():
        assert torch.equal(second(device), second(torch.device("cpu")))


def test_operators_that_build_their_own_graph_on_the_cpu(device: torch.device) -> None:
    def gradient(target: torch.device) -> torch.Tensor:
        values = torch.ones(5, 2, device=target, requires_grad=True)
        offsets = torch.tensor([0, 2, 5], device=target)
        torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [3]).pow(2).sum().backward()
        assert values.grad is not None
        return values.grad.cpu()

    with simulator.checked():
        assert torch.equal(gradient(device), gradient(torch.device("cpu")))


def test_random_numbers_are_the_cpus(device: torch.device) -> None:
    torch.manual_seed(3)
    expected = torch.randn(5), torch.dropout(torch.ones(20), 0.5, True)
    torch.manual_seed(3)
    result = torch.randn(5, device=device), torch.dropout(torch.ones(20, device=device), 0.5, True)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(result, expected, strict=True))


def test_saving_and_loading(device: torch.device) -> None:
    file = io.BytesIO()
    torch.save(A.to(device), file)
    file.seek(0)
    assert torch.load(file).device == device
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="cpu"), A)


def test_a_jagged_tensor(device: torch.device) -> None:
    def permuted(target: torch.device) -> list[int]:
        lengths = torch.tensor([1, 2, 0, 3], device=target)
        jagged = KeyedJaggedTensor(["a", "b"], torch.arange(6, device=target), lengths=lengths)
        values: list[int] = jagged.permute([1, 0]).values().tolist()
        return values

    with simulator.checked():
        assert permuted(device) == permuted(torch.device("cpu"))


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_pins_its_batches(device: torch.device, workers: int) -> None:
    loader = DataLoader(list(torch.arange(8.0)), batch_size=4, num_workers=workers, pin_memory=True)  # type: ignore[arg-type]
    with simulator.checked():
        batches = list(loader)
        assert all(batch.is_pinned() for batch in batches)
        assert sum(batch.to(device, non_blocking=True).sum().item() for batch in batches) == 28


def test_what_goes_to_the_host_without_blocking_is_pinned(device: torch.device) -> None:
    result = A.to(device).to("cpu", non_blocking=True)
    assert result.is_pinned()


def test_mixed_devices_are_refused(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        A.to(device) + A


CPU_ONLY = """
import sys, torch
if "load" in sys.argv:
    torch.accelerator.is_available()  # PyTorch has looked for accelerators already, and found none
    torch.manual_seed(7)
    from torchrec_prealloc import simulator
    assert torch.mtia.device_count() == 0  # importing alone changes nothing
    simulator.device()
    assert torch.accelerator.is_available() and torch.mtia.is_available()
    assert torch.ones(3, device="mtia").sum().item() == 3
else:
    torch.manual_seed(7)
torch.set_num_threads(1)
print(torch.rand(3).tolist(), torch.initial_seed())
torch.manual_seed(8)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5):
    optimizer.zero_grad()
    loss = model(torch.rand(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
print(loss.item(), torch.rand(2).tolist(), torch.rand(3).is_pinned())
"""


def test_cpu_programs_are_not_disturbed(simulated_accelerator: torch.device, environment: dict[str, str]) -> None:
    def output(*arguments: str) -> str:
        command = [sys.executable, "-W", "ignore", "-c", CPU_ONLY, *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    assert output("load") == output()
