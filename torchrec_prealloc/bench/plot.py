"""A table as a picture: one panel for each figure, one bar for each row."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrec_prealloc.bench.table import Column, Table

NO_MATPLOTLIB = "no picture: matplotlib is missing (pip install 'torchrec-prealloc[plot]')"

_PLAIN = "#9aa5b1"
_HIGHLIGHT = "#c2410c"
_INK = "#1f2933"


class PlotUnavailable(Exception):
    """matplotlib is not installed. The message is one line that says what to do."""


def write_plot(
    table: Table, path: Path, title: str, highlight: str | Callable[[str], bool] = "", footnote: str = ""
) -> None:
    """Draw the table as a PNG.

    Only columns with a figure in every row are drawn: a gap would look like a zero.

    Args:
        table: what to draw
        path: of the PNG; its folder is made where it is missing
        title: one line above the panels
        highlight: name of the row to set off from the others, or which names are set off
        footnote: one line below, e.g. the machine

    Raises:
        PlotUnavailable: there is no matplotlib.
        ValueError: no column has a figure in every row.
    """
    columns = [column for column in table.columns if all(_is_number(row.figures.get(column.key)) for row in table.rows)]
    if not columns or not table.rows:
        raise ValueError("nothing to draw: no column has a figure in every row")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotUnavailable(NO_MATPLOTLIB) from error

    across = min(3, len(columns))
    down = -(-len(columns) // across)
    figure = Figure(figsize=(1.6 + 3.4 * across, 1.2 + (0.7 + 0.42 * len(table.rows)) * down), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, squeeze=False, sharey=True)
    for place, panel in enumerate(panels.flat):
        if place < len(columns):
            _draw(panel, table, columns[place], highlight if callable(highlight) else highlight.__eq__)
        else:
            panel.set_axis_off()
    width = 34 * across
    heading = "\n".join(textwrap.wrap(title, width))
    figure.suptitle(heading, color=_INK, fontsize=11, fontweight="bold", x=0.01, ha="left")
    if footnote:
        figure.supxlabel("\n".join(textwrap.wrap(footnote, 2 * width)), color="#616e7c", fontsize=7, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw(panel: Any, table: Table, column: Column, stands_out: Callable[[str], bool]) -> None:
    names = [row.name for row in table.rows]
    figures = [row.figures[column.key] for row in table.rows]
    colours = [_HIGHLIGHT if stands_out(name) else _PLAIN for name in names]
    bars = panel.barh(range(len(names)), figures, color=colours, height=0.62)
    panel.bar_label(bars, labels=[column.show(figure) for figure in figures], padding=3, fontsize=8, color=_INK)
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_xlim(0, max(*(float(figure or 0) for figure in figures), 1e-9) * 1.3)
    panel.set_xticks([])
    better = f" ({column.better}er is better)" if column.better else ""
    panel.set_title(f"{column.title}{better}", fontsize=9, loc="left", color=_INK)
    panel.tick_params(length=0)
    for side in ("top", "right", "bottom"):
        panel.spines[side].set_visible(False)


def _is_number(figure: object) -> bool:
    return isinstance(figure, int | float)
