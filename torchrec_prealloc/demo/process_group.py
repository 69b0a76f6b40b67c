"""The process group of the demo: one process started plainly, or what torchrun started."""

import contextlib
import os
from collections.abc import Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@contextlib.contextmanager
def process_group() -> Iterator[torch.device]:
    """Set up the default process group, give this rank's device, and take the group down again.

    NCCL on a GPU (one each rank of a machine), gloo on a CPU. Without torchrun the group has one rank, which meets
    itself in memory and needs no port.
    """
    device = _device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def gather(value: T) -> list[T]:
    """`value` of every rank, in the order of the ranks, on every rank. Any picklable object."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return [value for value in values if value is not None]


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
