# Everything runs in .venv, which each target makes for itself where it is missing.
#   make demo PIP_ARGS="--index-url <your CPU-only index>"   options for pip
#   make demo CONSTRAINTS=                                   no pinned torch: takes a CUDA build
PYTHON ?= python3
PIP_ARGS ?=
CONSTRAINTS ?= constraints-cpu.txt
VENV ?= .venv
ARGS ?=
JOBS ?= auto

BIN := $(VENV)/bin
# A process for each of up to 4 cores, of one thread: torch's threads wait for one another.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 4 --dist worksteal
READY := $(VENV)/.ready
PACKAGES := specdec runner drafters sampler experiments examples tests benchmarks

.PHONY: help setup weights demo bench bundle test test-gpu test-full lint type fmt clean \
	clean-results
.DEFAULT_GOAL := help

help:
	@echo "make demo       compare drafters on the embedded real model (CPU, minutes)"
	@echo "make test       quick tests, and the kernels in Triton's interpreter"
	@echo "make test-gpu   tests on a CUDA device"
	@echo "make test-full  tests on real weights, and the pages in a browser (needs Chromium)"
	@echo "make bench      speed beside transformers' generate, interleaved in one process"
	@echo "make bundle     what a GPU host without network needs, in parts (docs/gpu_hosts.md)"
	@echo "make clean      remove the environment and caches; results stay"
	@echo "make clean-results  remove all results: outputs, multirun and wandb"
	@echo "make lint type fmt setup weights"

$(READY): pyproject.toml $(wildcard $(CONSTRAINTS))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		$(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e ".[dev]"
	touch $@

setup: $(READY)

weights: $(READY)
	$(BIN)/python -m runner.weights

demo: weights
	$(BIN)/python -m experiments.run experiment=demo $(ARGS)

bench: weights
	$(BIN)/python -m experiments.bench $(ARGS)

bundle: $(READY)
	$(BIN)/python -m experiments.bundle $(ARGS)

test: $(READY)
	$(PYTEST) $(ARGS)
	TRITON_INTERPRET=1 $(PYTEST) -m interpreter $(ARGS)

test-gpu: weights
	$(BIN)/python -m pytest -m gpu $(ARGS)

test-full: weights
	$(PYTEST) -m "slow or browser" $(ARGS)

lint: $(READY)
	$(BIN)/ruff check $(PACKAGES)
	$(BIN)/ruff format --check $(PACKAGES)
	$(BIN)/lint-imports

type: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python

fmt: $(READY)
	$(BIN)/ruff check --fix $(PACKAGES)
	$(BIN)/ruff format $(PACKAGES)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache

clean-results:
	rm -rf outputs multirun wandb
