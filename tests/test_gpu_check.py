"""`make gpu-check`: every part gets its turn and its row, whatever became of the others. Its parts mean something only
on a GPU; here they are rehearsed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / ".ci").is_dir():
    pytest.skip("needs a clone of the repository", allow_module_level=True)


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu_check = script("gpu_check")
Part, Reading = gpu_check.Part, gpu_check.Reading


def part(name: str, program: str, seconds: float = 30, **reading: Any) -> Any:
    """A part that runs a line of Python."""
    said = {"on": "CPU", "said": "fine", **reading}
    return Part(name, seconds, lambda work: [sys.executable, "-c", program], lambda work, gpu: Reading(**said))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs these parts; gives the exit code, the results by part, and what was printed."""

    def run(*parts: Any, arguments: tuple[str, ...] = ("--stretch", "1")) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setattr(gpu_check, "parts", lambda gpu: list(parts))
        monkeypatch.setattr(gpu_check, "describe", lambda: {"gpu": gpu_check.NO_GPU})
        code = gpu_check.main([str(tmp_path / "new" / "out"), *arguments])
        content = json.loads((tmp_path / "new" / "out" / "gpu-check.json").read_text())
        return code, {one["part"]: one for one in content["parts"]}, capsys.readouterr().out

    return run


def test_what_fails_is_a_row_and_the_others_still_run(run: Any, tmp_path: Path) -> None:
    def unreadable(work: Path, gpu: bool) -> Any:
        raise FileNotFoundError(work / "result.json")

    picture = tmp_path / "a.png"
    picture.write_bytes(b"png")
    code, results, printed = run(
        part("fails", "import sys; print('no such thing'); sys.exit(3)"),
        part("crashes", "import os; os.abort()"),
        Part("leaves-nothing", 30, lambda work: [sys.executable, "-c", "print('odd')"], unreadable),
        part("says-so", "pass", failed="nothing was measured"),
        part("skips", "pass", said="skipped by name: no GPU"),
        part("runs", "print(1)", figures={"x": 1}, pictures=(picture, tmp_path / "none.png")),
    )
    assert code == 1
    assert {name: one["result"] for name, one in results.items()} == {
        "fails": "failed", "crashes": "failed", "leaves-nothing": "failed", "says-so": "failed",
        "skips": "skipped", "runs": "passed",
    }  # fmt: skip
    assert results["fails"]["said"] == "exit code 3: fine"
    assert results["leaves-nothing"]["said"] == "exit code 0: odd"
    assert results["says-so"]["said"] == "nothing was measured"
    assert results["runs"]["figures"] == {"x": 1}
    assert "gpu-check: failed: fails, crashes, leaves-nothing, says-so" in printed
    assert sorted(path.name for path in (tmp_path / "new" / "out").iterdir()) == [
        "a.png", "gpu-check.json", "logs.tar.gz",
    ]  # fmt: skip


def test_all_is_well_where_nothing_failed(run: Any) -> None:
    code, _, printed = run(part("runs", "pass"), part("skips", "pass", said="skipped by name: no GPU"))
    assert code == 0
    assert "gpu-check: all is well" in printed


