"""How one tensor travels, and why, in words."""

from __future__ import annotations

import enum

import torch
from torch import Tensor
from torch.nn import Parameter

from torchrec_prealloc.plain import is_plain

UNITS = ("B", "KiB", "MiB", "GiB")


class Route(enum.Enum):
    """How a tensor travels."""

    DIRECT = "direct"
    """From its own memory into an allocation of its own."""
    GATHERED = "gathered"
    """With others into pinned memory by the main thread, and with them in one copy."""
    BACKGROUND = "gathered in the background"
    """Into pinned memory by a thread, then into an allocation of its own."""
    OWN_TO = "its own to"
    """By its own `to`, or that of the object that holds it, on the main stream."""
    LEFT = "left on the host"
    PRESENT = "on the device already"


def size_text(nbytes: int) -> str:
    """Bytes for people: `1.5 MiB`."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.1f} {UNITS[unit]}"


def why_not_plain(tensor: Tensor) -> str | None:
    """What makes a tensor more than strided host memory (`plain.is_plain`); None where it is no more than that."""
    if is_plain(tensor):
        return None
    if not tensor.is_cpu:
        return f"it is on {tensor.device}"
    if tensor.is_nested:
        return "a nested tensor is several tensors"
    if type(tensor) is not Tensor and not isinstance(tensor, Parameter):
        return f"{type(tensor).__name__} is a subclass of Tensor, whose `to` may do anything"
    if tensor.is_quantized:
        return "a quantized tensor has a scale beside its bytes"
    if tensor.layout is not torch.strided:
        return f"its layout is {str(tensor.layout).removeprefix('torch.')}: several tensors in one"
    if tensor.requires_grad or isinstance(tensor, Parameter):
        return "it requires grad, and `to` is a part of the graph"
    if tensor.is_conj() or tensor.is_neg():
        return f"it is a {'conjugate' if tensor.is_conj() else 'negative'} view, whose bytes are not its values"
    return "it is more than strided host memory"


def why_gathered(nbytes: int, direct_bytes: int, pinned: bool | None, dense: bool) -> str:
    """Why the main thread gathers a tensor."""
    if nbytes < direct_bytes:
        return f"under direct_bytes ({size_text(direct_bytes)})"
    if not dense:
        return "there are gaps between its elements; into memory of its own"
    return ("its class' `to` gives it other strides" if pinned else "not pinned") + "; into memory of its own"


def why_background(nbytes: int, direct_bytes: int, pinned: bool | None, dense: bool) -> str:
    """Why a large tensor does not travel from where it is."""
    large = "large" if nbytes >= direct_bytes else "a part of shared memory that is large"
    if not dense:
        return f"{large}; there are gaps between its elements"
    return f"{large}; " + ("not all of it is pinned" if pinned else "not pinned")


def why_direct(nbytes: int, direct_bytes: int, streams: bool) -> str:
    """Why a tensor travels from where it is."""
    pinned = "pinned, " if streams else ""
    if nbytes >= direct_bytes:
        return f"{pinned}at least direct_bytes ({size_text(direct_bytes)})"
    return f"{pinned}a part of shared memory that is large"
