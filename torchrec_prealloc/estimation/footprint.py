"""What some steps hold of a device's memory, and on which streams: on the simulator, or on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchrec_prealloc import simulator
from torchrec_prealloc.bench.table import Column, Row

MIB = 1 << 20

COLUMNS = (
    Column("allocated", "peak allocated, MiB", better="low"),
    Column("reserved", "peak reserved, MiB", better="low"),
    Column("side", "of it side streams, MiB", better="low"),
    Column("batches", "peak reserved, in batches", digits=2, better="low"),
    Column("on", "measured on"),
)


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes beyond what was held before the first step.

    Attributes:
        allocated: most that tensors held at one time
        reserved: most that the caching allocator held at one time
        side: of `reserved`, what streams other than the default one hold: no other stream can use it
        on: "simulator" or "GPU"
    """

    allocated: int
    reserved: int
    side: int
    on: str

    def row(self, name: str, batch_bytes: int) -> Row:
        """One line of a table with `COLUMNS`; `batch_bytes` is the size of the largest batch."""
        figures = {
            "allocated": self.allocated / MIB,
            "reserved": self.reserved / MIB,
            "side": self.side / MIB,
            "batches": self.reserved / batch_bytes if batch_bytes else None,
            "on": self.on,
        }
        return Row(name, figures)


def footprint(
    step: Callable[[], Any], device: torch.device, steps: int, ahead: bool = True, strict: bool = False
) -> Footprint:
    """Run steps, and say what they held beyond what was reserved before.

    Small tensors may fit free room of segments that live tensors hold open, and then add nothing: a process that has
    used its side streams already may count up to 2 MiB too little for each of them.

    Args:
        step: one step; a StopIteration ends the run early.
        device: a simulated device, or a CUDA device; all of its streams are looked at.
        steps: how many.
        ahead: the host is one step ahead of the device, as it is of a busy GPU: memory that waits for a stream of
            `record_stream` comes back a step late. False: the host waits for each step.
        strict: on the simulator, raise `RaceError` where accesses are not ordered.
    """
    module: Any = torch.get_device_module(device)
    meter = _meter(device)
    gc.collect()
    module.synchronize()
    meter.start()
    streams, held = meter.reserved(), meter.peaks()
    # Lazily: nothing runs on a simulated device before something waits for it, the host among others.
    with simulator.checked("lazy", raise_on_report=strict) if meter.on == "simulator" else contextlib.nullcontext():
        before = module.Event()
        for _ in range(steps):
            done = module.Event()
            try:
                step()
            except StopIteration:
                break
            done.record()
            (before if ahead else done).synchronize()
            before = done
        peaks = meter.peaks()
        now = meter.reserved()
    main = module.default_stream(device).stream_id if meter.on == "simulator" else 0
    side = sum(size - streams.get(stream, 0) for stream, size in now.items() if stream != main)
    return Footprint(peaks[0] - held[0], peaks[1] - held[1], side, meter.on)


class _Simulated:
    on = "simulator"

    def __init__(self, device: torch.device) -> None:
        self._index = device.index or 0

    def start(self) -> None:
        simulator.empty_cache()
        simulator.reset_peak_stats()

    def peaks(self) -> tuple[int, int]:
        device = simulator.stats().devices.get(self._index)
        return (device.peak_allocated, device.peak_reserved) if device is not None else (0, 0)

    def reserved(self) -> dict[int, int]:
        """Bytes of each stream's pool."""
        streams = simulator.stats().streams.items()
        return {stream: stats.reserved for (index, stream), stats in streams if index == self._index}


class Gpu:
    """A CUDA device's caching allocator."""

    on = "GPU"

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index

    def start(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._index)

    def peaks(self) -> tuple[int, int]:
        return torch.cuda.max_memory_allocated(self._index), torch.cuda.max_memory_reserved(self._index)

    def reserved(self) -> dict[int, int]:
        """Bytes of each stream's pool; the default stream's number is 0."""
        pools: dict[int, int] = {}
        for segment in torch.cuda.memory_snapshot():
            if segment["device"] == self._index:
                pools[segment["stream"]] = pools.get(segment["stream"], 0) + segment["total_size"]
        return pools


def _meter(device: torch.device) -> _Simulated | Gpu:
    return Gpu(device) if device.type == "cuda" else _Simulated(device)


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone, where there is none: sharded models ask for one."""
    import torch.distributed as dist

    if not dist.is_available() or dist.is_initialized():
        yield
        return
    set_here = "LOCAL_WORLD_SIZE" not in os.environ  # torchrun sets it, and TorchRec's planner asks for it
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        gc.collect()  # pipelines hold it in cycles, and a forked child that collects it hangs: it joins its threads
        if set_here:
            del os.environ["LOCAL_WORLD_SIZE"]
