"""Builds and loads the simulator's C++ part: at first use, once for each torch, Python and state of the sources.

The compiler is called directly: two dozen lines, no ninja, and an error that is the compiler's own.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from types import ModuleType

import torch

_NAME = "_torchrec_prealloc_simulator"
_SOURCES = pathlib.Path(__file__).parent / "csrc"
_FLAGS = ["-O1", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-w"]
_module: ModuleType | None = None
_lock = threading.Lock()


class BuildError(RuntimeError):
    """The simulator cannot be built or loaded here. The message says what to do."""


def available() -> tuple[bool, str]:
    """Whether the simulator can be used here, and if not, why and what to do. Builds nothing."""
    if _module is not None:
        return True, ""
    if not sys.platform.startswith("linux"):
        return False, f"the accelerator simulator runs on Linux only, not on {sys.platform}"
    if torch.cuda.is_available():
        return False, "the accelerator simulator and a GPU exclude each other: set CUDA_VISIBLE_DEVICES= (empty)"
    if _library().exists():
        return True, ""
    if shutil.which(_compiler()) is None:
        return False, f"no C++ compiler ({_compiler()!r}): install g++ 11 or later, or name another one in CXX"
    if not (pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return False, "no Python.h: install the development files of this Python (for example python3-dev)"
    return True, ""


def built() -> bool:
    """Whether the first use finds the simulator built, and takes no half minute."""
    return _module is not None or _library().exists()


def load() -> ModuleType:
    """The extension module. The first call builds it (about a minute) unless the cache has it.

    Raises:
        BuildError: there is no compiler, it failed, or PyTorch is in a state in which the device cannot be added.
    """
    global _module
    with _lock:
        if _module is None:
            usable, reason = available()
            if not usable:
                raise BuildError(reason)
            library = _library()
            if not library.exists():
                _build(library)
            _module = _import(library)
        return _module


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _cache() -> pathlib.Path:
    """In the virtual environment if we may write there, else in the user's cache folder."""
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        return pathlib.Path(sys.prefix) / "share" / "torchrec_prealloc" / "simulator"
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(root) / "torchrec_prealloc" / "simulator"


def _library() -> pathlib.Path:
    content = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted(_SOURCES.glob("*.[ch]*")):  # and no README
        content.update(source.name.encode() + source.read_bytes())
    key = f"torch{torch.__version__}-{sys.implementation.cache_tag}-{content.hexdigest()[:16]}"
    return _cache() / key / f"{_NAME}.so"


def _build(library: pathlib.Path) -> None:
    """Builds in a folder of its own and moves the result into place.

    The lock only saves a second process the work. The kernel drops it when its holder dies, whatever the reason, and
    the move is atomic, so that neither a killed build nor a file system without locks can leave a broken cache.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return
        for left in library.parent.glob("build-*"):  # of a build that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as folder:
            built = _compile(pathlib.Path(folder))
            os.replace(built, library)


def _compile(folder: pathlib.Path) -> pathlib.Path:
    root = pathlib.Path(torch.__file__).parent
    include = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    flags = [
        *_FLAGS,
        f"-DTORCH_EXTENSION_NAME={_NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in include),
    ]

    def compile_one(source: pathlib.Path) -> str:
        target = str(folder / f"{source.stem}.o")
        _run([_compiler(), *flags, "-c", str(source), "-o", target])
        return target

    # The largest first, so that the cores end at about the same time.
    sources = sorted(_SOURCES.glob("*.cpp"), key=lambda source: source.stat().st_size, reverse=True)
    with concurrent.futures.ThreadPoolExecutor(max(1, min(8, len(os.sched_getaffinity(0))))) as pool:
        objects = list(pool.map(compile_one, sources))
    built = folder / f"{_NAME}.so"
    libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    _run([_compiler(), "-shared", *objects, f"-L{root / 'lib'}", *libraries, "-o", str(built)])
    return built


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"building the accelerator simulator failed:\n{' '.join(command)}\n{done.stderr[-4000:]}")


def _import(library: pathlib.Path) -> ModuleType:
    # An autograd thread of a device drops the last reference to its backward pass a little after the pass has ended,
    # and takes the GIL for it. If the interpreter is being finalized by then, the process aborts (up to Python 3.11):
    # let the threads have the GIL before.
    atexit.register(time.sleep, 0.1)
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(library))
    spec = importlib.util.spec_from_file_location(_NAME, str(library), loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    # Seeds that were set before the device existed are queued, and would be replayed at its first use into the
    # generator that it shares with the CPU. Now is the time, and the CPU's numbers go on as if nothing had been.
    state = torch.get_rng_state()
    torch.mtia.init()
    torch.set_rng_state(state)
    if not torch.mtia.is_available() or not torch._C._mtia_isBuilt():
        raise BuildError(
            "PyTorch has no place left for the simulated device: load the simulator before anything else asks for"
            " accelerators (call torchrec_prealloc.simulator.device() first)"
        )
    return module
