"""The environment: what is installed, what goes together, what is said where something cannot be imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torchrec_prealloc.doctor import imports
from torchrec_prealloc.doctor.allocator_settings import read_settings
from torchrec_prealloc.doctor.environment import FBGEMM, TORCH_OF_FBGEMM, TORCHREC, Environment, environment

# A process that imports these is fast, and has whatever GPU is wanted.
TORCH = """
__version__ = {version!r}
class version: cuda, hip = {cuda!r}, None
class cuda:
    is_available = staticmethod(lambda: bool({gpus}))
    device_count = staticmethod(lambda: len({gpus}))
    get_device_name = staticmethod(lambda index: {gpus}[index])
class ops:
    class fbgemm: {operator} = None
class _C:
    _dispatch_has_kernel_for_dispatch_key = staticmethod(lambda name, key: {kernels!r})
    _cuda_getDriverVersion = staticmethod(lambda: {driver})
"""
Install = Callable[..., Environment]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Looks at an environment in which these distributions are installed, and these modules are found."""

    def install(
        torch: str = "2.13.0",
        torchrec: str = "1.8.0",
        fbgemm: dict[str, str] | None = None,
        cuda: str | None = None,
        gpus: tuple[str, ...] = (),
        kernels: bool = True,
        driver: int = 0,
        operator: str = "asynchronous_complete_cumsum",
        source: dict[str, str] | None = None,
    ) -> Environment:
        distributions = {**dict.fromkeys((*FBGEMM, *TORCHREC, "torch"), ""), "torch": torch, "torchrec": torchrec}
        distributions.update({"fbgemm-gpu-cpu": "1.8.0"} if fbgemm is None else fbgemm)
        monkeypatch.setattr(
            "torchrec_prealloc.doctor.environment._installed", lambda name: distributions.get(name, "")
        )
        fake = TORCH.format(version=torch, cuda=cuda, gpus=gpus, kernels=kernels, driver=driver, operator=operator)
        sources = {"torch": fake, "fbgemm_gpu": "", "torchrec": f"__version__ = {torchrec!r}", **(source or {})}
        for name, text in sources.items():
            (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return environment()

    return install


def problem(found: Environment) -> str:
    (only,) = found.problems
    assert f"  PROBLEM  {only}" in str(found)
    return only


def test_what_is_installed_here_is_told_and_goes_together() -> None:
    import torch
    import torchrec

    found = environment()
    assert (found.torch, found.torchrec) == (torch.__version__, torchrec.__version__)
    assert found.problems == ()
    assert "These versions go together, and can be imported." in str(found)
    assert bool(found.gpus) == torch.cuda.is_available()


@pytest.mark.parametrize(("fbgemm", "torch"), TORCH_OF_FBGEMM.items())
def test_pairs_that_go_together(installed: Install, fbgemm: str, torch: str) -> None:
    found = installed(torch=f"{torch}.1+cu130", torchrec=f"{fbgemm}.0", fbgemm={"fbgemm-gpu": f"{fbgemm}.0"})
    assert found.problems == found.notes == ()


def test_a_pair_that_does_not_go_together_is_a_problem_with_both_ways_out(installed: Install) -> None:
    assert problem(installed(torch="2.12.1", fbgemm={"fbgemm-gpu-cpu": "1.8.0"})) == (
        "fbgemm-gpu-cpu 1.8.0 was built for torch 2.13, and torch is 2.12.1; install fbgemm-gpu-cpu==1.7.*, or "
        "torch==2.13.*"
    )


def test_versions_that_nothing_is_known_of_are_a_note(installed: Install) -> None:
    found = installed(torch="2.16.0", torchrec="1.8.0", fbgemm={"fbgemm-gpu-nightly": "2027.1.1"})
    assert found.problems == ()
    assert "note     whether fbgemm-gpu-nightly 2027.1.1 goes with this torch is not known" in str(found)
    (note,) = installed(torchrec="1.6.0").notes
    assert note == "TorchRec 1.6.0 is mostly used with FBGEMM 1.6; fbgemm-gpu-cpu is 1.8.0"


def test_a_build_without_kernels_for_the_gpu_is_a_problem(installed: Install) -> None:
    found = installed(cuda="13.0", gpus=("H",), kernels=False, driver=13000)
    assert "no kernels for the GPU" in problem(found)
    assert "GPU      H; driver: CUDA up to 13.0" in str(found)
    assert installed(cuda="13.0", gpus=("H",), kernels=True).problems == ()


def test_two_builds_over_each_other_are_a_problem(installed: Install) -> None:
    found = installed(fbgemm={"fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"})
    assert problem(found).startswith("two FBGEMMs are installed over each other (fbgemm-gpu and fbgemm-gpu-cpu)")


def test_a_torch_for_cuda_without_gpu_is_a_note(installed: Install) -> None:
    assert installed(cuda="13.0").notes == ("torch is built for CUDA 13.0 and sees no GPU",)


# Imports that fail -----------------------------------------------------------------------------------------------

NO_DRIVER = "raise OSError('libnvidia-ml.so.1: cannot open shared object file')"


def test_the_cuda_build_without_a_driver_is_told_with_what_to_install(installed: Install) -> None:
    found = installed(fbgemm={"fbgemm-gpu": "1.8.0"}, source={"fbgemm_gpu": NO_DRIVER, "torchrec": "import fbgemm_gpu"})
    assert problem(found) == (
        "FBGEMM cannot be imported: OSError: libnvidia-ml.so.1: cannot open shared object file; the CUDA build wants a "
        "driver; without one: pip uninstall fbgemm-gpu, then pip install --no-deps fbgemm-gpu-cpu==1.8.0"
    )


def test_an_fbgemm_without_its_operators_is_a_problem(installed: Install) -> None:
    assert "imported without its operators" in problem(installed(operator="another"))


def test_a_torchrec_that_fails_by_itself_is_a_problem(installed: Install) -> None:
    found = installed(source={"torchrec": "raise ImportError('no module named tensordict')"})
    assert problem(found) == "TorchRec cannot be imported: ImportError: no module named tensordict"


def test_nothing_else_is_said_where_torch_fails(installed: Install) -> None:
    found = installed(source={"torch": "raise ImportError('libc10.so')"})
    assert problem(found) == "torch cannot be imported: ImportError: libc10.so"


def test_an_import_that_ends_the_process_is_told(installed: Install) -> None:
    found = installed(source={"fbgemm_gpu": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"})
    assert "FBGEMM cannot be imported: its import ends the process (SIGSEGV)" in found.problems[0]
    assert found.imports["torchrec"].error.startswith("it was not tried")


def test_an_import_without_end_is_told(installed: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "SECONDS", 1)
    found = installed(source={"torchrec": "import time; time.sleep(60)"})
    assert problem(found) == "TorchRec cannot be imported: its import takes longer than 1 s"


def test_nothing_is_imported_in_this_process(installed: Install) -> None:
    import subprocess

    code = (
        "import sys\nfrom torchrec_prealloc.doctor.environment import environment\nenvironment()\n"
        "sys.exit('torch' in sys.modules)"
    )
    installed()
    root = str(Path(__file__).parents[2])
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


# What was set ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "names", "effect"),
    [
        ("expandable_segments:True", ["expandable_segments"], "prealloc.size_rounding: 0"),
        ("expandable_segments:False", ["expandable_segments"], ""),
        ("roundup_power2_divisions:[256:1,512:2,>:8],max_split_size_mb:128", None, "torch rounds sizes itself"),
        ("max_split_size_mb:128", ["max_split_size_mb"], "blocks over 128 MB are not split"),
        ("backend:cudaMallocAsync", ["backend"], "CUDA's own pool"),
        ("backend:native", ["backend"], ""),
        (" garbage_collection_threshold : 0.8 ", ["garbage_collection_threshold"], "idle blocks go back"),
        ("something_new:1", ["something_new"], ""),
        ("", [], None),
        (",,", [], None),
    ],
)
def test_allocator_settings_are_told_with_their_effect(value: str, names: list[str] | None, effect: str | None) -> None:
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        found = read_settings({variable: value})
        wanted = ["roundup_power2_divisions", "max_split_size_mb"] if names is None else names
        assert [setting.name for setting in found] == wanted
        assert {setting.variable for setting in found} <= {variable}
        if effect is not None:
            assert found[0].effect.find(effect) >= 0
            assert bool(found[0].effect) == bool(effect)


def test_switches_that_serialise_everything_are_told() -> None:
    found = read_settings({"CUDA_LAUNCH_BLOCKING": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    assert ["buffers: ring" in str(found[0]), "nothing overlaps" in str(found[1])] == [True, True]
    assert read_settings({"CUDA_LAUNCH_BLOCKING": "0", "PYTORCH_NO_CUDA_MEMORY_CACHING": ""}) == ()


def test_our_own_switches_are_told_and_checked(installed: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHREC_PREALLOC", "1")
    monkeypatch.setenv("TORCHREC_PREALLOC_OPTIONS", "--prealloc-buffers ring")
    found = installed()
    assert found.problems == ()
    assert "set      TORCHREC_PREALLOC=1: pipelines are replaced" in str(found)
    monkeypatch.setenv("TORCHREC_PREALLOC", "yes")
    assert "TORCHREC_PREALLOC=yes: only 1 replaces the pipelines; this does not" in str(installed())
    for options, reason in (
        ("--prealloc-direct-bytes many", "argument --prealloc-direct-bytes: invalid int value: 'many'"),
        ("--prealloc-direct-bytes 0", "prealloc.direct_bytes: 0 is not an int of at least 1"),
        ("--nonsense", "unrecognized arguments: --nonsense"),
        ("'", "No closing quotation"),
    ):
        monkeypatch.setenv("TORCHREC_PREALLOC_OPTIONS", options)
        assert problem(installed()) == f"TORCHREC_PREALLOC_OPTIONS={options}: {reason}"
