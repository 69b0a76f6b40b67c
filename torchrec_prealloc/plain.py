"""Which host tensors are copied byte by byte, and the form in which they arrive."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from torchrec_prealloc.batch_types import BatchError
from torchrec_prealloc.layout import Form, Leaf


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but strided host memory, without a gradient.

    Everything else (subclasses, sparse, nested and quantized tensors, conjugate and negative views, tensors that
    require grad, tensors on devices) has a `to` that does more than copy bytes.
    """
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not (
            tensor.requires_grad
            or tensor.is_quantized
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.is_nested
            or tensor._is_zerotensor()
        )
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill one run of memory, each once. `.to` keeps such a tensor's strides."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


@functools.lru_cache(maxsize=1024)
def arrival_strides(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that `.to` gives a tensor: asked of `.to` itself, on the device without memory."""
    like = torch.empty(0, device="meta").as_strided(shape, strides)
    return torch.ops.aten._to_copy.default(like).stride()  # type: ignore[no-any-return]


def leaf(tensor: Tensor, index: int, alone: bool = False) -> Leaf:
    """What the layout needs to know of the plain tensor that is number `index` of its batch.

    Raises:
        BatchError: the tensor's storage is smaller than the tensor.
    """
    numel, size = tensor.numel(), tensor.element_size()
    shape, strides = tensor.shape, tensor.stride()
    start, storage = tensor.data_ptr(), tensor.untyped_storage()
    form: Form = (tensor.dtype, shape, strides)
    if not is_dense(tensor):
        check_storage(tensor)
        form = (tensor.dtype, shape, arrival_strides(shape, strides))
        return Leaf(-1 - index, start, numel * size, form, alone)
    if storage.nbytes() < (tensor.storage_offset() + numel) * size:
        check_storage(tensor)
    # A tensor without elements has no place in a storage; one at an odd address could not be viewed in an extent.
    apart = alone or numel == 0 or start % size != 0
    return Leaf(-1 - index if apart else storage._cdata, start, numel * size, form, alone)


def check_storage(tensor: Tensor) -> None:
    """Refuse a tensor that does not lie inside its storage.

    Copying it would read foreign memory; torch's own `.to` crashes the process.

    Raises:
        BatchError: it does not.
    """
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if tensor.numel() and end > held:
        raise BatchError(
            f"a Tensor of shape {tuple(tensor.shape)} and {tensor.dtype} reaches to byte {end} of a storage that has "
            f"{held}: its memory was freed (untyped_storage().resize_, clear_storage()); keep the batch's memory until "
            "it was moved"
        )
