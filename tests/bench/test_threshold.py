"""The benchmark from which the default of `direct_bytes` comes."""

from __future__ import annotations

import pytest

from torchrec_prealloc.bench import threshold
from torchrec_prealloc.bench.table import Row
from torchrec_prealloc.config import PreallocConfig


def rows(break_even: int) -> list[Row]:
    return [Row(threshold._name(size), {"ratio": size / break_even}) for size in threshold.SIZES]


def test_the_default_and_a_sixteenth_of_it_are_measured() -> None:
    assert {PreallocConfig.direct_bytes, PreallocConfig.direct_bytes // 16} <= set(threshold.SIZES)


def test_a_default_on_the_wrong_side_is_named() -> None:
    default = PreallocConfig.direct_bytes
    assert threshold.missed(rows(default)) == []
    assert "cheaper to gather: 0.50" in threshold.missed(rows(2 * default))[0]
    assert "dearer to gather" in threshold.missed(rows(default // 32))[0]


def test_each_size_has_what_both_ways_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threshold, "SIZES", (8 << 10, 64 << 10))
    measured = [row.figures for row in threshold.run()]
    assert all(figures["ratio"] == pytest.approx(figures["gather"] / figures["alone"]) for figures in measured)
    assert measured[0]["gather"] < measured[1]["gather"]
