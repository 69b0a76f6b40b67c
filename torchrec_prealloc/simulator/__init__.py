"""An accelerator on CPU memory: streams, events, a caching allocator and a race checker, for tests without a GPU.

::

    from torchrec_prealloc import simulator

    device = simulator.device()
    with simulator.checked(schedule="random", seed=7):
        pipeline = TrainPipelineSparseDist(model.to(device), optimizer, device)
        ...  # a missing wait, record_stream or keep-alive raises RaceError here, with both Python stacks

The device has type ``mtia``, which every torch wheel knows and none has kernels for; TorchRec's pipelines run on it
as they run on CUDA. Operators run their CPU kernels. Importing this module does nothing; the first use builds
(about a minute, once; needs a C++ compiler) and registers the device, for the rest of the process.
"""

from __future__ import annotations

import torch

from torchrec_prealloc.simulator.build import BuildError, available, built, load
from torchrec_prealloc.simulator.checking import Access, Frame, RaceError, Report, Run, Schedule, checked
from torchrec_prealloc.simulator.memory import (
    PinnedStats,
    Stats,
    StreamStats,
    dump_snapshot,
    empty_cache,
    record_memory_history,
    reset_peak_stats,
    set_memory_limit,
    snapshot,
    stats,
)

__all__ = [
    "Access",
    "BuildError",
    "Frame",
    "PinnedStats",
    "RaceError",
    "Report",
    "Run",
    "Schedule",
    "Stats",
    "StreamStats",
    "available",
    "built",
    "checked",
    "device",
    "dump_snapshot",
    "empty_cache",
    "record_memory_history",
    "register_host",
    "reset_peak_stats",
    "set_device_count",
    "set_memory_limit",
    "snapshot",
    "stats",
    "unregister_host",
]


def device(index: int = 0) -> torch.device:
    """A simulated device. There are 8; its module is ``torch.get_device_module(device)``, that is ``torch.mtia``.

    Raises:
        BuildError: the simulator cannot be built or loaded here.
    """
    load()
    return torch.device("mtia", index)


def set_device_count(count: int) -> None:
    """How many simulated devices there are (1 to 64). Call it before anything uses them."""
    load().set_device_count(count)


def register_host(tensor: torch.Tensor) -> None:
    """Pins the memory of an existing CPU tensor, as ``cudaHostRegister`` does.

    Unlike memory that PyTorch pinned, nothing keeps it while a queued copy reads it: freeing or unregistering it
    then is reported as "host free".
    """
    load().register_host(tensor)


def unregister_host(tensor: torch.Tensor) -> None:
    """Undoes :func:`register_host`."""
    load().unregister_host(tensor)
