"""Peaks of memory while a block runs."""

import contextlib
import ctypes
import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path

import torch

from torchrec_prealloc.estimation.footprint import Gpu

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclasses.dataclass
class Peaks:
    """Peaks in bytes; set when the block of `watch_memory` has ended.

    Attributes:
        gpu_allocated: most that tensors held, by the caching allocator's count; None without a GPU
        gpu_reserved: most that the caching allocator held; None without a GPU
        gpu_side: of it what streams other than the default one hold at the end; None without a GPU
        host: most that was resident of the whole process, interpreter and libraries included, which every way has in
            common; None where the kernel does not let a process reset this figure
    """

    gpu_allocated: int | None = None
    gpu_reserved: int | None = None
    gpu_side: int | None = None
    host: int | None = None


@contextlib.contextmanager
def watch_memory(device: torch.device) -> Iterator[Peaks]:
    """Measure the peaks of this block alone, although other blocks ran in the same process before.

    What earlier blocks left behind goes first: garbage, the C library's free pages, the caching allocator's free
    segments. Then the counters start anew: the kernel's (`VmHWM`, set back through `/proc/self/clear_refs`) and the
    caching allocator's.
    """
    peaks = Peaks()
    gc.collect()
    _trim_heap()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    resettable = _reset_host_peak()
    yield peaks
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        peaks.gpu_allocated = torch.cuda.max_memory_allocated(device)
        peaks.gpu_reserved = torch.cuda.max_memory_reserved(device)
        peaks.gpu_side = sum(size for stream, size in Gpu(device).reserved().items() if stream)
    if resettable:
        peaks.host = _host_peak()


def _trim_heap() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc has it, musl does not
        trim(0)


def _reset_host_peak() -> bool:
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return _host_peak() is not None


def _host_peak() -> int | None:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
