"""The benchmark of the codec: what it measures, and what it says of figures that miss."""

from __future__ import annotations

import pytest

from torchrec_prealloc.bench import codec
from torchrec_prealloc.bench.table import Table


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LEAVES": 300, "DEVICES": 512, "MESSAGES": 50, "SAMPLE": 5, "ROUNDS": 1}.items():
        monkeypatch.setattr(codec, name, value)


@pytest.mark.usefixtures("small")
def test_it_measures_what_is_shared() -> None:
    rows = codec.run()
    assert "twice the shardings" in Table("objects", codec.COLUMNS, tuple(rows)).text()
    first, more, most, messages = (row.figures for row in rows)
    assert float(first["smaller"] or 0) > 50
    assert float(messages["smaller"] or 0) > 10
    assert float(more["kb"] or 0) < 2 * float(first["kb"] or 0)
    assert float(more["kb"] or 0) < float(most["kb"] or 0) < 2 * float(more["kb"] or 0)


@pytest.mark.usefixtures("small")
def test_figures_that_miss_are_named() -> None:
    rows = codec.run()
    assert codec.Targets(beside_list=1e9, shardings_faster=0, doubled=1e9).missed(rows) == []
    strict = codec.Targets(beside_list=0, shardings_smaller=1e9, messages_smaller=1e9, shardings_faster=1e9, doubled=0)
    assert len(strict.missed(rows)) == 7
