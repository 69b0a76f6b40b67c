"""The benchmark of the loader: what it measures, and what it says of figures that miss."""

from __future__ import annotations

import pytest

from torchrec_prealloc.bench import loader
from torchrec_prealloc.bench.table import Row, Table


def test_it_measures_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "BATCHES", {loader.STRESS: loader._stress})
    monkeypatch.setattr(loader, "SECONDS", 0.05)
    monkeypatch.setattr(loader, "ROUNDS", 1)
    one, two, after = loader.run()
    assert "2 workers" in Table("batch", loader.COLUMNS, (one, two, after)).text()
    for row in (one, two):
        assert float(row.figures["ratio"] or 0) > 2
        assert float(row.figures["packed_files"] or 0) <= 2 < float(row.figures["plain_files"] or 0)
    assert 0 < float(after.figures["ratio"] or 0) < 1


def test_figures_that_miss_are_named() -> None:
    good = [
        Row(f"{loader.STRESS}, 1 worker", {"ratio": 20.0, "packed_files": 1.0}),
        Row(f"{loader.MANY}, 2 workers", {"ratio": 1.2, "packed_files": 2.0}),
        Row(f"{loader.LARGE}, 1 worker", {"ratio": 0.95, "packed_files": 2.0}),
        Row(loader.NEXT, {"ratio": 0.25}),
    ]
    assert loader.TARGETS.missed(good) == []
    bad = [
        Row(f"{loader.STRESS}, 1 worker", {"ratio": 19.9, "packed_files": 1.0}),
        Row(f"{loader.MANY}, 2 workers", {"ratio": 1.1, "packed_files": 2.1}),
        Row(f"{loader.JAGGED}, 1 worker", {"ratio": 0.9, "packed_files": 2.0}),
        Row(loader.NEXT, {"ratio": 0.26}),
    ]
    assert len(loader.TARGETS.missed(bad)) == 5
