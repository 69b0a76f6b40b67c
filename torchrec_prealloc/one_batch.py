"""One batch to a device, without a pipeline."""

from __future__ import annotations

from typing import Any

import torch

from torchrec_prealloc.transfer import Transfer, TransferEngine


def to_device(batch: Any, device: torch.device | str, copy_stream: Any = None) -> Transfer:
    """Copy a batch to a device on a side stream, into memory that the current stream owns.

    The batch's memory returns to the current stream's pool, like that of `batch.to(device)`, and the copy overlaps with
    the current stream's work, like `batch.to(device, non_blocking=True)` on a side stream.

    Args:
        batch: host batch of any type; it is left as it is. To overlap, its memory should be pinned.
        device: the target.
        copy_stream: the stream to copy on; by default one that all such calls of a device share.

    Returns:
        A handle: `handle.wait()` orders the stream that is then current after the copy, and returns the batch.
    """
    device = torch.device(device)
    engine = _engine_for(device, copy_stream)
    return engine.start(batch)


_engines: dict[tuple[torch.device, Any], TransferEngine] = {}


def _engine_for(device: torch.device, side: Any) -> TransferEngine:
    key = (device, side)
    engine = _engines.get(key)
    if engine is None:
        engine = _engines[key] = TransferEngine(device, side)
    return engine
