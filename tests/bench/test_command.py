"""`torchrec-prealloc bench`."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchrec_prealloc.bench import command
from torchrec_prealloc.bench.table import Column, Row
from torchrec_prealloc.cli import main


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A benchmark of one row, which misses a target; the list says with which `full` it ran."""
    ran: list[bool] = []

    def run(full: bool) -> Any:
        ran.append(full)
        yield Row("a", {"x": 1.5})

    module = SimpleNamespace(
        SUMMARY="a test", COLUMNS=(Column("x", "X", 1),), run=run, missed=lambda rows: ["a: X is 1.5"]
    )
    monkeypatch.setattr(command, "BENCHMARKS", {"fake": "fake.path"})
    monkeypatch.setattr(command.importlib, "import_module", lambda path: module)
    return ran


def test_the_table_is_printed_and_written(fake: list[bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.run(SimpleNamespace(names=[], check=False, full=True, out=tmp_path))  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert "a test" in printed
    assert "Machine: " in printed
    assert "missed: fake: a: X is 1.5" in printed
    assert fake == [True]
    assert json.loads((tmp_path / "fake.json").read_text())["rows"] == [{"name": "a", "x": 1.5}]
    assert (tmp_path / "fake.md").read_text().startswith("| fake | X |")


def test_check_fails_where_a_target_is_missed(fake: list[bool]) -> None:
    with pytest.raises(command.CommandError, match="1 targets missed"):
        command.run(SimpleNamespace(names=["fake"], check=True, full=False, out=None))  # type: ignore[arg-type]


def test_an_unknown_name_is_one_line_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfers"]) == 1
    assert "no benchmark 'transfers'; there are: modes, transfer" in capsys.readouterr().err
