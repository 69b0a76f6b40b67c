"""One table of figures, as aligned text, as Markdown and as JSON.

>>> speed = Column("speed", "steps/s", digits=1)
>>> peak = Column("peak", "GPU peak reserved", absent="no GPU")
>>> print(Table("way", (speed, peak), (Row("ours", {"speed": 12.34}),)).text())
               GPU peak
way   steps/s  reserved
----  -------  --------
ours     12.3    no GPU
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports torch, and a table does not need it
    from torchrec_prealloc.bench.machine import Machine

Figure = float | int | str

_HEADING_WIDTH = 12


@dataclasses.dataclass(frozen=True)
class Column:
    """One kind of figure.

    Attributes:
        key: its name in rows and in JSON
        title: its heading, with the unit
        digits: decimals that are shown; JSON keeps them all
        absent: what stands where a row has no such figure; JSON has null
        better: "high" or "low" where one of them is better, for pictures
    """

    key: str
    title: str
    digits: int = 0
    absent: str = "-"
    better: str = ""

    def show(self, figure: Figure | None) -> str:
        """The figure as it is printed."""
        if figure is None:
            return self.absent
        return figure if isinstance(figure, str) else f"{figure:,.{self.digits}f}"


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured, and its figures by the columns' keys. A key that is missing, or None, was not measured."""

    name: str
    figures: Mapping[str, Figure | None]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows under columns; `subject` heads the column of the rows' names.

    Raises:
        ValueError: a row has a figure for which there is no column.
    """

    subject: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        known = {column.key for column in self.columns}
        for row in self.rows:
            if unknown := sorted(set(row.figures) - known):
                raise ValueError(f"row {row.name!r} has figures without a column: {', '.join(unknown)}")

    def text(self) -> str:
        """Aligned for a terminal: names to the left, figures to the right, long headings broken into lines."""
        titles, *body = self._cells()
        heads = [textwrap.wrap(title, _HEADING_WIDTH) for title in titles]
        height = max(map(len, heads))
        head = [list(line) for line in zip(*([""] * (height - len(head)) + head for head in heads), strict=True)]
        widths = [max(map(len, column)) for column in zip(*head, *body, strict=True)]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
            for line in [*head, ["-" * width for width in widths], *body]
        )

    def markdown(self) -> str:
        """For a README; figures to the right."""
        head, *body = [[cell.replace("|", "\\|") for cell in line] for line in self._cells()]
        rule = ["---", *["---:" for _ in self.columns]]
        return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *body])

    def as_json(self, machine: Machine, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Rows with all their digits, the headings, the machine, and the settings that they were measured with."""
        return {
            "machine": dataclasses.asdict(machine),
            "settings": dict(settings or {}),
            "subject": self.subject,
            "columns": {column.key: column.title for column in self.columns},
            "rows": [
                {"name": row.name, **{column.key: row.figures.get(column.key) for column in self.columns}}
                for row in self.rows
            ],
        }

    def write_json(self, path: Path, machine: Machine, settings: Mapping[str, Any] | None = None) -> None:
        """Write `as_json` to `path`; its folder is made where it is missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(machine, settings), indent=2) + "\n", encoding="utf-8")

    def _cells(self) -> list[list[str]]:
        lines = [
            [row.name, *(column.show(row.figures.get(column.key)) for column in self.columns)] for row in self.rows
        ]
        return [[self.subject, *(column.title for column in self.columns)], *lines]
