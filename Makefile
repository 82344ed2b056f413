# Start with `make train`, `make compare` or `make test`; each creates .venv first.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
WORKDIR ?= runs/digits
EXTRAS ?= test
RUN = .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup train compare segment detect masks test test-all test-process test-slow lint format docs
.PHONY: links notebooks clean

help:
	@echo "make train [WORKDIR=runs/digits]  train on handwritten digits, evaluate at several resolutions"
	@echo "make compare [ARGS=--seeds=3]      train with six positional schemes: a table and a plot"
	@echo "make segment [ARGS=...]           train a small ViT to segment scenes of digits: mIoU at five sizes, a picture"
	@echo "make detect [ARGS=...]            make segment first, then a small DINO from its backbone: AP, a picture"
	@echo "make masks [ARGS=...]             make segment first, then a small Mask R-CNN from its backbone: box and mask AP, a picture"
	@echo "make test | lint | format         checks for every change (tests: 7 to 15 minutes on two cores)"
	@echo "make test-process                 tests that start or kill processes, or need several devices"
	@echo "make test-slow                    products of many cases, such as every scheme on every backbone (twenty minutes)"
	@echo "make test-all                     these three"
	@echo "make test-faults                  fault injection: kills, damaged checkpoints, attacks (twenty minutes)"
	@echo "make test-newest                  a selection with the newest jax, flax, ... within the bounds (5 GB of CUDA wheels in .venv-newest)"
	@echo "make test-aot                     compile and emulate the GPU kernels, on any machine (5 GB of CUDA wheels in .venv-cuda)"
	@echo "make tables                       regenerate the documentation's tables and pictures from the results"
	@echo "make docs                         the documentation site, in build/docs (.venv-docs)"
	@echo "make links                        check the site's links to other sites (needs a network)"
	@echo "make notebooks                    execute the notebooks that changed, and store their outputs"
	@echo "make setup [EXTRAS=test,cuda13]   create .venv only; with cuda13 or cuda12 for an NVIDIA GPU"

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(or $(PYTHON),python3) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 12) else f"rope_jax needs Python 3.12 or newer, but {sys.executable} is {v[0]}.{v[1]}: install it, or name it as in make setup PYTHON=python3.12")'
	$(or $(PYTHON),python3) -m venv .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

train: setup
	$(RUN) -m rope_jax.main --config=configs/digits.py --workdir=$(WORKDIR) $(ARGS)

SCHEMES = none,ape,rpb,rope2d,rope_mixed,axial_rope
compare: setup
	$(RUN) -m rope_jax.compare --config=digits --positions='$(SCHEMES)' --seeds=1 $(ARGS)

segment: WORKDIR = runs/scenes
segment: setup
	$(RUN) -m rope_jax.main --config=configs/scenes.py --workdir=$(WORKDIR) $(ARGS)

# The backbone of `make detect` and `make masks`, with the default scheme of `make segment`.
runs/scenes/results.json: | setup
	$(RUN) -m rope_jax.main --config=configs/scenes.py --workdir=runs/scenes

detect: WORKDIR = runs/scenes_boxes
detect: setup runs/scenes/results.json
	$(RUN) -m rope_jax.main --config=configs/scenes_boxes.py --workdir=$(WORKDIR) $(ARGS)

masks: WORKDIR = runs/scenes_masks
masks: setup runs/scenes/results.json
	$(RUN) -m rope_jax.main --config=configs/scenes_masks.py --workdir=$(WORKDIR) $(ARGS)

test: setup
	$(RUN) -m pytest -n 2 --dist worksteal

# Tests that start, kill or signal processes, or need several devices.
test-process: setup
	$(RUN) -m pytest -n 2 --dist worksteal -m "process and not slow"

# The products of many cases: most schemes on most backbones. CI runs one in six, others for each
# commit; the last line of its output says how to repeat it, as in
#     make test-slow ARGS='--sample=6 --sample-seed=COMMIT'
# Three workers, because some cases wait for programs that they start. Cases whose programs must be
# compiled as users compile them (tests/conftest.py) run separately: those that must round alike,
# and one that runs for many steps.
OPTIMIZED = bit_for_bit or dino_learns
test-slow: setup
	$(RUN) -m pytest -n 3 --dist worksteal --durations=30 -m slow -k "not ($(OPTIMIZED))" $(ARGS)
	ROPE_JAX_TEST_OPTIMIZED=1 $(RUN) -m pytest -n 2 --dist worksteal -m slow -k "$(OPTIMIZED)" $(ARGS)

