"""Batches in host memory that is not pinned: said once for each class of batch.

The engine copies such tensors into pinned memory first, on the main thread, so that nothing waits for the transfer.
Asking whether memory is pinned costs a call to the driver for each tensor, so only the first `CHECKED` batches of a
class are asked.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchrec_prealloc.batch_types import kind_of

CHECKED = 3

_checked: dict[type, int] = {}


def is_due(batch: Any) -> bool:
    """Whether a batch is among the first of its class; counts it."""
    count = _checked.get(type(batch), 0)
    _checked[type(batch)] = count + 1
    return count < CHECKED


def report(batch: Any, tensors: Iterable[Tensor]) -> None:
    """Warn if any of the `tensors` that were found in `batch` is not pinned."""
    known = [tensor for tensor in tensors if tensor.numel()]
    loose = [tensor for tensor in known if not tensor.is_pinned()]
    if not loose:
        return
    _checked[type(batch)] = CHECKED
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in loose)
    cls = unpinnable(batch)
    reason = (
        f"DataLoader(pin_memory=True) cannot pin class {cls.__name__}: it has no pin_memory(); give it one"
        if cls is not None
        else "give the DataLoader pin_memory=True"
    )
    warnings.warn(
        f"batch of class {type(batch).__name__}: {len(loose)} of {len(known)} tensors ({nbytes} bytes) are not in "
        f"pinned memory, so the main thread copies them once more before they travel. {reason}",
        stacklevel=2,
    )


def unpinnable(batch: Any) -> type | None:
    """The class in a batch that keeps a DataLoader from pinning the tensors in it; None where there is none."""
    return _unpinnable(batch, set())


def _unpinnable(obj: Any, seen: set[int]) -> type | None:
    if isinstance(obj, (Tensor, str, bytes)) or callable(getattr(obj, "pin_memory", None)) or id(obj) in seen:
        return None
    seen.add(id(obj))
    if isinstance(obj, (Mapping, Sequence)):
        children = obj.values() if isinstance(obj, Mapping) else obj
        return next((cls for child in children if (cls := _unpinnable(child, seen)) is not None), None)
    return type(obj) if kind_of(type(obj)) is not None else None
