"""Tables line up, say what was not measured, and keep all digits in JSON."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest

from torchrec_prealloc.bench import table as module
from torchrec_prealloc.bench.machine import describe_machine
from torchrec_prealloc.bench.table import Column, Row, Table

SPEED = Column("speed", "steps/s", digits=1, better="high")
PEAK = Column("peak", "GPU peak reserved, MiB", absent="no GPU")
TABLE = Table(
    "way",
    (SPEED, PEAK),
    (Row("short", {"speed": 1234.567}), Row("a longer name", {"speed": 2, "peak": 10})),
)


def test_columns_line_up() -> None:
    assert TABLE.text().splitlines() == [
        "                         GPU peak",
        "                        reserved,",
        "way            steps/s        MiB",
        "-------------  -------  ---------",
        "short          1,234.6     no GPU",
        "a longer name      2.0         10",
    ]


def test_the_example_in_the_docstring_is_true() -> None:
    assert doctest.testmod(module).attempted >= 3
    assert doctest.testmod(module).failed == 0


def test_markdown_has_a_rule_and_escapes_bars() -> None:
    table = Table("way | kind", (SPEED,), (Row("a|b", {"speed": 1.0}),))
    assert table.markdown().splitlines() == [
        "| way \\| kind | steps/s |",
        "| --- | ---: |",
        "| a\\|b | 1.0 |",
    ]


def test_every_markdown_line_has_as_many_cells() -> None:
    assert {line.count("|") for line in TABLE.markdown().splitlines()} == {4}


def test_json_keeps_digits_and_has_null_for_what_was_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.json"
    TABLE.write_json(path, describe_machine(), {"steps": 5})
    content = json.loads(path.read_text())
    assert content["rows"] == [
        {"name": "short", "speed": 1234.567, "peak": None},
        {"name": "a longer name", "speed": 2, "peak": 10},
    ]
    assert content["columns"] == {"speed": "steps/s", "peak": "GPU peak reserved, MiB"}
    assert content["settings"] == {"steps": 5}
    assert content["machine"]["cores"] >= 1


def test_a_figure_without_a_column_is_refused() -> None:
    with pytest.raises(ValueError, match=r"row 'x' has figures without a column: sped"):
        Table("way", (SPEED,), (Row("x", {"sped": 1.0}),))
