# What a user needs: `make train`, `make test`, `make compare`. Each sets up .venv first; nothing else has to be prepared.

PYTHON ?= $(shell for p in python3 python3.13 python3.12; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
WORKDIR ?= runs/digits
EXTRAS ?= test
RUN = .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup train compare test test-all lint format clean

help:
	@echo "make train [WORKDIR=runs/digits]  train on handwritten digits, evaluate at several resolutions"
	@echo "make compare                      train with six positional schemes, one table and one picture"
	@echo "make test | lint | format         what a change must pass"
	@echo "make test-all                     the tests, with every pair of scheme and backbone"
	@echo "make test-faults                  what training survives: kills, damaged checkpoints, signals (five minutes)"
	@echo "make test-aot                     compile the GPU kernels, on any machine (5 GB of CUDA wheels in .venv-cuda)"
	@echo "make tables                       tables and pictures of the READMEs, from benchmarks/results"
	@echo "make setup [EXTRAS=test,cuda13]   the environment alone (.venv); with cuda13 or cuda12 for an NVIDIA GPU"

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(or $(PYTHON),python3) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 12) else f"rope_jax needs Python 3.12 or newer, but {sys.executable} is {v[0]}.{v[1]}: install it, or name it as in make setup PYTHON=python3.12")'
	$(or $(PYTHON),python3) -m venv .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

train: setup
	$(RUN) -m rope_jax.main --config=configs/digits.py --workdir=$(WORKDIR) $(ARGS)

SCHEMES = none ape rpb rope2d rope_mixed axial_rope
compare: setup
	@for position in $(SCHEMES); do \
		$(RUN) -m rope_jax.main --config=configs/digits.py:position=$$position --workdir=runs/compare/$$position && test -f runs/compare/$$position/results.json || exit 1; \
	done
	$(RUN) -m rope_jax.analysis.report $(SCHEMES:%=runs/compare/%)

test: setup
	$(RUN) -m pytest -n 2 --dist loadscope

test-all: setup
	$(RUN) -m pytest -n 2 --dist loadscope -m "slow or not slow"

# Fifty kills at random instants, two hundred damaged checkpoints, SIGTERM in every phase: nothing may be lost. Five minutes.
.PHONY: test-faults
test-faults: setup
	$(RUN) -m benchmarks faults --out benchmarks/results/faults_cpu.json

# Compiles the GPU kernels on any machine, GPU or not (.venv-cuda: 5 GB of CUDA wheels).
.PHONY: test-aot
test-aot: .venv-cuda/ready
	JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 JAX_PLATFORMS=cpu .venv-cuda/bin/python -m pytest -n 2 --dist worksteal tests/aot

.venv-cuda/ready: pyproject.toml constraints.txt
	$(or $(PYTHON),python3) -m venv .venv-cuda
	@echo '*' > .venv-cuda/.gitignore
	.venv-cuda/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,cuda13]'
	@touch $@

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: setup
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

# Makes tables and pictures of the READMEs from benchmarks/results; a test fails where they disagree.
.PHONY: tables
tables: setup
	$(RUN) -m benchmarks pictures
	$(RUN) -m benchmarks tables

clean:
	rm -rf .venv .venv-cuda runs
