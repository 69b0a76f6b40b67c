"""Makes .venv with everything that `make demo` and `make test` need, or sees that it is there and returns at once.

    python3 .ci/bootstrap.py

Only the standard library, and a syntax that Python 3.6 reads: on an unsupported Python this file has to get as far as
saying so. Whatever fails ends in one line on stderr that names the problem and the remedy, and exit code 1.

Where packages come from is pip's own business: its configuration files and PIP_* variables hold as anywhere else.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, Iterator, Optional, Sequence

ROOT = Path(__file__).resolve().parent.parent

# The one list of tested versions; setup.py has the ranges. torch, FBGEMM and TorchRec go together only in such triples
# (see setup.py); tensordict and the tools are pinned because a newer one may refuse this torch, or find new faults in
# old code. Each of them installs on every Python below; what has no such release, as hypothesis, is not pinned.
PINS = {
    "torch": "2.13.0",
    "torchrec": "1.8.0",
    "fbgemm-gpu": "1.8.0",
    "fbgemm-gpu-cpu": "1.8.0",
    "tensordict": "0.15.3",
    "recbole": "1.2.1",
    "pytest": "9.2.0",
    "ruff": "0.17.6",
    "mypy": "2.4.1",
}

# The Pythons that all three of the triple have wheels for.
OLDEST, NEWEST = (3, 10), (3, 14)

# FBGEMM is one module from two distributions: the CUDA one does not import without the driver's libnvidia-ml.so.1.
FBGEMM = {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}

# Room for the packages, and for pip's downloads while it unpacks them, in GB.
ROOM = {"cpu": 3, "cuda": 12}


OTHER_PYTHON = "name another: PYTHON=python3.12 make ..."


class Problem(Exception):
    """Something that the user has to put right; the text is the one line that is shown."""


def python_problem(version: "Sequence[int]") -> "Optional[str]":
    if OLDEST <= tuple(version[:2]) <= NEWEST:
        return None
    return "Python %d.%d is not supported (the packages exist for %d.%d to %d.%d); %s" % (
        *version[:2],
        *OLDEST,
        *NEWEST,
        OTHER_PYTHON,
    )


def venv_problem() -> "Optional[str]":
    """Debian and Ubuntu ship Python without the part of `venv` that brings pip."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        remedy = "install its venv module (Debian, Ubuntu: apt install python3-venv)"
        return "this Python (%s) cannot make environments; %s" % (sys.executable, remedy)
    return None


def room_problem(needed_gb: float, free_gb: float, place: "Path") -> "Optional[str]":
    if free_gb >= needed_gb:
        return None
    shortage = "too little disk: the packages need about %.1f GB more in %s, where %.1f GB are free" % (
        needed_gb,
        place,
        free_gb,
    )
    return shortage + "; free some, or clone to a larger disk"


def pip_problem(output: str) -> str:
    """The one line that says what pip's output means, the likeliest cause of all that follows it first."""
    if re.search("No space left on device|Disk quota exceeded", output):
        return "the disk ran full; free some (pip unpacks in TMPDIR or /tmp), and run the same command again"
    if re.search("ConnectionError|Timeout|Retrying \\(Retry|name resolution|SSLError|ProxyError|HTTP error", output):
        return "no network: pip cannot reach its package index; check the connection, the proxy, and `pip config list`"
    missing = re.search("No matching distribution found for (\\S+)", output)
    if missing:
        here = "Python %d.%d on %s" % (*sys.version_info[:2], os.uname().machine)
        remedy = "check the network and `pip config list`, or " + OTHER_PYTHON
        return "pip finds no %s for %s; %s" % (missing.group(1), here, remedy)
    said = [line.strip() for line in output.splitlines() if line.strip()]
    conflicts = [line for line in said if line.startswith("ERROR: Cannot install")]
    errors = [line for line in said if re.match("(?i)error|\\w*error:", line)]
    cause = (conflicts or errors or said or ["it said nothing"])[-1]
    return "an install step failed: %s; `make clean` and then the same command start anew" % cause


