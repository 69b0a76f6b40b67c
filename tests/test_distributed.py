"""Several ranks with gloo, started by torchrun: losses equal TorchRec's own, and no rank races."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def torchrun(ranks: int, *script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{HERE.parent}"}
    return subprocess.run([*command, *script], capture_output=True, text=True, timeout=300, env=environment)


def train(kind: str, ranks: int) -> None:
    finished = torchrun(ranks, str(HERE / "train_ranks.py"), kind)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for rank in range(ranks):
        assert f"rank {rank}: equal losses" in finished.stdout


def test_two_ranks_on_the_cpu_give_equal_losses() -> None:
    train("cpu", 2)


@pytest.mark.usefixtures("simulated_accelerator")
def test_two_ranks_on_the_simulator_give_equal_losses_and_no_race() -> None:
    train("simulated", 2)
