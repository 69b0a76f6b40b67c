"""The benchmark of the loader: what it measures, and what it says of figures that miss."""

from __future__ import annotations

import pytest

from torchrec_prealloc import packing
from torchrec_prealloc.bench import loader
from torchrec_prealloc.bench.table import Row, Table

pytestmark = pytest.mark.usefixtures("collected")

MIB = 1 << 20


def test_it_measures_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "BATCHES", {loader.STRESS: loader._stress})
    monkeypatch.setattr(loader, "SECONDS", 0.05)
    monkeypatch.setattr(loader, "MIN_BATCHES", 2)
    monkeypatch.setattr(loader, "ROUNDS", 1)
    one, two = loader.run()
    assert "2 workers" in Table("batch", loader.COLUMNS, (one, two)).text()
    for row in (one, two):
        assert float(row.figures["ratio"] or 0) > 2
        assert float(row.figures["packed_files"] or 0) <= 2 < float(row.figures["plain_files"] or 0)


def test_tensors_in_shared_memory_are_handed_over_where_that_costs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BATCHES": {}, "SECONDS": 0.05, "MIN_BATCHES": 10, "FULL_ROUNDS": 1}.items():
        monkeypatch.setattr(loader, name, value)
    monkeypatch.setattr(loader, "SHARED_SIZES", (packing.SHARED_BYTES // 2, 4 * MIB))
    small, small_copied, large, large_copied = loader.run(full=True)
    assert [row.figures["packed_files"] for row in (small, small_copied, large, large_copied)] == [1.0, 1.0, 8.0, 1.0]
    assert [row.name.endswith("if copied") for row in (small, small_copied, large, large_copied)] == [False, True] * 2


def test_figures_that_miss_are_named() -> None:
    good = [
        Row(f"{loader.STRESS}, 1 worker", {"ratio": 20.0, "packed_files": 1.0}),
        Row(f"{loader.MANY}, 2 workers", {"ratio": 1.2, "packed_files": 2.0}),
        Row(f"{loader.LARGE}, 1 worker", {"ratio": 0.95, "packed_files": 2.0}),
        Row(f"8 × 64 KB {loader.SHARED}, 1 worker", {"ratio": 0.85, "packed_files": 8.0}),
        Row(f"8 × 64 KB {loader.SHARED}, 1 worker, {loader.IF_COPIED}", {"ratio": 0.1, "packed_files": 1.0}),
    ]
    assert loader.TARGETS.missed(good) == []
    bad = [
        Row(f"{loader.STRESS}, 1 worker", {"ratio": 19.9, "packed_files": 1.0}),
        Row(f"{loader.MANY}, 2 workers", {"ratio": 1.1, "packed_files": 2.1}),
        Row(f"{loader.JAGGED}, 1 worker", {"ratio": 0.9, "packed_files": 2.0}),
        Row(f"8 × 64 KB {loader.SHARED}, 1 worker", {"ratio": 0.84, "packed_files": 8.0}),
    ]
    assert len(loader.TARGETS.missed(bad)) == 5