def flavour() -> str:
    """``cuda`` where there is an NVIDIA driver, else ``cpu``; the variable FLAVOUR overrules it."""
    wish = os.environ.get("FLAVOUR") or ("cuda" if has_driver() else "cpu")
    if wish not in FBGEMM:
        raise Problem("FLAVOUR=%s is unknown; it is one of: %s" % (wish, ", ".join(sorted(FBGEMM))))
    if wish == "cuda" and not has_driver():
        raise Problem("FLAVOUR=cuda needs an NVIDIA driver (libnvidia-ml.so.1); install it, or leave FLAVOUR out")
    return wish


def has_driver() -> bool:
    # The very library that the CUDA build of FBGEMM loads. An nvidia-smi on the PATH would not prove it is there.
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnvidia-ml.so.1")
        return True
    return False


def fingerprint(root: "Path") -> str:
    """Changes when what has to be installed may have changed."""
    digest = hashlib.sha256()
    for name in ("setup.py", ".ci/bootstrap.py"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


class Environment:
    """The environment in ``root/.venv``, and the note in it that tells what it is for and whether it is finished."""

    def __init__(self, root: "Path", kind: str) -> None:
        self.root = root
        self.path = root / ".venv"
        self.kind = kind
        self.python = self.path / "bin" / "python"
        self.note = self.path / "set-up.json"
        self.log = self.path / "set-up.log"
        # The place is part of it because a copied environment still refers to the place it was copied from.
        self.identity = {"python": "%d.%d" % tuple(sys.version_info[:2]), "flavour": kind, "place": str(root)}

    def noted(self) -> "Dict[str, object]":
        try:
            found = json.loads(self.note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def wanted(self) -> "Dict[str, object]":
        return dict(self.identity, fingerprint=fingerprint(self.root), finished=True)

    def is_finished(self) -> bool:
        return self.noted() == self.wanted() and self.python.exists()

    def write_note(self, finished: bool) -> None:
        self.note.write_text(json.dumps(dict(self.wanted(), finished=finished), indent=1), encoding="utf-8")

    def is_usable(self) -> bool:
        """Whether packages can be installed into it as it is: same Python, flavour and place, and a pip that starts."""
        noted = self.noted()
        if any(noted.get(key, value) != value for key, value in self.identity.items()):
            return False
        asked = [str(self.python), "-c", "import pip, sys; print('%d.%d' % sys.version_info[:2])"]
        try:
            answer = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        except OSError:
            return False
        return answer.stdout.decode().strip() == self.identity["python"]

    def run(self, *command: str) -> None:
        """Runs it with its output in the log, the latest line of it shown on a terminal as a sign of life."""
        lines = []
        with subprocess.Popen(
            command, cwd=str(self.root), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            for raw in process.stdout or ():
                lines.append(raw.decode(errors="replace"))
                if sys.stdout.isatty():
                    print("\r\033[K  " + lines[-1].strip()[:76], end="", flush=True)
        if sys.stdout.isatty():
            print("\r\033[K", end="", flush=True)
        output = "".join(lines)
        if self.path.is_dir():
            with self.log.open("a", encoding="utf-8") as log:
                log.write("$ %s\n%s\n" % (" ".join(command), output))
        if process.returncode:
            raise Problem("%s (all that was printed: %s)" % (pip_problem(output), self.log.relative_to(self.root)))

    def pip_install(self, *arguments: str) -> None:
        # No version check and no prompt: neither has anybody to read it.
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
        self.run(*(pip + list(arguments)))

    def create(self) -> None:
        # From the interpreter beneath, as this process may itself run in the environment that is about to be replaced.
        beneath = getattr(sys, "_base_executable", None) or sys.executable
        self.run(beneath, "-m", "venv", "--clear", str(self.path))

    def requirements(self, distribution: str, extras: bool = False) -> "Iterator[str]":
        """What an installed distribution says it needs, with all of its extras or with none."""
        from importlib import metadata

        places = [str(place) for place in self.path.glob("lib/python*/site-packages")]
        for found in metadata.distributions(name=distribution, path=places):
            for requirement in found.requires or ():
                specifier, _, marker = requirement.partition(";")
                if "extra ==" not in marker:
                    yield requirement
                elif extras:
                    yield specifier

    def occupied_gb(self) -> float:
        sizes = 0
        for folder, _, names in os.walk(str(self.path)):
            for name in names:
                sizes += os.lstat(os.path.join(folder, name)).st_size
        return sizes / 1e9

    def check_room(self, kind: str) -> None:
        """What is in the environment already counts: it stays, or makes room for its successor."""
        needed, free = ROOM[kind] - self.occupied_gb(), shutil.disk_usage(str(self.root)).free / 1e9
        problem = room_problem(needed, free, self.root)
        if problem:
            raise Problem(problem)

    def check_torch_build(self, pins: str) -> None:
        """Where pip finds only torch's CUDA build, that one works without a driver too, but is several GB large."""
        report = self.path / "torch.json"
        self.pip_install("--dry-run", "--quiet", "--report", str(report), "--constraint", pins, "torch")
        chosen = [entry["metadata"]["name"] for entry in json.loads(report.read_text(encoding="utf-8"))["install"]]
        if any(name.startswith("nvidia-") for name in chosen):
            say("pip finds only torch's CUDA build (several GB); PyTorch's CPU index as PIP_EXTRA_INDEX_URL saves that")
            self.check_room("cuda")

    def install(self) -> None:
        pins = self.path / "pins.txt"
        pins.write_text("".join("%s==%s\n" % pin for pin in sorted(PINS.items())), encoding="utf-8")
        pinned = ("--constraint", str(pins))
        say("pip and setuptools")
        self.pip_install("--upgrade", "pip", "setuptools>=77")
        if self.kind == "cpu":
            self.check_torch_build(str(pins))

        # Three that must not bring their requirements along. TorchRec and our own package ask for fbgemm-gpu, which on
        # a machine without a driver is provided by fbgemm-gpu-cpu, and pip knows no such equivalence. recbole is only
        # the box that MovieLens-100K comes in. setuptools is in the environment already: no build isolation, which
        # would download it once more.
        say("TorchRec %s and FBGEMM %s (%s)" % (PINS["torchrec"], PINS[FBGEMM[self.kind]], self.kind))
        bare = ["torchrec", FBGEMM[self.kind], "recbole"]
        self.pip_install("--no-deps", *(pinned + tuple(bare)))
        self.pip_install("--no-deps", "--no-build-isolation", "--editable", ".")

        # What they need beside each other, in their own words, so that it is written nowhere twice.
        asked = list(self.requirements("torchrec-prealloc", extras=True)) + list(self.requirements("torchrec"))
        asked += list(self.requirements(FBGEMM[self.kind]))
        present = {"torchrec", "fbgemm-gpu", "recbole"}
        rest = [requirement for requirement in asked if distribution_name(requirement) not in present]
        say("torch %s and the rest" % PINS["torch"])
        self.pip_install(*(pinned + tuple(rest)))

        say("a first import")
        self.run(str(self.python), "-c", "import torch, fbgemm_gpu, torchrec")


def distribution_name(requirement: str) -> str:
    """``Fbgemm_GPU>=1.2; python_version > "3"`` → ``fbgemm-gpu``"""
    name = re.split("[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]
    return re.sub("[-_.]+", "-", name).lower()


def say(text: str) -> None:
    print("set-up: " + text, flush=True)


def set_up(root: "Path") -> None:
    problem = python_problem(sys.version_info)
    if problem:
        raise Problem(problem)
    environment = Environment(root, flavour())
    if environment.is_finished():
        return
    began = time.monotonic()
    environment.check_room(environment.kind)
    what = ".venv (Python %s, %s packages)" % (environment.identity["python"], environment.kind)
    if environment.is_usable():
        say("completing " + what)
    else:
        problem = venv_problem()
        if problem:
            raise Problem(problem)
        say("making " + what + "; this takes minutes, once")
        environment.create()
    environment.write_note(finished=False)
    environment.install()
    environment.write_note(finished=True)
    say("done in %.0f s" % (time.monotonic() - began))


def locked(root: "Path") -> int:
    """Holds the folder itself locked, so that two `make` at once do not install into each other's environment."""
    folder = os.open(str(root), os.O_RDONLY)
    with contextlib.suppress(OSError):  # some file systems have no locks
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another one that is at work here")
            fcntl.flock(folder, fcntl.LOCK_EX)
    return folder


def main() -> int:
    try:
        locked(ROOT)
        set_up(ROOT)
    except Problem as problem:
        print("set-up: " + " ".join(str(problem).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
