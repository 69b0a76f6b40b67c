"""Run by test_distributed.py under torchrun: every pipeline class with two ranks, TorchRec's and ours."""

from __future__ import annotations

import logging
import os
import sys

import torch
import torch.distributed as dist
from kinds import KINDS, Kind, of_batches

from torchrec_prealloc import simulator, versions

STEPS = 8


def compare(name: str, kind: Kind, device: torch.device) -> None:
    theirs = kind.run(kind.theirs(), device, STEPS)
    if device.type == "cpu":
        seen = kind.run(kind.ours(), device, STEPS)
        assert seen == theirs, (name, seen, theirs)
        return
    for schedule in ("lazy", "random"):
        with simulator.checked(schedule, 3, raise_on_report=False) as run:  # type: ignore[arg-type]
            seen = kind.run(kind.ours(), device, STEPS)
        assert seen == theirs, (name, schedule, seen, theirs)
        reports = of_batches(run.reports)
        assert not reports, (name, schedule, reports)


def main(kind_of_device: str) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    device = torch.device("cpu")
    if kind_of_device == "simulated":
        device = simulator.device(int(os.environ["LOCAL_RANK"]))
        torch.get_device_module(device).set_device(device)
    dist.init_process_group("gloo")
    compared = []
    for name, kind in KINDS.items():
        runs = kind.cls in versions.available() and versions.at_least(kind.since, versions.installed_version())
        if runs and kind.cls != "EvalPipelineCPUSparse" and not (device.type == "cpu" and kind.on_cpu):
            compare(name, kind, device)
            compared.append(name)
    print(f"rank {dist.get_rank()}: equal in {len(compared)}: {' '.join(compared)}", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads abort some processes on their way out


if __name__ == "__main__":
    main(sys.argv[1])
