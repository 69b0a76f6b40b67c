"""Run by test_distributed.py under torchrun: every pipeline class with two ranks, TorchRec's and ours."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from kinds import KINDS, Kind, of_batches

from torchrec_prealloc import simulator


def compare(name: str, kind: Kind, device: torch.device, steps: int, schedules: list[str]) -> None:
    for schedule in schedules:
        expected, theirs = run(kind, kind.theirs(), device, steps, schedule)
        seen, ours = run(kind, kind.ours(), device, steps, schedule)
        assert len(set(expected)) == steps, (name, expected)
        assert seen == expected, (name, schedule, seen, expected)
        reports = of_batches(ours) if theirs else ours  # what TorchRec does of itself, it does in ours too
        assert not reports, (name, schedule, reports)


def run(kind: Kind, cls: Any, device: torch.device, steps: int, schedule: str) -> tuple[list[Any], Sequence[Any]]:
    """Outputs, and reports of the simulator."""
    if device.type == "cpu":
        return kind.run(cls, device, steps), ()
    with simulator.checked(schedule, 3, raise_on_report=False) as checked:  # type: ignore[arg-type]
        outputs = kind.run(cls, device, steps)
    return outputs, checked.reports


def main(kind_of_device: str, steps: str, *schedules: str) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    device = torch.device("cpu")
    if kind_of_device == "simulated":
        device = simulator.device(int(os.environ["LOCAL_RANK"]))
        torch.get_device_module(device).set_device(device)
    dist.init_process_group("gloo")
    compared = []
    for name, kind in KINDS.items():
        if kind.lacking() is None and not (device.type == "cpu" and kind.on_cpu):
            compare(name, kind, device, int(steps), list(schedules) or [""])
            compared.append(name)
    dist.barrier()
    if dist.get_rank() == 0:  # alone: lines of two processes may be mixed
        print(f"equal: {' '.join(compared)}", flush=True)
    os._exit(0)  # gloo's threads abort some processes on their way out


if __name__ == "__main__":
    main(*sys.argv[1:])
