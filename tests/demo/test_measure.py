"""A block's peak of memory is its own."""

from __future__ import annotations

import torch

from torchrec_prealloc.demo.measure import watch_memory

CPU = torch.device("cpu")
MIB = 1 << 20


def peak_of(size: int) -> int:
    with watch_memory(CPU) as peaks:
        torch.ones(size, dtype=torch.uint8)
    assert peaks.host is not None
    return peaks.host


def test_memory_that_is_freed_within_the_block_counts() -> None:
    assert peak_of(200 * MIB) - peak_of(1) > 150 * MIB


def test_an_earlier_block_does_not_raise_the_peak_of_a_later_one() -> None:
    before = peak_of(1)
    peak_of(200 * MIB)
    assert abs(peak_of(1) - before) < 50 * MIB


def test_there_is_no_gpu_figure_for_a_cpu() -> None:
    with watch_memory(CPU) as peaks:
        pass
    assert peaks.gpu_allocated is None
    assert peaks.gpu_reserved is None
    assert peaks.gpu_side is None
