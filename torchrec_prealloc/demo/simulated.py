"""What the three ways hold of a device's memory, on the simulator, for a demo without a GPU.

The demo's own model and batches are trained for some steps by its own pipelines. That happens in a process of its own:
the simulator has to be there before a process' first backward pass, and the demo's ranks, whose steps are timed, should
not know of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torchrec_prealloc import simulator
from torchrec_prealloc.estimation.footprint import Footprint

STEPS = 20

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL")


@dataclasses.dataclass(frozen=True)
class Simulated:
    """By the ways' names what they hold, the model included; or why that is not known, in one line."""

    ways: Mapping[str, Footprint] = dataclasses.field(default_factory=dict)
    problem: str = ""


def simulate(section: Mapping[str, Any], batch_size: int, seed: int, say: Callable[[str], object]) -> Simulated:
    """Run the three ways on one simulated device.

    Args:
        section: of the demo's config, which names the pipeline.
        batch_size, seed: the demo's.
        say: gets one line where the simulator has to be built first.
    """
    usable, reason = simulator.available()
    if not usable:
        return Simulated(problem=reason)
    if not simulator.built():
        say("building the simulator (once; about half a minute) ...")
    task = json.dumps({"section": section, "batch_size": batch_size, "seed": seed})
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=task,
        env={name: value for name, value in os.environ.items() if not name.startswith(_OF_TORCHRUN)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode != 0:
        return Simulated(problem=lines[-1] if lines else f"its process ended with {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Simulated({name: Footprint(**figures) for name, figures in found.items()})


def _main() -> None:
    """Read a task from standard input, and write the peaks to standard output."""
    from torchrec_prealloc import third_parties

    third_parties.silence()
    task = json.load(sys.stdin)

    import torch

    from torchrec_prealloc.demo.batches import TrainBatches
    from torchrec_prealloc.demo.model import build_model
    from torchrec_prealloc.demo.movielens import read_movielens
    from torchrec_prealloc.demo.samples import DENSE_FEATURES, make_samples
    from torchrec_prealloc.estimation.estimate import run_way, simulated_device
    from torchrec_prealloc.estimation.footprint import one_rank
    from torchrec_prealloc.ways import three_ways

    torch.set_num_threads(1)
    device = simulated_device()
    samples = make_samples(read_movielens())

    def model(device: torch.device) -> Any:
        return build_model(samples.vocabulary, len(DENSE_FEATURES), device, task["seed"])

    with one_rank():
        found = {}
        for way in three_ways(task["section"]):
            batches = TrainBatches(samples, task["batch_size"], STEPS, task["seed"], pin=True)
            found[way.name] = run_way(way, model, iter(batches), device, STEPS, count_model=True)
    print(json.dumps({name: dataclasses.asdict(one) for name, one in found.items()}))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort some processes on their way out


if __name__ == "__main__":
    _main()
