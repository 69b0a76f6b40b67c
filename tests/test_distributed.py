"""Several ranks with gloo, started by torchrun: losses equal TorchRec's own, and no rank races."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kinds import KINDS

HERE = Path(__file__).parent


def torchrun(ranks: int, *script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE), str(HERE.parent)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
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


# Every pipeline --------------------------------------------------------------------------------------------------


def compared(device: str, steps: int, *schedules: str) -> set[str]:
    """The kinds of pipelines whose losses were equal in two ranks."""
    finished = torchrun(2, str(HERE / "pipeline_ranks.py"), device, str(steps), *schedules)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (line,) = (line for line in finished.stdout.splitlines() if line.startswith("equal: "))
    return set(line.split()[1:])


@pytest.mark.parametrize("steps", [8, pytest.param(20, marks=pytest.mark.long)])
def test_every_pipeline_with_two_ranks_on_the_cpu(steps: int) -> None:
    expected = {name for name, kind in KINDS.items() if kind.lacking() is None and not kind.on_cpu}
    assert compared("cpu", steps) == expected


@pytest.mark.parametrize(
    ("steps", "schedules"),
    [(8, ("random",)), pytest.param(20, ("lazy", "eager", "random"), marks=pytest.mark.long)],
)
@pytest.mark.usefixtures("simulated_accelerator")
def test_every_pipeline_with_two_ranks_on_the_simulator(steps: int, schedules: tuple[str, ...]) -> None:
    expected = {name for name, kind in KINDS.items() if kind.lacking() is None}
    assert compared("simulated", steps, *schedules) == expected
