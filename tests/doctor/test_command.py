"""`torchrec-prealloc doctor`: a trainer is stopped after its first batch, a config is checked, the status is right."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineBase, train_pipelines

from torchrec_prealloc.cli import main
from torchrec_prealloc.doctor import environment
from torchrec_prealloc.doctor.environment import Environment
from torchrec_prealloc.doctor.imports import Import
from torchrec_prealloc.launch import OPTIONS, SWITCH
from torchrec_prealloc.versions import at_least, installed_version

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORKS = {name: Import("", {"version": "1.0"}) for name in ("torch", "fbgemm_gpu", "torchrec")}


def looks(*problems: str, imports: dict[str, Import] = WORKS) -> Environment:
    return Environment("3", "2", "1", {}, imports, (), "", (), (), problems, ())


@pytest.fixture(autouse=True)
def _sound(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An environment without problems, and what a launched trainer changes put back."""
    monkeypatch.setattr(environment, "environment", looks)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(SWITCH, "0")
    monkeypatch.setenv(OPTIONS, "")
    yield
    assert train_pipelines.TrainPipelineBase is TrainPipelineBase


# A trainer -------------------------------------------------------------------------------------------------------

TRAINER = """
import sys, torch
from recsys import make_batches, unsharded
from torchrec.distributed.train_pipeline import {cls}
model, optimizer = unsharded(torch.device("cpu"))
pipeline = {cls}(model, optimizer, torch.device("cpu"))
batches = iter(make_batches(9, seed=1))
done = 0
try:
    while True:
        try:
            pipeline.progress(batches)
            done += 1
        except StopIteration:
            break
        except Exception:
            print("the trainer caught it")
finally:
    print("steps done:", done, sys.argv[1:])
"""


def trainer(tmp_path: Path, text: str = TRAINER.format(cls="TrainPipelineBase")) -> str:
    file = tmp_path / "trainer.py"
    file.write_text(text)
    return str(file)


def test_a_trainer_is_stopped_after_its_first_batch_and_that_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--prealloc-direct-bytes", "500", trainer(tmp_path), "--device", "its own"]) == 0
    out = capsys.readouterr().out
    assert "steps done: 0 ['--device', 'its own']" in out
    assert "the trainer caught it" not in out
    assert "The trainer (on cpu) was stopped after 1 batch. The first:" in out
    assert "A batch of class Batch for" in out
    assert "direct_bytes (500 B)" in out
    assert "int64 lengths or offsets: batch.sparse_features._lengths" in out


def test_it_runs_as_long_as_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-prealloc", "--steps", "4", "--device", "cpu", "--pinned", trainer(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "steps done: 2 []" in printed.out  # the pipeline copies ahead
    assert "was stopped after 4 batches" in printed.out
    assert "A batch of class Batch for cpu" in printed.out
    assert "4 batches" in printed.err


def test_a_trainer_that_ends_before_is_explained_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--steps", "100", trainer(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "steps done: 9 []" in out
    assert "ended after 9 batches. The first:" in out


def test_a_batch_copied_in_a_thread_stops_the_trainer_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRAINER.format(cls="EvalPipelineSparseDist").replace("unsharded", "sharded")
    text = text.replace("model, optimizer =", SINGLE_RANK.format(tmp_path) + "model, optimizer =")
    assert main(["doctor", trainer(tmp_path, text)]) == 0
    assert "was stopped after 1 batch" in capsys.readouterr().out
    assert not dist.is_initialized()


SINGLE_RANK = """
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{}/rendezvous", rank=0, world_size=1)
"""


@pytest.mark.parametrize("ending", ["", "import sys; sys.exit()", "raise SystemExit(0)"])
def test_a_trainer_without_a_pipeline_is_one_line(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", trainer(tmp_path, ending)]) == 1
    assert "ended, and gave no batch to one of TorchRec's pipelines" in capsys.readouterr().err


def test_a_trainers_errors_stay_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        main(["doctor", trainer(tmp_path, "1 / 0")])
    with pytest.raises(SystemExit) as ended:
        main(["doctor", trainer(tmp_path, "raise SystemExit(3)")])
    assert ended.value.code == 3
    assert main(["doctor", "nothing.py"]) == 1
    assert "there is no file nothing.py" in capsys.readouterr().err


def test_a_batch_that_the_engine_refuses_is_told_before_the_trainers_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TRAINER.format(cls="TrainPipelineBase")
    text = text.replace("make_batches(9, seed=1)", "[3]").replace("Exception", "ImportError")
    with pytest.raises(TypeError):
        main(["doctor", trainer(tmp_path, text)])
    assert "BatchError: a batch of type int is no tensor" in capsys.readouterr().out


# A config --------------------------------------------------------------------------------------------------------


def test_a_config_without_a_batch_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(ROOT / "configs" / "sparse_dist.yaml")]) == 0
    out = capsys.readouterr().out
    assert "PreallocTrainPipelineSparseDist with execute_all_batches=True, of TorchRec" in out
    assert "It names no batch" in out