test-all: test test-process test-slow

# Fifty kills at random instants, two hundred damaged checkpoints, SIGTERM in every phase, and the
# attacks of tests/faults/attacks; no progress may be lost. Takes twenty minutes.
.PHONY: test-faults
test-faults: setup
	$(RUN) -m tests.faults.long --out experiments/results/faults_cpu.json

# Compiles the GPU kernels on any machine, with or without a GPU, and emulates their PTX (.venv-cuda:
# 5 GB of CUDA wheels).
.PHONY: test-aot
test-aot: .venv-cuda/ready
	JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 JAX_PLATFORMS=cpu .venv-cuda/bin/python -m pytest -n 2 --dist worksteal tests/aot $(ARGS)

.venv-cuda/ready: pyproject.toml constraints.txt
	$(or $(PYTHON),python3) -m venv .venv-cuda
	@echo '*' > .venv-cuda/.gitignore
	.venv-cuda/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,aot]'
	@touch $@

# A covering selection with the newest releases within the bounds of pyproject.toml, not those of
# constraints.txt: kernels, models, a training step, checkpoints, the wheel. All its programs are
# compiled as users compile them, where other targets use what compiles fastest (tests/conftest.py).
NEWEST = tests/test_packaging.py tests/kernels/test_dispatch.py tests/kernels/test_attention.py \
	tests/models/test_definition.py tests/weights/test_export.py tests/training/test_step.py \
	tests/runs/test_run.py tests/training/test_checkpoint.py
# Forward and backward kernels of both backends, compiled for a GPU that need not be there.
NEWEST_AOT = attention.py::test_machine_code[ViT-S] attention.py::test_machine_code[Swin] \
	attention.py::test_machine_code[NAT] attention_mosaic.py::test_machine_code_backward[ViT-S] \
	rotary.py::test_no_copies_between_projections_and_kernel[learned-triton] \
	rotary.py::test_no_copies_between_projections_and_kernel[learned-mosaic] \
	unpack.py::test_the_gradient_of_frequencies_comes_from_the_same_pass[default]
.PHONY: test-newest
test-newest: .venv-newest/ready
	ROPE_JAX_TEST_OPTIMIZED=1 JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 JAX_PLATFORMS=cpu \
		.venv-newest/bin/python -m pytest -n 2 --dist worksteal $(NEWEST) \
		$(foreach test,$(NEWEST_AOT),'tests/aot/test_aot_$(test)') $(ARGS)

.venv-newest/ready: pyproject.toml
	$(or $(PYTHON),python3) -m venv .venv-newest
	@echo '*' > .venv-newest/.gitignore
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e '.[test,aot]'
	@touch $@

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: setup
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

# Regenerates tables and pictures of README and docs from benchmarks/results and
# experiments/results; a test fails if they differ.
.PHONY: tables
tables: setup
	$(RUN) -m docs.make_pictures
	$(RUN) -m docs.make_tables

# Builds the site; a warning, or a link to a page, a file or a heading that is not there, is an error.
SPHINX = .venv-docs/bin/python -m sphinx --quiet --fail-on-warning --keep-going -c docs
docs: .venv-docs/ready
	rm -rf build/docs
	$(SPHINX) --fresh-env -b html . build/docs

links: .venv-docs/ready
	$(SPHINX) -b linkcheck . build/links

# Executes notebooks whose code changed, and stores their outputs; a test fails if they are missing.
notebooks: .venv-docs/ready
	JAX_PLATFORMS=cpu PATH="$(CURDIR)/.venv-docs/bin:$$PATH" .venv-docs/bin/python -m docs.make_notebooks

.venv-docs/ready: pyproject.toml constraints.txt
	$(or $(PYTHON),python3) -m venv .venv-docs
	@echo '*' > .venv-docs/.gitignore
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

clean:
	rm -rf .venv .venv-cuda .venv-docs .venv-newest build runs
