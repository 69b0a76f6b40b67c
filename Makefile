# Two commands for a newcomer: `make demo` and `make test`. Each makes .venv, or reuses it (see .ci/bootstrap.py).
#
#   PYTHON=python3.12 make demo    uses that interpreter; .venv is rebuilt when it was made with another Python version
#   FLAVOUR=cpu make demo          the CPU packages although there is an NVIDIA driver (or FLAVOUR=cuda)
#   make demo ARGS="--steps 100"   arguments of the command
#
# For a machine with a GPU: `make gpu-check OUT=DIR`.

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-versions gpu-check lint clean set-up

# Nobody who made .venv with PYTHON=... should have to repeat it: where it is not given, the .venv that is there decides.
ifeq ($(PYTHON),)
PYTHON := $(shell test -e .venv/set-up.json && .venv/bin/python -c '' 2>/dev/null && echo .venv/bin/python || echo python3)
endif

# Tests and commands start python and torchrun by name. Not exported for all: PYTHON=python3 must lead out of .venv.
INSIDE := PATH="$(CURDIR)/.venv/bin:$$PATH"

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1	\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 24

demo: set-up  ## Train on MovieLens-100K three ways and print the table (ARGS="--steps 100 ...")
	@$(INSIDE) .venv/bin/torchrec-prealloc demo $(ARGS)

test: lint  ## Lint, pipelines with the oldest and newest TorchRec, the tests that take seconds (ARGS="-k name": only those)
	@$(if $(ARGS),,$(INSIDE) .venv/bin/python .ci/test_versions.py --fast)
	@$(INSIDE) .venv/bin/python -m pytest $(ARGS)

test-long: set-up  ## The tests that take minutes
	@$(INSIDE) .venv/bin/python -m pytest -m long $(ARGS)

test-versions: set-up  ## The pipelines' tests with each TorchRec from 1.2 to 1.9 (ARGS="--fast", ARGS="1.4.0 1.7.0")
	@$(INSIDE) .venv/bin/python .ci/test_versions.py $(ARGS)

# With SETUP=no in $(PYTHON) as it is: a GPU machine without network has its packages from elsewhere (.ci/gpu_wheels.sh).
gpu-check: $(if $(filter no,$(SETUP)),,set-up)  ## All that needs a GPU; without one a rehearsal (OUT=DIR, SETUP=no: no .venv)
	@test -n "$(OUT)" || { echo "gpu-check: say where the results go: make gpu-check OUT=DIR" >&2; exit 1; }
	@$(if $(filter no,$(SETUP)),$(PYTHON),$(INSIDE) .venv/bin/python) .ci/gpu_check.py "$(OUT)" $(ARGS)

lint: set-up  ## ruff and mypy
	@$(INSIDE) .venv/bin/ruff check .
	@$(INSIDE) .venv/bin/mypy

clean:  ## Remove .venv and what tools have left behind
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find torchrec_prealloc tests .ci -name __pycache__ -prune -exec rm -rf {} +

# Asked first in a form that any program understands, so that a missing interpreter and Python 2 get their line too.
set-up:
	@test "$$($(PYTHON) -c 'import sys; print(sys.version_info[0])' 2>/dev/null)" = 3 || \
	  { echo "set-up: '$(PYTHON)' is no Python 3; install Python 3.10 to 3.14, or name one: PYTHON=python3.12 make ..." >&2; exit 1; }
	@$(PYTHON) .ci/bootstrap.py