def test_a_described_batch_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not at_least("1.7", installed_version()):
        pytest.skip(f"TorchRec {installed_version()} frees no features early")
    file = tmp_path / "config.yaml"
    file.write_text(
        "pipeline: {_target_: TrainPipelineSparseDist, free_features_storage_early: true}\n"
        "batch: {rows: 1000, sparse: {a: 3, b: 2}, dense: 4}\n"
    )
    assert main(["doctor", "--pinned", "--device", "cuda", str(file)]) == 0
    out = capsys.readouterr().out
    assert "It is TorchRec's: its batches are copied as TorchRec does. Ours: _target_: torchrec_prealloc." in out
    assert "2 keys (a, b), stride 1000, 5000 values" in out
    assert "into 2 allocations" in out  # the KJT has its own
    assert "int64 values" not in out


def test_a_batch_of_the_trainers_own_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_batches.py").write_text("import torch\ndef make(n): return {'ids': torch.arange(n)}\n")
    (tmp_path / "config.yml").write_text(
        "pipeline: {_target_: torchrec_prealloc.PreallocTrainPipelineBase, prealloc: {direct_bytes: 100}}\n"
        "batch: {_target_: their_batches.make, n: 1000}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "config.yml"]) == 0
    out = capsys.readouterr().out
    assert "['ids']" in out
    assert "int64 values: batch['ids'] (7.8 KiB), none beyond 999 in this batch" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no `pipeline:` mapping"),
        ("pipeline: {_target_: PreallocTrainPipelineBsae}", "did you mean PreallocTrainPipelineBase?"),
        ("pipeline: {_target_: torchrec_prealloc.PreallocTrainPipelineBase, depth: 2}", "pipeline.depth: "),
        ("pipeline: {_target_: PreallocTrainPipelineBase, prealloc: {direct: 2}}", "prealloc.direct: unknown option"),
        ("pipeline: {_target_: TrainPipelineBase}\nbatch: {row: 2}", "batch.row: unknown"),
        ("pipeline: {_target_: TrainPipelineBase}\nbatch: {_target_: no.such.thing}", "cannot import no.such"),
    ],
)
def test_what_is_wrong_in_a_config_is_one_line_that_names_it(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert main(["doctor", str(file)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"torchrec-prealloc doctor: {file}: ")
    assert message in err
    assert err.count("\n") == 1


def test_flags_go_before_the_files_options_and_a_wrong_device_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "pipeline: {_target_: PreallocTrainPipelineBase, prealloc: {direct_bytes: 100}}\nbatch: {rows: 10, dense: 4}\n"
    )
    assert main(["doctor", "--prealloc-direct-bytes", "50", str(file)]) == 0
    assert "direct_bytes (50 B)" in capsys.readouterr().out
    assert main(["doctor", "--prealloc-direct-bytes", "0", str(file)]) == 1
    assert "prealloc.direct_bytes: 0 is not an int" in capsys.readouterr().err
    assert main(["doctor", str(file), "--pinned"]) == 1
    assert "--pinned: what follows a config is nobody's; flags go before it" in capsys.readouterr().err
    assert main(["doctor", "--device", "tpu", str(file)]) == 1
    assert capsys.readouterr().err.startswith("torchrec-prealloc doctor: --device: device 'tpu': ")


def test_a_batch_of_a_config_that_the_engine_refuses_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_batches.py").write_text("def make(): return 3\n")
    (tmp_path / "config.yaml").write_text(
        "pipeline: {_target_: TrainPipelineBase}\nbatch: {_target_: no_batches.make}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "config.yaml"]) == 1
    assert "doctor: config.yaml: a batch of type int is no tensor" in capsys.readouterr().err


# The status ------------------------------------------------------------------------------------------------------


def test_the_environment_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith("Environment\n")


def test_a_problem_is_status_1_and_the_target_is_explained_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "environment", lambda: looks("these do not go together; install others"))
    assert main(["doctor", trainer(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "PROBLEM  these do not go together; install others" in printed.out
    assert "A batch of class Batch" in printed.out
    assert printed.err.endswith("torchrec-prealloc doctor: these do not go together; install others\n")


def test_where_something_cannot_be_imported_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = looks("FBGEMM: no", "TorchRec: no", imports={**WORKS, "torchrec": Import("no", {})})
    monkeypatch.setattr(environment, "environment", lambda: broken)
    assert main(["doctor", trainer(tmp_path, "print('ran')")]) == 1
    printed = capsys.readouterr()
    assert "ran" not in printed.out
    assert printed.err == "torchrec-prealloc doctor: 2 problems in this environment: see PROBLEM above\n"


def test_the_command_runs_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libc10.so is missing')")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "torchrec_prealloc", "doctor", "trainer.py"],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    problem = "torch cannot be imported: ImportError: libc10.so is missing"
    assert (done.returncode, done.stderr) == (1, f"torchrec-prealloc doctor: {problem}\n")
    assert f"PROBLEM  {problem}" in done.stdout


@pytest.mark.long
def test_all_ranks_stop_and_one_speaks(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(HERE.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "torchrec_prealloc", "doctor", str(HERE.parent / "trainers" / "dlrm.py")),
            *("--losses", str(tmp_path / "losses")),
        ],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("was stopped after 1 batch") == 1
    assert done.stdout.count("Environment") == 1
    assert not list(tmp_path.glob("losses.*"))
