"""`torchrec-prealloc bench`."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchrec_prealloc.bench import command, plot
from torchrec_prealloc.bench.table import Column, Row
from torchrec_prealloc.cli import main


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A benchmark of one row, which misses a target; the list says with which `full` it ran."""
    ran: list[bool] = []

    def run(full: bool) -> Any:
        ran.append(full)
        yield Row("a", {"x": 1.5, "y": 2, "on": "CPU"})

    columns = (Column("x", "X", 1, better="low"), Column("y", "Y"), Column("on", "measured on"))
    module = SimpleNamespace(SUMMARY="a test", COLUMNS=columns, run=run, missed=lambda rows: ["a: X is 1.5"])
    monkeypatch.setattr(command, "BENCHMARKS", {"fake": "fake.path"})
    monkeypatch.setitem(sys.modules, "fake.path", module)  # type: ignore[arg-type]
    return ran


def test_the_table_is_printed_and_written(fake: list[bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.run(SimpleNamespace(names=[], check=False, full=True, out=tmp_path))  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert "a test" in printed
    assert "Machine: " in printed
    assert "missed: fake: a: X is 1.5" in printed
    assert fake == [True]
    assert json.loads((tmp_path / "fake.json").read_text())["rows"] == [{"name": "a", "x": 1.5, "y": 2, "on": "CPU"}]
    assert (tmp_path / "fake.md").read_text().startswith("| fake | X | Y | measured on |")
    assert (tmp_path / "fake.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("fake")
def test_a_benchmark_of_one_thread_leaves_the_next_one_its_threads(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        sys.modules["fake.path"].run = lambda full: [torch.set_num_threads(1), Row("a", {"x": 1})][1:]  # type: ignore[attr-defined]
        command.run(SimpleNamespace(names=[], check=False, full=False, out=None))  # type: ignore[arg-type]
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("fake")
def test_what_is_better_is_drawn_and_ours_stands_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "write_plot", lambda table, path, title, highlight, note: drawn.extend((table, note)))
    command.run(SimpleNamespace(names=[], check=False, full=False, out=tmp_path))  # type: ignore[arg-type]
    assert [column.key for column in drawn[0].columns] == ["x"]
    assert drawn[0].rows == (Row("a", {"x": 1.5}),)
    assert drawn[1].startswith("measured on: CPU; ")
    names = ["batch: ours, ring", "P: preallocated_non_blocking_copy", "P: blocking_copy", "Tensor.to each"]
    assert [command._is_ours(name) for name in names] == [True, True, False, False]


@pytest.mark.usefixtures("fake")
def test_what_was_not_run_is_left_out_of_the_picture_and_stands_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row("a", {"x": 1.5, "on": "CPU"}), Row("b", {"on": "not run: needs two ranks"})]
    sys.modules["fake.path"].run = lambda full: rows  # type: ignore[attr-defined]
    command.run(SimpleNamespace(names=[], check=False, full=False, out=tmp_path))  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert "not run: needs two ranks" in printed
    assert "nothing to draw" not in printed
    assert (tmp_path / "fake.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("error", [plot.PlotUnavailable("no matplotlib"), ValueError("no figures")])
def test_what_cannot_be_drawn_is_said_and_the_table_is_there(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(plot, "write_plot", fail)
    command.run(SimpleNamespace(names=[], check=False, full=False, out=tmp_path))  # type: ignore[arg-type]
    assert str(error) in capsys.readouterr().out
    assert (tmp_path / "fake.json").exists()


@pytest.mark.parametrize("name", command.BENCHMARKS)
def test_each_row_says_what_it_is_compared_with_and_where_it_was_measured(name: str) -> None:
    module = importlib.import_module(command.BENCHMARKS[name])
    keys = {column.key for column in module.COLUMNS}
    assert {"baseline", "on"} <= keys
    assert set(getattr(module, "PICTURE", ())) <= keys


def test_check_fails_where_a_target_is_missed(fake: list[bool]) -> None:
    with pytest.raises(command.CommandError, match="1 targets missed"):
        command.run(SimpleNamespace(names=["fake"], check=True, full=False, out=None))  # type: ignore[arg-type]


def test_an_unknown_name_is_one_line_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfers"]) == 1
    assert "no benchmark 'transfers'; there are: modes, " in capsys.readouterr().err
