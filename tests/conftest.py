"""What the tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["cpu", "simulated", "gpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each kind of device: the CPU, the simulator where it can be built, a GPU where there is one."""
    return make_device(request.param)


def make_device(kind: str) -> torch.device:
    if kind == "simulated":
        from torchrec_prealloc.simulator.testing import require_simulator

        require_simulator()
        from torchrec_prealloc import simulator

        return simulator.device()
    if kind == "gpu":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return torch.device("cuda")
    return torch.device("cpu")