FORKS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_part_that_runs_over_is_ended_with_all_that_it_started(run: Any, tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    program = FORKS.replace("print(child.pid, flush=True)", f"open({str(noted)!r}, 'w').write(str(child.pid))")
    code, results, _ = run(part("sleeps", program, seconds=3), part("after", "pass"))
    assert code == 1
    assert results["sleeps"]["result"] == "timed out"
    assert results["after"]["result"] == "passed"
    child = Path("/proc") / noted.read_text()
    end = time.monotonic() + 10
    while child.exists() and "Z" not in (child / "stat").read_text().split()[2] and time.monotonic() < end:
        time.sleep(0.05)
    assert not child.exists() or "Z" in (child / "stat").read_text().split()[2]


def test_parts_for_which_no_time_is_left_are_said(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "TOTAL", 0)
    code, results, _ = run(part("one", "pass"))
    assert code == 1
    assert results["one"]["said"] == "no time was left for it"


def test_only_some(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    both = (part("one", "pass"), part("two", "pass"))
    assert list(run(*both, arguments=("--only", "two"))[1]) == ["two"]
    with pytest.raises(SystemExit):
        run(*both, arguments=("--only", "three"))
    assert "no part 'three'; there are: one, two" in capsys.readouterr().err


def test_the_machine_is_described_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (gpu_check.describe()["gpu"] == gpu_check.NO_GPU) == (not torch.cuda.is_available())
    monkeypatch.setattr(gpu_check, "MACHINE", "import no_such_module")
    assert "no_such_module" in gpu_check.describe()["error"]


def test_all_parts_together_take_less_than_eight_minutes() -> None:
    for gpu in (True, False):
        assert sum(one.seconds for one in gpu_check.parts(gpu)) <= gpu_check.TOTAL < 8 * 60
    assert len({one.name for one in gpu_check.parts(True)}) == len(gpu_check.parts(True))


def test_at_most_eight_files_come_back(tmp_path: Path) -> None:
    benchmarks = [one.name for one in gpu_check.parts(True) if one.name.startswith("bench-")]
    assert len(benchmarks) + len(gpu_check.WAYS) + len(["gpu-check.json", "logs.tar.gz"]) <= 8


def test_only_on_a_gpu_the_sanitizer_watches() -> None:
    by_name = {gpu: {one.name: dict(one.environment) for one in gpu_check.parts(gpu)} for gpu in (True, False)}
    assert by_name[True]["sanitizer"] == {"TORCH_CUDA_SANITIZER": "1"}
    assert by_name[False]["sanitizer"] == {}


def test_a_gpu_on_which_nothing_ran_fails(tmp_path: Path) -> None:
    case = '<testcase classname="t" name="{0}">{1}</testcase>'
    cases = {"skipped": '<skipped message="no CUDA device"/>', "bad": "<failure/>", "good": ""}

    def read(*names: str, gpu: bool) -> Any:
        inside = "".join(case.format(name, cases[name]) for name in names)
        (tmp_path / "tests.xml").write_text(f"<testsuites><testsuite>{inside}</testsuite></testsuites>")
        return gpu_check._read_tests(tmp_path, gpu)

    assert read("skipped", gpu=True).failed == "no test ran"
    assert read("skipped", gpu=False).said == "skipped by name, no GPU: 1 tests, all collected"
    reading = read("skipped", "bad", "good", gpu=True)
    assert (reading.said, reading.figures["failed"]) == ("1 passed, 1 skipped, 1 failed", ["t::bad"])
    assert reading.figures["skipped"] == {"no CUDA device": 1}


@pytest.mark.parametrize(("on", "gpu", "failed"), [("GPU", True, False), ("CPU", True, True), ("CPU", False, False)])
def test_a_benchmark_that_did_not_find_the_gpu_fails(on: str, gpu: bool, failed: bool, tmp_path: Path) -> None:
    (tmp_path / "transfer.json").write_text(json.dumps({"rows": [{"name": "a", "on": on}]}))
    (tmp_path / "log.txt").write_text("a table\nmissed: transfer: a: too slow\n")
    reading = gpu_check._read_bench("transfer")(tmp_path, gpu)
    assert bool(reading.failed) is failed
    assert reading.figures["missed"] == ["transfer: a: too slow"]
    assert reading.said == "1 rows, 1 targets missed"


def test_what_is_too_large_to_come_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "ARCHIVE_BYTES", 100)
    for name, size in (("tests/log.txt", 20), ("snapshots/large.pickle", 200), ("snapshots/small.pickle", 50)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    assert gpu_check.archive(tmp_path, tmp_path) == ["snapshots/large.pickle (200 bytes)"]
    with tarfile.open(tmp_path / "logs.tar.gz") as tar:
        assert tar.getnames() == ["tests-log.txt", "snapshots-small.pickle"]


# What the parts run ----------------------------------------------------------------------------------------------


def test_the_race_on_purpose_is_found_only_where_somebody_watches(
    simulated_accelerator: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_loops = script("gpu_loops")
    assert gpu_loops.control(simulated_accelerator, "simulator").outcome == "passed"
    monkeypatch.setattr(gpu_loops, "watched", lambda device: contextlib.nullcontext())
    result = gpu_loops.control(simulated_accelerator, "simulator")
    assert (result.outcome, result.said) == ("failed", "nothing was found")


def test_only_what_torchrecs_own_class_does_too_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_loops = script("gpu_loops")

    class Kind:
        def __init__(self, **fails: Exception) -> None:
            self.fails = fails

        def ours(self) -> str:
            return "ours"

        def theirs(self) -> str:
            return "theirs"

        def run(self, cls: str, device: torch.device, steps: int, **options: Any) -> list[int]:
            if cls in self.fails:
                raise self.fails[cls]
            return list(range(steps))

    def run(**fails: Exception) -> tuple[str, str]:
        outcome: tuple[str, str] = gpu_loops._run(Kind(**fails), torch.device("cpu"), gpu_loops.PreallocConfig())
        return outcome

    assert run() == ("passed", "")
    assert run(ours=ValueError("no")) == ("failed", "ValueError: no")
    assert run(ours=ValueError("no"), theirs=OSError("no")) == ("failed", "ValueError: no")
    both = run(ours=ValueError("no"), theirs=ValueError("nor this"))
    assert both == ("skipped", "TorchRec's own class fails too: ValueError: nor this")


def test_the_snapshots_are_as_headroom_reads_them(
    simulated_accelerator: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrec_prealloc.headroom.analysis import analyse

    gpu_snapshots = script("gpu_snapshots")
    monkeypatch.setattr(gpu_snapshots, "STEPS", 4)
    monkeypatch.setattr(gpu_snapshots, "BATCH_MIB", 2)
    assert gpu_snapshots.main(tmp_path) == 0
    found = {one["way"]: one for one in json.loads((tmp_path / "snapshots.json").read_text())}
    assert list(found) == list(gpu_check.WAYS)
    for way, figures in found.items():
        (read,) = analyse(tmp_path / f"{way}.pickle", None, None, lambda count: None)
        assert read.has_history
        assert figures["peak_reserved"] > 0
    assert gpu_check._read_snapshots(tmp_path, gpu=False).on == "simulator"


def test_torch_takes_the_calls_that_only_a_gpu_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their signatures: nothing can be called without a GPU."""
    gpu = script("gpu_snapshots").Gpu()
    names = ("synchronize", "empty_cache", "reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved")
    calls = {name: create_autospec(getattr(torch.cuda, name), return_value=1) for name in names}
    private = ("_record_memory_history", "_dump_snapshot")
    memory = {name: create_autospec(getattr(torch.cuda.memory, name)) for name in private}
    for module, specs in ((torch.cuda, calls), (torch.cuda.memory, memory)):
        for name, spec in specs.items():
            monkeypatch.setattr(module, name, spec)
    gpu.start()
    gpu.dump(tmp_path / "a.pickle")
    assert gpu.peaks() == (1, 1)
    started, stopped = memory["_record_memory_history"].call_args_list
    assert started.kwargs["stacks"] == "python"
    assert stopped.kwargs == {"enabled": None}
    assert memory["_dump_snapshot"].call_args.args == (str(tmp_path / "a.pickle"),)


def test_make_asks_where_the_results_go() -> None:
    done = subprocess.run(
        ["make", "gpu-check", "SETUP=no", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "make gpu-check OUT=DIR" in done.stderr
    assert ".ci/bootstrap.py" not in done.stdout


@pytest.mark.long
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    command = ["make", "gpu-check", "SETUP=no", f"PYTHON={sys.executable}", f"OUT={tmp_path / 'out'}"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    results = {one["part"]: one["result"] for one in content["parts"]}
    assert results.pop("tests") == "skipped"
    assert set(results.values()) == {"passed"}
    files = list((tmp_path / "out").iterdir())
    assert len(files) == 8
    assert all(path.stat().st_size < 16 << 20 for path in files)
