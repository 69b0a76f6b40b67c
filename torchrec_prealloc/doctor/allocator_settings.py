"""What PyTorch's allocator was told by the environment, and what of it matters to preallocated batches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
BLOCKING = "CUDA_LAUNCH_BLOCKING"


class Setting(NamedTuple):
    """One thing that was set."""

    variable: str
    name: str
    value: str
    effect: str
    """What it means for the batches' memory; empty: nothing."""

    def __str__(self) -> str:
        what = f"{self.variable}: {self.name}:{self.value}" if self.name else f"{self.variable}={self.value}"
        return f"{what}: {self.effect or 'makes no difference to the batches'}"


def read_settings(environment: Mapping[str, str] | None = None) -> tuple[Setting, ...]:
    """The settings in the environment (this process' by default)."""
    given = os.environ if environment is None else environment
    found = [
        Setting(variable, name, value, _effect(name, value))
        for variable in VARIABLES
        for name, value in _parse(given.get(variable, ""))
    ]
    if given.get(NO_CACHING, "0") not in ("", "0"):
        effect = "each allocation goes to the driver, which waits for the device; set prealloc.buffers: ring"
        found.append(Setting(NO_CACHING, "", given[NO_CACHING], effect))
    if given.get(BLOCKING, "0") not in ("", "0"):
        effect = "the host waits for each kernel and copy, so nothing overlaps; unset it, except to search an error"
        found.append(Setting(BLOCKING, "", given[BLOCKING], effect))
    return tuple(found)


def _parse(text: str) -> list[tuple[str, str]]:
    """`a:1,b:[2:3,4:5]` as pairs."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text + ","):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    pairs = (part.partition(":") for part in parts if part.strip())
    return [(name.strip(), value.strip()) for name, _, value in pairs]


def _effect(name: str, value: str) -> str:
    if name == "expandable_segments" and value.lower() == "true":
        return (
            "segments grow with the batches, so rounding saves little; prealloc.size_rounding: 0 spares up to 1/8. "
            "Each stream still has its own segments, so what preallocation gives back stays"
        )
    if name.startswith("roundup_power2_divisions"):
        return "torch rounds sizes itself, on top of prealloc.size_rounding; with 0 there, they are rounded once"
    if name == "max_split_size_mb":
        return (
            f"blocks over {value} MB are not split, so larger batches reuse only blocks of about their size: keep "
            "prealloc.size_rounding at 8, or set buffers: ring"
        )
    if name == "garbage_collection_threshold":
        return "idle blocks go back to the driver when memory is nearly full; buffers: ring keeps the batches' own"
    if name == "backend" and value == "cudaMallocAsync":
        return (
            "CUDA's own pool in place of PyTorch's allocator: memory is not kept for each stream, so there is none "
            "for preallocation to give back; fewer copies and allocations remain"
        )
    if name == "per_process_memory_fraction":
        return "the memory that the process may reserve, the batches' included"
    return ""
