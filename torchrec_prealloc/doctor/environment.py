"""The environment of a trainer: which versions are installed, whether they go together, and what was set."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import os
import platform
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec_prealloc.doctor import allocator_settings
from torchrec_prealloc.doctor.imports import Import, try_imports
from torchrec_prealloc.launch import OPTIONS, SWITCH

FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-nightly", "fbgemm-gpu-nightly-cpu")
TORCHREC = ("torchrec", "torchrec-nightly")
TORCH_OF_FBGEMM = {
    "1.2": "2.7", "1.3": "2.8", "1.4": "2.9", "1.5": "2.10", "1.6": "2.11", "1.7": "2.12", "1.8": "2.13", "1.9": "2.14",
}  # fmt: skip
"""FBGEMM is built for one torch each."""
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Environment:
    """What a trainer finds. `str()` is the report."""

    python: str
    torch: str
    torchrec: str
    """Versions as they say themselves, or as they are installed; empty where they are not."""
    fbgemm: Mapping[str, str]
    """Versions by distribution."""
    imports: Mapping[str, Import]
    gpus: tuple[str, ...]
    driver: str
    settings: tuple[allocator_settings.Setting, ...]
    switches: tuple[str, ...]
    problems: tuple[str, ...]
    """What has to be put right before anything can be trained, each with its remedy."""
    notes: tuple[str, ...]

    def __str__(self) -> str:
        fbgemm = ", ".join(f"{version} ({name})" for name, version in self.fbgemm.items()) or "not installed"
        gpus = ", ".join(self.gpus) or "none that torch sees"
        rows = [
            ("Python", self.python),
            ("torch", f"{self.torch or 'not installed'}{_build(self.imports['torch'])}"),
            ("TorchRec", self.torchrec or "not installed"),
            ("FBGEMM", fbgemm),
            ("GPU", f"{gpus}; driver: {self.driver or 'none'}"),
            *(("set", str(setting)) for setting in self.settings),
            *(("set", switch) for switch in self.switches),
            *(("note", note) for note in self.notes),
            *(("PROBLEM", problem) for problem in self.problems),
        ]
        if not self.problems:
            rows.append(("", "These versions go together, and can be imported."))
        return "\n".join(["Environment", *(f"  {name:<9}{text}".rstrip() for name, text in rows)])


def environment() -> Environment:
    """Look at this one. Imports are tried in a process of their own (a few seconds), nothing is imported here."""
    imports = try_imports()
    fbgemm = {name: version for name in FBGEMM if (version := _installed(name))}
    torch = _version("torch", imports, ("torch",))
    torchrec = _version("torchrec", imports, TORCHREC)
    known = imports["torch"].known
    problems = [*_import_problems(imports, fbgemm), *_pair_problems(torch, fbgemm, imports)]
    problems += [f"two FBGEMMs are installed over each other ({' and '.join(fbgemm)}); uninstall both, install one"] * (
        len(fbgemm) > 1
    )
    switches, wrong = _switches()
    return Environment(
        python=platform.python_version(),
        torch=torch,
        torchrec=torchrec,
        fbgemm=fbgemm,
        imports=imports,
        gpus=tuple(known.get("gpus", ())),
        driver=_driver(known),
        settings=allocator_settings.read_settings(),
        switches=switches,
        problems=(*problems, *wrong),
        notes=tuple(_notes(torchrec, fbgemm, known)),
    )


# Imports ---------------------------------------------------------------------------------------------------------


def _import_problems(imports: Mapping[str, Import], fbgemm: Mapping[str, str]) -> list[str]:
    failed = {name: one.error for name, one in imports.items() if one.error}
    if "torch" in failed:
        return [f"torch cannot be imported: {failed['torch']}"]
    problems = []
    if "fbgemm_gpu" in failed:
        remedy = "install the FBGEMM that goes with this torch"
        if "libnvidia-ml" in failed["fbgemm_gpu"] or "libcuda" in failed["fbgemm_gpu"]:
            version = next(iter(fbgemm.values()), "VERSION")
            remedy = (
                "the CUDA build wants a driver; without one: pip uninstall fbgemm-gpu, then "
                f"pip install --no-deps fbgemm-gpu-cpu=={version}"
            )
        problems.append(f"FBGEMM cannot be imported: {failed['fbgemm_gpu']}; {remedy}")
    if "torchrec" in failed and failed["torchrec"] != failed.get("fbgemm_gpu"):
        problems.append(f"TorchRec cannot be imported: {failed['torchrec']}")
    return problems


# Versions --------------------------------------------------------------------------------------------------------


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _version(module: str, imports: Mapping[str, Import], distributions: tuple[str, ...]) -> str:
    """What a module says of itself, since that may be another than the one that is installed."""
    installed = next((version for name in distributions if (version := _installed(name))), "")
    return str(imports[module].known.get("version") or installed)


def _two_numbers(version: str) -> str:
    found = re.match(r"(\d+\.\d+)(?:\.\d|$|\+)", version)
    return found.group(1) if found else ""


def _pair_problems(torch: str, fbgemm: Mapping[str, str], imports: Mapping[str, Import]) -> list[str]:
    problems = []
    for name, version in fbgemm.items():
        wanted = TORCH_OF_FBGEMM.get(_two_numbers(version))
        if wanted and _two_numbers(torch) and wanted != _two_numbers(torch):
            fitting = next((f for f, t in TORCH_OF_FBGEMM.items() if t == _two_numbers(torch)), None)
            remedy = f"install {name}=={fitting}.*, or torch=={wanted}.*" if fitting else f"install torch=={wanted}.*"
            problems.append(f"{name} {version} was built for torch {wanted}, and torch is {torch}; {remedy}")
    known = imports["torch"].known
    if known.get("gpus") and imports["fbgemm_gpu"].known.get("on_gpu") is False:
        problems.append("this FBGEMM has no kernels for the GPU that torch sees; install fbgemm-gpu in its place")
    return problems


def _notes(torchrec: str, fbgemm: Mapping[str, str], known: Mapping[str, Any]) -> list[str]:
    notes = []
    for name, version in fbgemm.items():
        ours, theirs = _two_numbers(torchrec), _two_numbers(version)
        if ours and theirs and ours != theirs:
            notes.append(f"TorchRec {torchrec} is mostly used with FBGEMM {ours}; {name} is {version}")
        if theirs and theirs not in TORCH_OF_FBGEMM:
            notes.append(f"whether {name} {version} goes with this torch is not known to this version of ours")
    if known.get("cuda") and not known.get("gpus"):
        said = f": {known['said']}" if known.get("said") else ""
        notes.append(f"torch is built for CUDA {known['cuda']} and sees no GPU{said}")
    return notes


def _build(found: Import) -> str:
    if not found.known:
        return ""
    if found.known.get("cuda"):
        return f" (for CUDA {found.known['cuda']})"
    return f" (for ROCm {found.known['hip']})" if found.known.get("hip") else " (for CPUs)"


def _driver(known: Mapping[str, Any]) -> str:
    found = None
    with contextlib.suppress(OSError):
        found = re.search(r"\s(\d+\.[\d.]+)\s", DRIVER.read_text(encoding="utf-8"))
    version = found.group(1) if found else ""
    supports = f"CUDA up to {known['driver_supports']}" if known.get("driver_supports") else ""
    return ", ".join(filter(None, [version, supports]))


# Our own switches ------------------------------------------------------------------------------------------------


def _switches() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is set of ours, and what of it is wrong."""
    from torchrec_prealloc.config import ConfigError, PreallocConfig, add_prealloc_flags

    given = {name: os.environ[name] for name in (SWITCH, OPTIONS) if name in os.environ}
    effects = {
        SWITCH: "pipelines are replaced, wherever torchrec_prealloc is imported" if given.get(SWITCH) == "1" else
        "only 1 replaces the pipelines; this does not",
        OPTIONS: "the replaced pipelines' options",
    }  # fmt: skip
    said = tuple(f"{name}={value}: {effects[name]}" for name, value in given.items())
    parser = argparse.ArgumentParser(prog=OPTIONS, add_help=False)
    add_prealloc_flags(parser)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            PreallocConfig.from_args(parser.parse_args(shlex.split(given.get(OPTIONS, ""))))
    except (SystemExit, ConfigError, ValueError) as error:
        reason = complaint.getvalue().strip().rpartition("error: ")[2] or str(error)
        return said, (f"{OPTIONS}={given[OPTIONS]}: {reason}",)
    return said, ()
