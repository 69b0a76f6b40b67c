"""`torchrec-prealloc estimate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchrec_prealloc import simulator
from torchrec_prealloc.cli import main


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "job.yaml"
    file.write_text("pipeline: {_target_: TrainPipelineBase}\nbatch: {rows: 4096, dense: 128}\n")
    return str(file)


@pytest.mark.usefixtures("simulated_accelerator")
def test_the_table_is_printed_as_simulated_and_written(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ["--steps", "3", "--wobble", "0.2", "--in-step", "--out", str(out)]
    assert main(["estimate", "--config", config, *flags]) == 0
    printed = capsys.readouterr().out
    assert "TrainPipelineBase, batches of up to " in printed
    assert "3 steps (simulated)" in printed
    assert "not measured on a GPU" in printed
    for name in ("blocking_copy", "non_blocking_copy", "preallocated_non_blocking_copy"):
        assert f"\n{name} " in printed
    content = json.loads((out / "estimate.json").read_text())
    assert content["settings"]["wobble"] == 0.2
    assert 0.8 * 4096 * 129 * 4 <= content["settings"]["batch_bytes"] <= 4096 * 129 * 4
    assert (out / "estimate.md").read_text().startswith("| way | peak allocated, MiB |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wobble", "1"], "'1' is not a share from 0 to below 1"),
        (["--wobble", "x"], "'x' is not a share"),
        (["--steps", "0"], "'0' is not a positive whole number"),
    ],
)
def test_wrong_flags_are_named(
    config: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["estimate", "--config", config, *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("simulated_accelerator")
def test_a_failure_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("pipeline: {_target_: TrainPipelineBase}\nbatch: {_target_: no_such.f}\n")
    assert main(["estimate", "--config", str(file)]) == 1
    assert capsys.readouterr().err == (
        "torchrec-prealloc estimate: batch._target_: cannot import no_such: No module named 'no_such'\n"
    )


def test_no_compiler_is_one_line_with_the_remedy(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulator, "available", lambda: (False, "no C++ compiler ('g++'): install g++ 11 or later"))
    assert main(["estimate", "--config", config]) == 1
    assert capsys.readouterr().err == (
        "torchrec-prealloc estimate: no simulator: no C++ compiler ('g++'): install g++ 11 or later\n"
    )


@pytest.mark.usefixtures("simulated_accelerator")
def test_a_build_is_announced(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulator, "built", lambda: False)
    assert main(["estimate", "--config", config, "--steps", "1"]) == 0
    assert "building the simulator (once" in capsys.readouterr().err
