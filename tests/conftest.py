"""What the tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_stand_ins import backend, stand_in

pytest_plugins = ["torchrec_prealloc.simulator.testing"]


def pytest_collection_finish() -> None:
    """What the imports have made stays: the many collections of the tests need not look at it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _simulator_first() -> None:
    """Load the simulator, where it can be had, before the first backward pass: autograd counts devices only then."""
    from torchrec_prealloc import simulator

    if simulator.available()[0]:
        simulator.device()


@pytest.fixture(scope="session", autouse=True)
def _one_thread_an_operator() -> None:
    """Where pipelines compute in two threads, each would have a team of threads that spin while they wait."""
    torch.set_num_threads(1)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group(backend(on), init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def collected() -> None:
    """For tests that fork: pipelines hold process groups in cycles, and a child that collects one of gloo's joins
    threads which it has not, and hangs. For each test this would take minutes in all."""
    gc.collect()


@pytest.fixture(params=["cpu", "simulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each kind of device: the CPU, the simulator where it can be built, a GPU where there is one."""
    if request.param == "simulated":
        simulated: torch.device = request.getfixturevalue("simulated_accelerator")
        return simulated
    if request.param == "gpu":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        gpu = torch.device("cuda", 0)
        stand_in(gpu)
        return gpu
    return torch.device("cpu")
