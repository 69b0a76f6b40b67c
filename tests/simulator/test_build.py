"""Where the extension is built, and what happens when it cannot be."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from torchrec_prealloc.simulator import BuildError, available, build

pytest_plugins = ["pytester"]


def test_importing_builds_and_loads_nothing(environment: dict[str, str]) -> None:
    code = (
        "import sys, torch; from torchrec_prealloc import simulator; import torchrec_prealloc.simulator.testing;"
        "assert simulator.build._module is None; assert not torch.mtia.is_available()"
    )
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_the_cache_is_keyed_by_torch_python_and_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = build._library().parent.name
    assert torch.__version__ in key
    assert sys.implementation.cache_tag in key
    (tmp_path / "a.cpp").write_text("int a;")
    monkeypatch.setattr(build, "_SOURCES", tmp_path)
    first = build._library()
    (tmp_path / "a.cpp").write_text("int b;")
    assert build._library() != first


def test_the_cache_is_the_users_where_the_environment_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(os, "access", lambda *_: True)
    assert build._cache().is_relative_to(tmp_path / "venv")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert build._cache() == tmp_path / "torchrec_prealloc" / "simulator"
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert build._cache() == tmp_path / "torchrec_prealloc" / "simulator"


def slow_compile(folder: Path) -> Path:
    with open(folder.parent / "builds", "a") as file:
        file.write("x")
    time.sleep(0.5)
    (folder / "built.so").write_text("whole")
    return folder / "built.so"


def build_slowly(library: Path) -> None:
    build._compile = slow_compile
    build._build(library)
    assert library.read_text() == "whole"


def test_two_processes_build_once(tmp_path: Path) -> None:
    library = tmp_path / "key" / "x.so"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=build_slowly, args=(library,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (library.parent / "builds").read_text() == "x"


def test_a_killed_build_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "key" / "x.so"
    process = multiprocessing.get_context("fork").Process(target=build_slowly, args=(library,))
    process.start()
    while not (library.parent / "builds").exists():
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not library.exists()
    monkeypatch.setattr(build, "_compile", slow_compile)
    build._build(library)
    assert library.read_text() == "whole"
    assert not list(library.parent.glob("build-*"))


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_module", None)
    monkeypatch.setattr(build, "_cache", lambda: tmp_path)


def test_without_a_compiler_there_is_one_clear_error(nothing_built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    usable, reason = available()
    assert not usable
    assert "no-such-compiler" in reason
    assert "install g++" in reason
    with pytest.raises(BuildError, match="install g\\+\\+"):
        build.load()


def test_the_compilers_own_error_is_shown(nothing_built: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.cpp").write_text("this is no C++;")
    monkeypatch.setattr(build, "_SOURCES", tmp_path)
    with pytest.raises(BuildError, match=r"broken\.cpp"):
        build.load()


def test_a_gpu_in_sight_is_refused(nothing_built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(BuildError, match="CUDA_VISIBLE_DEVICES"):
        build.load()


@pytest.mark.parametrize(("ci", "outcome"), [("", "skipped"), ("true", "errors")])
def test_the_fixture_skips_by_name_or_fails_in_ci(
    pytester: pytest.Pytester, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, ci: str, outcome: str
) -> None:
    for name, value in {
        **environment, "CXX": "no-such-compiler", "XDG_CACHE_HOME": str(pytester.path), "CI": ci
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    pytester.makeconftest(
        "import pathlib\n"
        "from torchrec_prealloc.simulator import build\n"
        "from torchrec_prealloc.simulator.testing import simulated_accelerator\n"
        f"build._cache = lambda: pathlib.Path({str(pytester.path)!r})\n"
    )
    pytester.makepyfile("def test_it(simulated_accelerator): pass")
    result = pytester.runpytest_subprocess("-rs")
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines(["*install g++*"])
