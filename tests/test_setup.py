"""The set-up: what `make` does before it demonstrates or tests anything, and what setup.py declares."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import types
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
Usage = namedtuple("Usage", ["total", "used", "free"])

pytestmark = pytest.mark.skipif(not (ROOT / ".ci").is_dir(), reason="needs a clone of the repository")


@pytest.fixture
def bootstrap() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / ".ci" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clone(bootstrap: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that decide about the environment; the bootstrap is made to work there."""
    (tmp_path / ".ci").mkdir()
    for name in ("setup.py", "Makefile", ".ci/bootstrap.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setenv("FLAVOUR", "cpu")
    return tmp_path


@pytest.fixture(scope="module")
def declared() -> dict[str, Any]:
    """The arguments that setup.py gives to setuptools."""
    seen: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **arguments: seen.update(arguments))
        runpy.run_path(str(ROOT / "setup.py"))
    return seen


def not_found(name: str) -> None:
    """Loads a library as on a machine that does not have it."""
    raise OSError(f"{name}: cannot open shared object file")


def only_line(text: str) -> str:
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


class TestProblemsEndInOneLine:
    @pytest.mark.parametrize("version", [(3, 9, 18), (3, 15, 0), (2, 7, 18)])
    def test_a_python_without_packages_is_refused_by_its_version(self, bootstrap, version):
        assert f"Python {version[0]}.{version[1]} is not supported" in bootstrap.python_problem(version)

    @pytest.mark.parametrize("minor", [10, 11, 12, 13, 14])
    def test_pythons_with_packages_are_accepted(self, bootstrap, minor):
        assert bootstrap.python_problem((3, minor, 0)) is None

    def test_an_unsupported_python_ends_the_program_with_a_remedy(self, bootstrap, clone, monkeypatch, capsys):
        monkeypatch.setattr(bootstrap, "OLDEST", (3, 99))
        assert bootstrap.main() == 1
        assert "PYTHON=python3.12 make" in only_line(capsys.readouterr().err)

    def test_too_little_disk_is_said_before_anything_is_made(self, bootstrap, clone, monkeypatch, capsys):
        monkeypatch.setattr(bootstrap.shutil, "disk_usage", lambda place: Usage(10**12, 10**12 - 10**9, 10**9))
        assert bootstrap.main() == 1
        line = only_line(capsys.readouterr().err)
        assert "too little disk" in line
        assert "1.0 GB are free" in line
        assert not (clone / ".venv").exists()

    def test_a_python_without_venv_is_told_what_to_install(self, bootstrap, clone, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "ensurepip", None)
        monkeypatch.setattr(bootstrap.shutil, "disk_usage", lambda place: Usage(10**12, 0, 10**12))
        assert bootstrap.main() == 1
        assert "python3-venv" in only_line(capsys.readouterr().err)

    def test_no_network_is_said_after_a_real_attempt(self, clone):
        closed = "https://127.0.0.1:9/simple"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
        environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": closed, "PIP_RETRIES": "1", "PIP_TIMEOUT": "5"}
        command = [sys.executable, str(clone / ".ci" / "bootstrap.py")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 1
        assert only_line(done.stderr).startswith("set-up: no network")
        assert "NewConnectionError" in (clone / ".venv" / "set-up.log").read_text()

    @pytest.mark.parametrize("name", ["no-such-interpreter", "/bin/false"])
    def test_a_missing_interpreter_is_named(self, bootstrap, clone, name):
        command = ["make", "--no-print-directory", "set-up", f"PYTHON={name}"]
        done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        ours = [line for line in done.stderr.splitlines() if not line.startswith("make")]
        assert name in only_line("\n".join(ours))
        assert "Python {}.{} to {}.{}".format(*bootstrap.OLDEST, *bootstrap.NEWEST) in ours[0]

    @pytest.mark.parametrize(
        ("printed", "said"),
        [
            ("ERROR: Could not install: [Errno 28] No space left on device: 'x'\n", "disk ran full"),
            (
                "WARNING: Retrying (Retry(total=4, ...)) after connection broken by 'NewConnectionError(...)'\n"
                "ERROR: No matching distribution found for torch\n",
                "no network",
            ),
            ("ERROR: No matching distribution found for torch==2.13.0\n", "pip finds no torch==2.13.0"),
            (
                "ERROR: Cannot install a<2 because of conflicts.\nERROR: ResolutionImpossible: for help visit ...\n",
                "Cannot install a<2",
            ),
            ("Traceback ...\nImportError: libX.so: not found\n", "ImportError: libX.so: not found"),
            ("", "it said nothing"),
        ],
    )
    def test_the_cause_is_read_from_what_pip_printed(self, bootstrap, printed, said):
        assert said in only_line(bootstrap.pip_problem(printed))


class TestFlavour:
    def test_follows_the_driver_library(self, bootstrap, monkeypatch):
        monkeypatch.delenv("FLAVOUR", raising=False)
        monkeypatch.setattr(bootstrap.ctypes, "CDLL", not_found)
        assert bootstrap.flavour() == "cpu"
        monkeypatch.setattr(bootstrap.ctypes, "CDLL", lambda name: object())
        assert bootstrap.flavour() == "cuda"

    def test_can_be_overruled(self, bootstrap, monkeypatch):
        monkeypatch.setattr(bootstrap.ctypes, "CDLL", lambda name: object())
        monkeypatch.setenv("FLAVOUR", "cpu")
        assert bootstrap.flavour() == "cpu"

    @pytest.mark.parametrize(("wish", "said"), [("rocm", "one of: cpu, cuda"), ("cuda", "needs an NVIDIA driver")])
    def test_what_cannot_be_had_is_refused_before_it_is_downloaded(self, bootstrap, monkeypatch, wish, said):
        monkeypatch.setattr(bootstrap.ctypes, "CDLL", not_found)
        monkeypatch.setenv("FLAVOUR", wish)
        with pytest.raises(bootstrap.Problem, match=said):
            bootstrap.flavour()


class TestReuse:
    @pytest.fixture
    def environment(self, bootstrap, clone) -> Any:
        """One that is noted as finished. Its interpreter is the running one, which has pip."""
        made = bootstrap.Environment(clone, "cpu")
        made.python.parent.mkdir(parents=True)
        made.python.symlink_to(sys.executable)
        made.write_note(finished=True)
        return made

    def test_a_finished_environment_is_left_alone(self, bootstrap, environment, monkeypatch, capsys):
        monkeypatch.setattr(bootstrap.subprocess, "run", None)
        monkeypatch.setattr(bootstrap.subprocess, "Popen", None)
        assert bootstrap.main() == 0
        assert capsys.readouterr() == ("", "")

    @pytest.mark.parametrize("name", ["setup.py", ".ci/bootstrap.py"])
    def test_changed_needs_make_it_unfinished(self, environment, clone, name):
        with (clone / name).open("a") as file:
            file.write("# changed\n")
        assert not environment.is_finished()

    def test_an_interrupted_set_up_is_unfinished(self, environment):
        environment.write_note(finished=False)
        assert not environment.is_finished()
        environment.note.write_text("{")
        assert not environment.is_finished()

    @pytest.mark.parametrize(("key", "value"), [("python", "3.9"), ("flavour", "cuda"), ("place", "/elsewhere")])
    def test_one_made_for_something_else_is_not_built_upon(self, environment, key, value):
        environment.identity[key] = value
        assert not environment.is_finished()
        assert not environment.is_usable()

    def test_an_interpreter_that_does_not_start_is_not_built_upon(self, environment):
        environment.python.unlink()
        environment.python.symlink_to("/nowhere/python")
        assert not environment.is_finished()
        assert not environment.is_usable()


class TestTwoAtOnce:
    def test_the_second_says_that_it_waits_and_then_goes_on(self, bootstrap, clone):
        command = [sys.executable, str(clone / ".ci" / "bootstrap.py")]
        environment = os.environ | {"FLAVOUR": "rocm"}  # ends the second one as soon as it may start
        held = bootstrap.locked(clone)
        try:
            second = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            assert second.stdout is not None
            assert "waiting" in second.stdout.readline()
            assert second.poll() is None
        finally:
            os.close(held)
        assert "rocm" in second.communicate(timeout=30)[1]


class TestRequirements:
    def test_are_taken_from_installed_distributions_without_their_extras(self, bootstrap, clone):
        place = clone / ".venv" / "lib" / "python3.11" / "site-packages" / "torchrec-1.8.0.dist-info"
        place.mkdir(parents=True)
        lines = ["fbgemm-gpu", "torchmetrics==1.0.3", "old; python_version < '3'", 'iopath; extra == "datasets"']
        (place / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: torchrec\nVersion: 1.8.0\n"
            + "".join(f"Requires-Dist: {line}\n" for line in lines)
        )
        environment = bootstrap.Environment(clone, "cpu")
        assert list(environment.requirements("torchrec")) == lines[:3]
        assert list(environment.requirements("torchrec", extras=True)) == [*lines[:3], "iopath"]

    @pytest.mark.parametrize("text", ["fbgemm-gpu", "Fbgemm_GPU>=1.2", 'fbgemm.gpu; os_name > "3"', "fbgemm-gpu[x]"])
    def test_are_told_apart_by_the_normalised_name(self, bootstrap, text):
        assert bootstrap.distribution_name(text) == "fbgemm-gpu"


class TestDeclaration:
    def test_version_is_the_packages_own(self, declared):
        import torchrec_prealloc

        assert declared["version"] == torchrec_prealloc.__version__

    def test_name_command_and_python(self, declared, bootstrap):
        assert declared["name"] == "torchrec-prealloc"
        assert declared["entry_points"] == {"console_scripts": ["torchrec-prealloc = torchrec_prealloc.cli:main"]}
        assert declared["python_requires"] == ">={}.{}".format(*bootstrap.OLDEST)

    def test_requires_what_it_imports_in_closed_ranges(self, declared):
        needed = [Requirement(line) for line in declared["install_requires"]]
        assert {need.name for need in needed} == {"torch", "torchrec", "fbgemm-gpu", "pyyaml", "cloudpickle", "tqdm"}
        for need in needed:
            assert {clause.operator for clause in need.specifier} == {">=", "<"}, need

    def test_extras_exist(self, declared):
        assert {"plot", "demo", "simulator", "test", "dev"} <= declared["extras_require"].keys()

    def test_tested_versions_lie_within_the_ranges(self, declared, bootstrap):
        extras = [line for lines in declared["extras_require"].values() for line in lines]
        for need in map(Requirement, declared["install_requires"] + extras):
            if need.name in bootstrap.PINS:
                assert bootstrap.PINS[need.name] in SpecifierSet(str(need.specifier)), need

    def test_is_typed_and_carries_the_simulators_source(self, declared):
        assert "py.typed" in declared["package_data"]["torchrec_prealloc"]
        assert (ROOT / "torchrec_prealloc" / "py.typed").exists()
        assert declared["package_data"]["torchrec_prealloc.simulator"] == ["csrc/*"]

    def test_dependencies_are_listed_once(self):
        text = (ROOT / "pyproject.toml").read_text()
        assert not re.search(r"^\[project|^\[build-system|^dependencies", text, re.MULTILINE)


class TestVersions:
    @pytest.fixture
    def versions(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
        monkeypatch.syspath_prepend(ROOT / ".ci")
        module = importlib.import_module("test_versions")
        monkeypatch.setattr(module, "PLACE", tmp_path)
        yield module
        sys.modules.pop("test_versions")
        sys.modules.pop("bootstrap")

    def test_make_test_runs_the_oldest_and_the_newest_before_its_own(self, bootstrap, clone, versions):
        assert (versions.VERSIONS[0], versions.VERSIONS[-1]) == versions.FAST
        assert bootstrap.PINS["torchrec"] in versions.VERSIONS
        dry = ["make", "--no-print-directory", "--dry-run", "test", f"PYTHON={sys.executable}"]
        commands = subprocess.run(dry, cwd=clone, capture_output=True, text=True, check=True).stdout.splitlines()
        assert commands[-2].endswith(".ci/test_versions.py --fast")
        assert commands[-1].strip().endswith("-m pytest")

    def test_without_an_index_they_fail_in_one_line(self, versions, monkeypatch, capsys):
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        closed = {"CONFIG_FILE": os.devnull, "INDEX_URL": "https://127.0.0.1:9/simple", "RETRIES": "1", "TIMEOUT": "5"}
        for name, value in closed.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.setattr(sys, "argv", ["test_versions.py", "1.2.0"])
        assert versions.main() == 1
        assert only_line(capsys.readouterr().err).startswith("test-versions: TorchRec 1.2.0 is not tested: no network")

    def test_no_tests_and_no_end_count_as_failures(self, versions, monkeypatch):
        package = versions.PLACE / "1.2.0" / "torchrec"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        assert versions.run("1.2.0", package.parent, ("tests/there_is_none.py",)).failed == 1
        monkeypatch.setattr(versions, "AT_MOST", 0.1)
        late = versions.run("1.2.0", package.parent, ("tests/test_layout.py",))
        assert (late.failed, late.output) == (1, "\nnot finished after 0.1 s")

    def test_reasons_are_told_apart_by_what_they_say_not_by_the_version(self, versions):
        outcomes = [versions.Outcome(version) for version in ("1.2.0", "1.4.0")]
        for outcome in outcomes:
            outcome.skipped[f"TorchRec {outcome.version} has no X: it came with TorchRec 1.6"] = 3
        assert versions.reasons(outcomes) == [
            "  this TorchRec has no X: it came with TorchRec 1.6: 1.2.0 (3), 1.4.0 (3)"
        ]


class TestCommands:
    def test_ci_runs_what_a_newcomer_types(self):
        commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if not line.startswith("#")]
        assert commands[-1] == "exec make test"

    def test_help_lists_the_targets(self, clone):
        done = subprocess.run(["make", "help"], cwd=clone, capture_output=True, text=True, check=True)
        for target in ("demo", "test", "test-long", "test-versions", "lint", "clean"):
            assert re.search(rf"^  make {target} ", done.stdout, re.MULTILINE), done.stdout

    def test_our_own_warnings_are_seen(self, pytestconfig):
        for line in pytestconfig.getini("filterwarnings"):
            module = line.split(":")[3] if line.count(":") == 3 else None
            if line.startswith("ignore") and module is not None:
                assert not re.match(module, "torchrec_prealloc.config"), line
