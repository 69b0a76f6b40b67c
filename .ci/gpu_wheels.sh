#!/usr/bin/env bash
# Wheels for a GPU machine without network that has Python 3.12, torch 2.11 (CUDA), pytest, hypothesis, numpy, matplotlib,
# tqdm and pyyaml: what `make gpu-check` needs beside those, about 8 MB. Here:
#
#   .ci/gpu_wheels.sh DIR
#
# and there, in a checkout of this repository:
#
#   python3 -m pip install --no-index --no-deps --target SITE DIR/*.whl
#   PYTHONPATH=SITE make gpu-check PYTHON=python3 SETUP=no OUT=RESULTS
#
# FBGEMM is its CPU build, which imports beside any torch of its version; what it lacks, the tests do without.
set -euo pipefail
dir=${1:?usage: .ci/gpu_wheels.sh DIR}
mkdir -p "$dir"
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --dest "$dir" \
  torchrec==1.6.1 fbgemm-gpu-cpu==1.6.0 tensordict==0.12.1 torchmetrics==1.0.3 \
  lightning-utilities pyre-extensions typing-inspect mypy-extensions pyvers cloudpickle orjson importlib-metadata zipp \
  iopath portalocker attrs
du -sh "$dir"
