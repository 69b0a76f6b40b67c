"""Batches that cross the DataLoader as one tensor.

>>> from torch.utils.data import DataLoader
>>> loader = DataLoader(range(4), batch_size=2, collate_fn=packed())
>>> [batch.unpack().tolist() for batch in loader]
[[0, 1], [2, 3]]

A worker hands each tensor of a batch to the main process in a shared-memory segment of its own: a file descriptor, two
system calls and some work for each. A packed batch is one segment, whatever is in it. The pipelines and `to_device`
take it as it is.

With `batch_size=None` the dataset makes the batches, and `pack` itself is the `collate_fn`. Without a DataLoader, call
`pack` where the batch is made: a `PackedBatch` can be pickled, and sent by any queue of `torch.multiprocessing`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

from torchrec_prealloc.packed_batch import PackedBatch
from torchrec_prealloc.packing import pack

__all__ = ["PackedBatch", "pack", "packed"]


def packed(collate_fn: Callable[[Any], Any] = default_collate) -> Callable[[Any], PackedBatch]:
    """The `collate_fn` that packs what another one makes.

    Args:
        collate_fn: makes a batch of any type of a list of samples. With `spawn` it has to be a module's function or
            an instance of a module's class, as always.

    The batches have `pin_memory()`, which `DataLoader(pin_memory=True)` calls, and `unpack()` for those who want the
    batch on the host. What `collate_fn` raises is raised as it is.
    """
    return _Packed(collate_fn)


class _Packed:
    """A class, so that `spawn` can pickle it."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: Any) -> PackedBatch:
        return pack(self._collate_fn(samples))
