"""The command answers fast, does what its flags say, and ends expected failures in one line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrec_prealloc.cli import main
from torchrec_prealloc.errors import CommandError

ROOT = Path(__file__).parents[1]


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchrec_prealloc", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\nfrom torchrec_prealloc.cli import main\n"
        "try: main(['demo', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 0


def test_help_names_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "demo" in capsys.readouterr().out


def test_a_command_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "'0' is not a positive whole number"),
        (["--batch-size", "many"], "'many' is not a positive whole number"),
        (["--pipeline", "other"], "invalid choice: 'other'"),
        (["--pipeline", "base", "--config", "x.yaml"], "not allowed with argument --pipeline"),
    ],
)
def test_wrong_flags_of_the_demo_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def replace_demo(monkeypatch: pytest.MonkeyPatch, run: Callable[[argparse.Namespace], None]) -> None:
    from torchrec_prealloc.demo import command

    monkeypatch.setattr(command, "run", run)


def test_an_expected_failure_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> None:
        raise CommandError("no such thing: get one")

    replace_demo(monkeypatch, run)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "torchrec-prealloc demo: no such thing: get one\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> None:
        raise ZeroDivisionError

    replace_demo(monkeypatch, run)
    with pytest.raises(ZeroDivisionError):
        main(["demo"])


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: argparse.Namespace) -> None:
        raise KeyboardInterrupt

    replace_demo(monkeypatch, run)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "torchrec-prealloc demo: interrupted\n"


def test_the_demo_prints_its_table_and_writes_json_and_png(tmp_path: Path) -> None:
    config = tmp_path / "pipeline.yaml"
    config.write_text("pipeline: {_target_: torchrec_prealloc.PreallocTrainPipelineBase}\n")
    out = tmp_path / "results"
    done = run_command(
        *("demo", "--config", str(config), "--steps", "6", "--batch-size", "32", "--out", str(out)),
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr
    assert "The losses of all 6 steps are equal bit for bit" in done.stdout
    for name in ("blocking_copy", "non_blocking_copy", "preallocated_non_blocking_copy"):
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(f"{name} "))
        assert "no GPU" not in line
        assert name in done.stderr, "progress bar"
    assert done.stdout.count("(simulated)") == 3
    assert "Warning" not in done.stderr
    content = json.loads((out / "demo.json").read_text())
    assert [row["simulated_side_mib"] > 0 for row in content["rows"]] == [False, True, False]
    assert content["settings"]["steps"] == 6
    assert content["machine"]["gpu"] == "no GPU"
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_unequal_losses_end_the_demo_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from torchrec_prealloc import ways

    def feed(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            batch.dense_features[0, 0] += number == 1
            yield batch

    sound = ways.three_ways

    def broken(section: Any) -> Any:
        first, second, third = sound(section)
        return first, second, dataclasses.replace(third, feed=feed)

    monkeypatch.setattr(ways, "three_ways", broken)
    assert main(["demo", "--steps", "4", "--batch-size", "32", "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr()
    assert "torchrec-prealloc demo: losses are not equal at step 2: blocking_copy 0." in printed.err
    assert "Traceback" not in printed.err
    assert "equal bit for bit" not in printed.out
    assert not (tmp_path / "out").exists()


def test_a_missing_data_set_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from torchrec_prealloc.demo import movielens

    monkeypatch.setattr(movielens, "PACKAGE", "no-such-distribution")
    assert main(["demo", "--steps", "1"]) == 1
    assert "which is missing: pip install --no-deps recbole" in capsys.readouterr().err
