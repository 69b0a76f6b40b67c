"""Tensors that are made around others: `ShardedTensor`, `DTensor` and other wrapper subclasses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Rebuild = Callable[[Sequence[Tensor]], Tensor]
"""Makes the same wrapper around other tensors, one for each part."""


def taken_apart(tensor: Tensor) -> tuple[list[Tensor], Rebuild]:
    """The tensors that hold a tensor's bytes on this rank, and how to make its like around others.

    A tensor that wraps nothing is its only part. No part requires grad.
    """
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor.detach() for shard in tensor.local_shards()], lambda parts: _sharded(tensor, parts)
    arrived: Any = _arrived(tensor.detach())
    if not is_traceable_wrapper_subclass(arrived):
        return [arrived], lambda parts: parts[0]
    return _wrapper(arrived)


def _arrived(tensor: Tensor) -> Tensor:
    """A collective's result, when the collective is done."""
    wait = getattr(tensor, "wait", None) if hasattr(tensor, "trigger_wait") else None
    return wait() if wait is not None else tensor


def _wrapper(tensor: Any) -> tuple[list[Tensor], Rebuild]:
    names, context = tensor.__tensor_flatten__()
    inner: dict[str, Any] = {}
    parts: list[Tensor] = []
    for name in names:
        value = getattr(tensor, name)
        inner[name] = value  # a DTensor's mesh is none of its tensors, and stays
        if isinstance(value, Tensor):
            found, rebuild = taken_apart(value)
            inner[name] = (len(parts), len(parts) + len(found), rebuild)
            parts += found

    def around(new: Sequence[Tensor]) -> Tensor:
        made = {
            name: value[2](new[value[0] : value[1]]) if isinstance(getattr(tensor, name), Tensor) else value
            for name, value in inner.items()
        }
        result: Tensor = tensor.__tensor_unflatten__(made, context, tensor.shape, tensor.stride())
        return result

    return parts, around


def _sharded(tensor: ShardedTensor, parts: Sequence[Tensor]) -> ShardedTensor:
    """A `ShardedTensor` of host shards. A rank without shards of it gets the tensor itself: that holds no bytes."""
    shards = tensor.local_shards()
    if not shards:
        return tensor
    old = tensor.metadata()
    new = [Shard(part, _on_host(shard.metadata, part.device)) for part, shard in zip(parts, shards, strict=True)]
    properties = TensorProperties(
        dtype=old.tensor_properties.dtype,
        layout=old.tensor_properties.layout,
        requires_grad=False,
        memory_format=old.tensor_properties.memory_format,
        pin_memory=parts[0].is_pinned(),
    )
    metadata = ShardedTensorMetadata(
        [_on_host(shard, parts[0].device) for shard in old.shards_metadata], old.size, properties
    )
    made = ShardedTensor._init_from_local_shards_and_global_metadata(
        new, sharded_tensor_metadata=metadata, process_group=tensor._process_group, init_rrefs=False
    )
    # A checkpoint's metadata should be that of the tensor on the device.
    made.metadata().tensor_properties.pin_memory = old.tensor_properties.pin_memory
    return made


def _on_host(shard: ShardMetadata, host: torch.device) -> ShardMetadata:
    rank = shard.placement.rank() if shard.placement is not None else 0
    return ShardMetadata(shard.shard_offsets, shard.shard_sizes, f"rank:{rank}/{host}")
