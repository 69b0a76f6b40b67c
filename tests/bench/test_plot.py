"""The picture is a PNG of the figures that all rows have; without matplotlib there is one clear line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchrec_prealloc.bench.plot import PlotUnavailable, write_plot
from torchrec_prealloc.bench.table import Column, Row, Table

COLUMNS = (Column("speed", "steps/s"), Column("peak", "GPU peak", absent="no GPU"))
TABLE = Table("way", COLUMNS, (Row("old", {"speed": 1.0}), Row("new", {"speed": 2.0, "peak": 3.0})))


def test_a_png_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "table.png"
    write_plot(TABLE, path, "title", highlight="new", footnote="machine")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_only_columns_with_a_figure_in_every_row_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from torchrec_prealloc.bench import plot

    drawn = []
    monkeypatch.setattr(plot, "_draw", lambda panel, table, column, highlight: drawn.append(column.key))
    write_plot(TABLE, tmp_path / "table.png", "title")
    assert drawn == ["speed"]


def test_a_table_without_figures_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        write_plot(Table("way", COLUMNS, (Row("old", {}),)), tmp_path / "table.png", "title")


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotUnavailable, match=r"pip install 'torchrec-prealloc\[plot\]'"):
        write_plot(TABLE, tmp_path / "table.png", "title")
    assert not (tmp_path / "table.png").exists()
