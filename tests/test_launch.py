"""Unchanged trainers run with our pipelines: by the launcher, by one line of code, by the environment."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec.distributed
import torchrec.distributed.train_pipeline as package
from kinds import KINDS
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist, train_pipelines

import torchrec_prealloc
from torchrec_prealloc import PreallocConfig, PreallocTrainPipelineSparseDist, launch, prealloc_pipeline, simulator
from torchrec_prealloc.measured import MeasuredEngine, SummedEngine
from torchrec_prealloc.pipelines import PreallocPipeline

HERE = Path(__file__).parent
TRAINERS = HERE / "trainers"
LAUNCHER = ("-m", "torchrec_prealloc", "run")


@pytest.fixture
def _disabled_after() -> Iterator[None]:
    yield
    launch.disable()


def start(*command: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [*filter(None, [environment.pop("PYTHONPATH", "")]), str(HERE), str(HERE.parent)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHREC_PREALLOC")}
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {**inherited, "OMP_NUM_THREADS": "1", **environment, "PYTHONPATH": os.pathsep.join(paths + known)}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=200, env=environment, cwd=cwd, check=False
    )


def torchrun(ranks: int, *command: str) -> tuple[str, ...]:
    if ranks == 1:
        return command
    return ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *command)


def losses(file: Path, rank: int) -> tuple[str, str]:
    first, values = file.with_suffix(f".{rank}").read_text().splitlines()
    return first, values


@pytest.mark.parametrize(
    ("trainer", "ranks"),
    [
        ("dlrm", 1),
        ("dlrm_subclass", 2),
        pytest.param("dlrm", 2, marks=pytest.mark.long),
        pytest.param("dlrm_subclass", 1, marks=pytest.mark.long),
    ],
)
def test_a_trainers_losses_are_the_same_with_and_without_the_launcher(trainer: str, ranks: int, tmp_path: Path) -> None:
    script, plain, launched = str(TRAINERS / f"{trainer}.py"), tmp_path / "plain", tmp_path / "launched"
    without = start(*torchrun(ranks, script, "--losses", str(plain)))
    options = ("--prealloc-direct-bytes", "200")
    within = start(*torchrun(ranks, *LAUNCHER, *options, script, "--losses", str(launched)))
    assert without.returncode == within.returncode == 0, without.stderr + within.stderr
    for rank in range(ranks):
        (theirs, expected), (ours, seen) = losses(plain, rank), losses(launched, rank)
        assert seen == expected
        assert "Prealloc" not in theirs
        assert "PreallocTrainPipelineSparseDist" in ours
    if ranks == 1:
        assert "torchrec-prealloc: 34 batches, " in within.stderr  # 20, 2 that keep the pipeline full, twice 4 and 2
        assert "; host only: no device that times its copies" in within.stderr


def test_the_launcher_runs_a_module_too_and_can_be_told_to_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "losses"
    done = start(
        *LAUNCHER, "--no-prealloc", "-m", "dlrm", "--losses", str(file), "--steps", "3", PYTHONPATH=str(TRAINERS)
    )
    assert done.returncode == 0, done.stderr
    assert "PreallocTrainPipelineSparseDist" in losses(file, 0)[0]
    assert "torchrec-prealloc: 0 batches, 0 bytes in 0 copies: no pipeline of ours ran" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py"], "torchrec-prealloc run: there is no file nothing.py\n"),
        (["-m", "no.such.module"], "torchrec-prealloc run: there is no module no.such.module\n"),
        (["--prealloc-direct-bytes", "0", "nothing.py"], "torchrec-prealloc run: prealloc.direct_bytes: 0 is not"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_one_line(arguments: list[str], message: str) -> None:
    done = start(*LAUNCHER, *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_a_trainers_own_exit_and_errors_stay_its_own(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text("import sys\nprint(sys.argv, __name__)\nsys.exit(int(sys.argv[2]))\n")
    done = start(*LAUNCHER, str(script), "--help", "3")
    assert done.returncode == 3
    assert f"['{script}', '--help', '3'] __main__" in done.stdout
    script.write_text("raise ValueError('of the trainer')\n")
    assert "ValueError: of the trainer" in start(*LAUNCHER, str(script)).stderr


# One line of code ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_disabled_after")
def test_names_mean_ours_while_enabled_and_torchrecs_again_after() -> None:
    held = types.ModuleType("a_trainer_that_holds_it")
    held.Pipeline = TrainPipelineSparseDist  # type: ignore[attr-defined]
    sys.modules[held.__name__] = held
    places: list[Any] = [torchrec.distributed, package, train_pipelines]
    try:
        with torchrec_prealloc.enable({"direct_bytes": 5}):
            assert held.Pipeline is PreallocTrainPipelineSparseDist
            assert all(place.TrainPipelineSparseDist is PreallocTrainPipelineSparseDist for place in places)
            late = types.ModuleType("a_trainer_imported_while_enabled")
            sys.modules[late.__name__] = late
            exec("from torchrec.distributed import TrainPipelineSparseDist as P", vars(late))
            exec("from torchrec_prealloc import PreallocTrainPipelineSparseDist", vars(late))
        assert held.Pipeline is late.P is TrainPipelineSparseDist
        assert late.PreallocTrainPipelineSparseDist is PreallocTrainPipelineSparseDist
        assert all(place.TrainPipelineSparseDist is TrainPipelineSparseDist for place in places)
        assert train_pipelines.TrainPipelineSemiSync.__mro__[1] is TrainPipelineSparseDist
    finally:
        for name in (held.__name__, "a_trainer_imported_while_enabled"):
            sys.modules.pop(name, None)
    assert PreallocPipeline.default_config == PreallocConfig()
    assert PreallocPipeline.engine_type is MeasuredEngine


@pytest.mark.usefixtures("_disabled_after")
def test_a_trainer_that_enables_once_more_changes_the_options_only() -> None:
    torchrec_prealloc.enable()
    torchrec_prealloc.enable({"direct_bytes": 5})
    assert torchrec.distributed.TrainPipelineSparseDist is PreallocTrainPipelineSparseDist
    assert PreallocPipeline.default_config == PreallocConfig(direct_bytes=5)
    torchrec_prealloc.disable()
    assert torchrec.distributed.TrainPipelineSparseDist is TrainPipelineSparseDist


@pytest.mark.usefixtures("_disabled_after")
def test_every_class_of_the_table_is_replaced() -> None:
    from torchrec_prealloc import versions

    found = versions.available()
    torchrec_prealloc.enable()
    for name, theirs in found.items():
        module = sys.modules[theirs.__module__]
        assert getattr(module, name) is prealloc_pipeline(theirs)


@pytest.mark.usefixtures("_disabled_after", "one_rank")
def test_a_subclass_defined_while_enabled_derives_from_ours_and_has_the_options() -> None:
    torchrec_prealloc.enable({"direct_bytes": 7})

    class Mine(torchrec.distributed.TrainPipelineSparseDist):  # type: ignore[name-defined, misc]
        pass

    kind = KINDS["sparse_dist"]
    pipeline = kind.build(Mine, torch.device("cpu"))
    pipeline.progress(iter(kind.batches(3, torch.device("cpu"))))
    assert issubclass(Mine, PreallocTrainPipelineSparseDist)
    assert pipeline.prealloc == PreallocConfig(direct_bytes=7)
    assert pipeline.transfer_stats.batches == 3
    assert SummedEngine.summary().startswith("torchrec-prealloc: 3 batches")


@pytest.mark.usefixtures("_disabled_after")
def test_a_subclass_defined_before_is_named_in_a_warning() -> None:
    class Before(TrainPipelineBase):  # type: ignore[type-arg]
        pass

    with pytest.warns(UserWarning, match=r"Before was defined before .* use prealloc_pipeline\(Before\)"):
        torchrec_prealloc.enable()
    del Before
    gc.collect()  # later tests are not told of it


@pytest.mark.usefixtures("_disabled_after")
def test_a_wrong_option_is_refused_and_nothing_replaced() -> None:
    with pytest.raises(torchrec_prealloc.ConfigError, match=r"prealloc\.zzz"):
        torchrec_prealloc.enable({"zzz": 1})
    assert torchrec.distributed.TrainPipelineSparseDist is TrainPipelineSparseDist


@pytest.mark.usefixtures("_disabled_after")
def test_copies_and_waits_are_timed_by_events_where_there_is_a_device(simulated_accelerator: torch.device) -> None:
    torchrec_prealloc.enable()
    kind = KINDS["base"]
    with simulator.checked("random", 4):
        kind.run(kind.ours(), simulated_accelerator, 20)
    line = SummedEngine.summary()
    assert line.startswith("torchrec-prealloc: 20 batches, ")
    assert "the main stream waited" in line


# The environment -------------------------------------------------------------------------------------------------

ASK = "print(torchrec.distributed.TrainPipelineSparseDist.__name__)"


@pytest.mark.parametrize(
    "imports",
    [
        "import torchrec_prealloc, torchrec.distributed",
        "import torchrec.distributed, torchrec_prealloc",
        "import torchrec_prealloc; from torchrec.distributed.train_pipeline import train_pipelines; import torchrec",
    ],
)
def test_the_environment_enables_once_both_are_imported(imports: str) -> None:
    on = start("-c", f"{imports}\n{ASK}", TORCHREC_PREALLOC="1", TORCHREC_PREALLOC_OPTIONS="--prealloc-direct-bytes 9")
    assert on.stdout == "PreallocTrainPipelineSparseDist\n", on.stderr
    assert "torchrec-prealloc: 0 batches" in on.stderr
    off = start("-c", f"{imports}\n{ASK}", TORCHREC_PREALLOC="0")
    assert off.stdout == "TrainPipelineSparseDist\n"


def test_with_the_entry_point_an_import_of_torch_is_enough(tmp_path: Path) -> None:
    installed = tmp_path / "torchrec_prealloc-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torchrec-prealloc\nVersion: 0\n")
    (installed / "entry_points.txt").write_text("[torch.backends]\ntorchrec_prealloc = torchrec_prealloc.launch:arm\n")
    code = f"import torchrec.distributed\n{ASK}"
    on = start("-c", code, TORCHREC_PREALLOC="1", PYTHONPATH=str(tmp_path))
    assert on.stdout == "PreallocTrainPipelineSparseDist\n", on.stderr
    assert start("-c", code, PYTHONPATH=str(tmp_path)).stdout == "TrainPipelineSparseDist\n"
