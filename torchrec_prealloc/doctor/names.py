"""What the parts of a batch are called, and what a container says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_prealloc import PackedBatch
from torchrec_prealloc.batch_types import field_names

JAGGED = (KeyedJaggedTensor, JaggedTensor, KeyedTensor)
SHOWN_KEYS = 3


def child_names(obj: Any, children: Sequence[Any]) -> list[str]:
    """What to put behind a container's own path for each of its children: `.x`, `['key']`, `[0]`."""
    if isinstance(obj, PackedBatch):
        count = len(obj.sections)
        return [f".sections[{i}]" if i < count else f".apart[{i - count}]" for i in range(len(children))]
    keys = _keys(obj)
    if keys is not None and len(keys) == len(children):
        return [f"[{key!r}]" for key in keys]
    if isinstance(obj, tuple) and hasattr(obj, "_fields") and len(obj._fields) == len(children):
        return [f".{name}" for name in obj._fields]
    if isinstance(obj, (list, tuple)):
        return [f"[{index}]" for index in range(len(children))]
    by_id: dict[int, list[str]] = {}
    for name in field_names(obj):
        by_id.setdefault(id(getattr(obj, name)), []).append(f".{name}")
    found = (by_id.get(id(child)) for child in children)
    return [names.pop(0) if names else f"<{index}>" for index, names in enumerate(found)]


def _keys(obj: Any) -> list[Any] | None:
    if isinstance(obj, dict):
        return list(obj)
    return list(obj.keys()) if _is_tensordict(obj) else None


def _is_tensordict(obj: Any) -> bool:
    """By name: TorchRec's early versions do without tensordict."""
    return any(base.__name__ == "TensorDictBase" for base in type(obj).__mro__)


def note_of(obj: Any) -> str:
    """What a container is beside its tensors; read from its fields, since TorchRec's methods fill caches."""
    if isinstance(obj, PackedBatch):
        return f"{_count(len(obj.dtypes), 'tensor')} in {_count(len(obj.sections), 'section')}"
    state = getattr(obj, "__dict__", {})
    if type(obj) in JAGGED:
        notes = [_keys_note(state["_keys"])] if "_keys" in state else []
        stride = _stride(state)
        notes += [f"stride {stride}"] if stride is not None else []
        notes += ["variable batch"] if state.get("_stride_per_key_per_rank") is not None else []
        values = state.get("_values")
        notes += [f"{values.numel()} values"] if isinstance(values, Tensor) else []
        notes += ["weighted"] if state.get("_weights") is not None else []
        return ", ".join(notes)
    if _is_tensordict(obj):
        return f"batch size {list(obj.batch_size)}"
    return ""


def _keys_note(keys: Sequence[str]) -> str:
    shown = ", ".join(map(str, keys[:SHOWN_KEYS]))
    more = ", ..." if len(keys) > SHOWN_KEYS else ""
    return _count(len(keys), "key") + (f" ({shown}{more})" if keys else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _stride(state: dict[str, Any]) -> int | None:
    """Samples of a `KeyedJaggedTensor`: TorchRec computes it where it was not given, as here."""
    if "_keys" not in state or state.get("_stride_per_key_per_rank") is not None:
        return None
    if isinstance(state.get("_stride"), int):
        return int(state["_stride"])
    keys, lengths, offsets = state["_keys"], state.get("_lengths"), state.get("_offsets")
    if not keys:
        return None
    if isinstance(lengths, Tensor):
        return lengths.numel() // len(keys)
    return (offsets.numel() - 1) // len(keys) if isinstance(offsets, Tensor) else None
