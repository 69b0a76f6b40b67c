"""The process group of the demo: one process started plainly, or what torchrun started."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@contextlib.contextmanager
def process_group() -> Iterator[torch.device]:
    """Set up the default process group, give this rank's device, and take the group down again.

    NCCL on a GPU (one each rank of a machine), gloo on a CPU. Without torchrun the group has one rank, which meets
    itself in memory and needs no port. Several ranks on CPUs end here, when the block has ended well.
    """
    device = _device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
        if dist.get_world_size() > 1 and backend == "gloo":
            _leave()
    finally:
        dist.destroy_process_group()


def _leave() -> None:
    """End this rank's process with success, once all ranks are done.

    gloo's threads abort some processes on their way out ("terminate called without an active exception"), with
    TorchRec's pipelines alone as well.
    """
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


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
