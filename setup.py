"""What the distribution needs and contains. The versions that the tests run with are pinned in .ci/bootstrap.py."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def declared_version() -> str:
    """The package's ``__version__``, read and not imported: an import would need torch before it is installed."""
    source = (ROOT / "torchrec_prealloc" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__(?:\s*:\s*\w+)?\s*=\s*"([^"]+)"', source, re.MULTILINE)
    if found is None:
        raise SystemExit('torchrec_prealloc/__init__.py has no line __version__ = "..."')
    return found.group(1)


def long_description() -> str:
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


INSTALL_REQUIRES = [
    # Tensors, streams, and torch.get_device_module, by which one code path serves CUDA, MTIA, XPU and the CPU.
    # 2.7 is the release that the oldest TorchRec below goes with, and that pair was tried; the tests run with 2.13.
    "torch>=2.7,<3",
    # The pipelines that are subclassed. 1.2 is the oldest whose train_pipeline package has the hook
    # copy_batch_to_gpu where we override it; 2 may move it.
    "torchrec>=1.2,<2",
    # TorchRec's operators. It goes with torch in pairs (1.6 with 2.11, 1.7 with 2.12, 1.8 with 2.13, 1.9 with 2.14),
    # which TorchRec leaves to the user, and so do we. On a machine without an NVIDIA driver the distribution
    # fbgemm-gpu-cpu provides the same module; a requirement cannot say "either", hence `make` and its --no-deps.
    "fbgemm-gpu>=1.2,<2",
    # configs/*.yaml
    "pyyaml>=6,<7",
    # The codec hands it what pickle cannot take: lambdas and closures. TorchRec's tensordict brings it anyway.
    "cloudpickle>=2,<4",
    # Progress bars of the demo and the benchmarks.
    "tqdm>=4.60,<5",
]

EXTRAS_REQUIRE = {
    # Pictures beside the tables.
    "plot": ["matplotlib>=3.6,<4"],
    # What `torchrec-prealloc demo` needs beyond the above: its picture. Its MovieLens-100K files come in the
    # distribution recbole, which is not listed: it is used as a box of files, never imported, and its own requirements
    # (ray<=2.6.3 among them) cannot be installed on Python 3.12 and newer. `pip install --no-deps recbole` beside it.
    "demo": ["matplotlib>=3.6,<4"],
    # The simulator calls the C++ compiler itself, and needs no distribution; the extra is there to be named.
    "simulator": [],
    "test": [
        "pytest>=8,<10",
        # One of the kinds of classes that a batch may be made of.
        "attrs>=22,<27",
        # Random layouts and batches against their plain counterparts.
        "hypothesis>=6.100,<7",
        # Pictures are tested too.
        "matplotlib>=3.6,<4",
    ],
    "dev": [
        "ruff>=0.17,<0.18",
        "mypy>=2.4,<3",
        "types-PyYAML>=6,<7",
        "types-tqdm>=4.60,<5",
        # Packed batches through its StatefulDataLoader and its nodes, whose tests are left out without it; 60 KB.
        "torchdata>=0.10,<0.12",
    ],
}

setup(
    name="torchrec-prealloc",
    version=declared_version(),
    description="Preallocated, in-place host-to-device batch copies for TorchRec's train pipelines",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="torchrec-prealloc contributors",
    license="BSD-3-Clause",
    python_requires=">=3.10",
    packages=find_packages(include=["torchrec_prealloc", "torchrec_prealloc.*"]),
    package_data={
        "torchrec_prealloc": ["py.typed", "bench/results/*"],
        "torchrec_prealloc.simulator": ["csrc/*"],
    },
    # The simulator compiles its C++ files where they lie, so they must be files.
    zip_safe=False,
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["torchrec-prealloc = torchrec_prealloc.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
