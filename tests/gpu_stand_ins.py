"""What tests on a GPU do without FBGEMM's CUDA kernels, as its CPU build has none: with unsharded models, and with
stand-ins in plain torch for the few operators that a KeyedJaggedTensor calls.
"""

from __future__ import annotations

import os
from typing import Any

import fbgemm_gpu  # noqa: F401  registers the operators
import torch
from torch import Tensor

PRETEND = "TESTS_WITHOUT_FBGEMM"
"""Set to 1 in the environment: do without FBGEMM on the simulator too, as a rehearsal without a GPU."""
_KEYS = {"cuda": "CUDA", "mtia": "MTIA"}
_libraries: dict[str, Any] = {}


def complete_cumsum(lengths: Tensor) -> Tensor:
    """`fbgemm::asynchronous_complete_cumsum`: the sums before each element, and behind the last (along the last
    dimension)."""
    sums = lengths.new_zeros((*lengths.shape[:-1], lengths.shape[-1] + 1))
    sums[..., 1:] = torch.cumsum(lengths, -1, dtype=lengths.dtype)
    return sums


def permute_2d(
    permute: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None = None, permuted_lengths_sum: Any = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`fbgemm::permute_2D_sparse_data`: rows of jagged values in another order; `lengths` has one row for each."""
    starts = complete_cumsum(lengths.reshape(-1)).tolist()
    columns = lengths.shape[1]
    order = [slice(starts[row * columns], starts[(row + 1) * columns]) for row in permute.tolist()]
    permuted = [torch.cat([of[part] for part in order]) if of is not None else None for of in (values, weights)]
    assert permuted[0] is not None
    return lengths[permute.long()], permuted[0], permuted[1]


STAND_INS = {"asynchronous_complete_cumsum": complete_cumsum, "permute_2D_sparse_data": permute_2d}


def has_kernels(device: torch.device) -> bool:
    """Whether FBGEMM has kernels for a device: its embeddings, and so sharded models, run there."""
    if device.type == "mtia":  # on the simulator its CPU kernels run
        return os.environ.get(PRETEND) != "1"
    if device.type in _libraries:
        return False
    key = _KEYS.get(device.type, device.type.upper())
    return torch._C._dispatch_has_kernel_for_dispatch_key("fbgemm::asynchronous_complete_cumsum", key)


def stand_in(device: torch.device) -> None:
    """Register the stand-ins for a device, once in a process, where FBGEMM has no kernels for it."""
    if has_kernels(device) or device.type in _libraries:
        return
    library = torch.library.Library("fbgemm", "IMPL")  # they last as long as this object
    for name, function in STAND_INS.items():
        library.impl(name, function, _KEYS[device.type])
    _libraries[device.type] = library


def backend(device: torch.device) -> str:
    """Backends of a process group whose tensors are on a device: gloo cannot exchange those of a sharded model."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and has_kernels(device) else "gloo"
