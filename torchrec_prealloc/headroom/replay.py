"""A history run again on the simulator's allocator, which has PyTorch's rules; only sizes, no bytes are touched."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from torchrec_prealloc.headroom.estimate import Move

_DEVICE = 7
"""Of the simulator, so that what else a process does on the first one is not in the figures."""


def unavailable() -> str:
    """Why nothing can be replayed here; empty where it can."""
    if "torch" not in sys.modules:  # the simulator and a GPU exclude each other, and nothing here needs the GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from torchrec_prealloc import simulator

    usable, reason = simulator.available()
    if not usable:
        return reason
    try:
        simulator.device(_DEVICE)
    except simulator.BuildError as error:
        return str(error).partition("\n")[0]
    return ""


def reserved(moves: Iterable[Move], size_rounding: int | None = None) -> int | None:
    """The peak of what one pool reserves that is given `moves`, bytes. None: there is not even the address space.

    Args:
        moves: what it is asked for.
        size_rounding: how copies are rounded up (`PreallocConfig.size_rounding`); by default as ours are.
    """
    import torch

    from torchrec_prealloc import simulator
    from torchrec_prealloc.buffers import rounded
    from torchrec_prealloc.config import PreallocConfig

    divisions = PreallocConfig().size_rounding if size_rounding is None else size_rounding
    device = simulator.device(_DEVICE)
    simulator.empty_cache()
    simulator.reset_peak_stats()
    blocks: dict[int, torch.Tensor] = {}
    try:
        for move in moves:
            if move.size:
                size = rounded(move.size, divisions) if move.is_copy else move.size
                blocks[move.key] = torch.empty(size, dtype=torch.uint8, device=device)
            else:
                blocks.pop(move.key, None)
    except torch.OutOfMemoryError:
        return None
    finally:
        peak = simulator.stats().devices[_DEVICE].peak_reserved
        blocks.clear()
        simulator.empty_cache()
    return peak
