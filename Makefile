# `make demo` and `make test` are all that a fresh machine with Python 3.11 needs.
# Every target sets up `.venv` first, once, and again when pyproject.toml changes: `make demo` as far as a run needs it, the others whole.

PYTHON ?= python3.11
EXTRAS ?= dev

# Torch goes in first and alone: asked for by a range, pip may take the newest build, and with it several GB of CUDA.
# A version that is there already satisfies the range, and nothing more is fetched.
# For a machine with a GPU, name the build that fits it (`make setup TORCH=torch==2.11.0`), or use the one that your
# Python has already: `make setup TORCH= VENV_FLAGS=--system-site-packages`.
TORCH ?= torch==2.13.0
VENV_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
# pip would compile 26,000 files to bytecode, of which a run needs 3,000. Those are compiled below, and others when they are first imported.
# `make setup LOCKED=1` takes the versions of the lock file, with which the tests have passed. `make clean setup lock` renews it.
LOCKED ?=
LOCK := requirements-dev.lock
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(if $(LOCKED),--constraint $(LOCK))
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.installed
RECIPE ?= recipes/demo/demo.toml
ARGS ?=

.PHONY: setup lock demo test test-slow fuzz lint dist site docs models device device-rehearsal bench bench-engine bench-trainer bench-end-to-end clean

setup: $(STAMP)

$(RUNS): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(if $(TORCH),$(PIP_INSTALL) "$(TORCH)")
	$(PIP_INSTALL) --editable ".[demo]"
	@$(BIN)/python -m headrace.engine.native.kernels.binding & engine=$$!; \
	$(BIN)/python -m headrace.trainer.kernels.binding & trainer=$$!; \
	$(BIN)/python -m headrace.weight_sync.delta.codec; delta=$$?; \
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -W ignore -c 'import headrace.cli, reasoning_gym; from headrace.run.worker.fork_server import load; load()'; \
	test $$? = 0 && wait $$engine && wait $$trainer && test $$delta = 0
	touch $(RUNS)

$(STAMP): $(RUNS)
	$(PIP_INSTALL) --editable ".[$(EXTRAS)]"
	touch $(STAMP)

# torch is not in it: which build fits is a question of the machine (TORCH).
lock: setup
	$(BIN)/python -m pip freeze --exclude-editable --exclude torch > $(LOCK)

# Real asynchronous training of a real model, each time in a directory of its own; more settings by ARGS="--set seed=1".
demo: $(RUNS)
	$(BIN)/headrace train $(RECIPE) --name demo-$$(date +%Y%m%d-%H%M%S) $(ARGS)

# One thread a process: tests start several processes, and oversubscribed OpenMP threads spin against each other. Two more tests at a
# time than there are cores, because many of them wait; each worker takes about 1.5 GB of memory. Where Python is told to keep no bytecode (many containers do), each of their
# processes would compile what it imports.
WORKERS ?= $$($(BIN)/python -c "import os; print(min(8, len(os.sched_getaffinity(0)) + 2))")

test: setup
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

# Slow tests, and properties with all their examples, of which `make test` draws a quarter.
test-slow: setup
	$(PIP_INSTALL) --editable ".[ray]"
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -m "slow or hypothesis" --hypothesis-profile=full $(ARGS)

# Simulated runs with fresh seeds and faults (docs/simulation.md); prints what it finds, shrunk, with the command that shows it.
MINUTES ?= 60

fuzz: setup
	$(BIN)/python -m headrace.testing.faultsim.fuzz --minutes $(MINUTES) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy headrace

# The sdist and the wheel, in dist/, checked as an index would check them.
dist: setup
	rm -rf dist
	cd $(CURDIR) && $(BIN)/python -c 'import hatchling.build as b; b.build_sdist("dist"); b.build_wheel("dist")'
	$(BIN)/twine check --strict dist/*

# The pages of docs/ as a site, in build/site; a link that leads nowhere is an error.
site: setup
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --strict

docs: setup
	$(BIN)/python docs/make_settings.py
	$(BIN)/python docs/make_algorithms.py
	$(BIN)/python docs/make_trl.py
	$(BIN)/python docs/make_names.py
	$(BIN)/python docs/make_resuming.py
	$(BIN)/python docs/make_device.py

models: setup
	$(BIN)/python docs/make_models.py

# The queue of measurements for a machine with a GPU (docs/gpu.md), with a Python that has a CUDA build of torch: nothing is installed into it.
# ENTRIES="smoke decode" runs these; BUDGET is in seconds, for all together; WHEELS is a folder of packages where there is no network.
ENTRIES ?=
BUDGET ?= 600
WHEELS ?=
DEVICE_PYTHON ?= $(if $(filter command line environment,$(origin PYTHON)),$(PYTHON),python3)

device:
	$(DEVICE_PYTHON) -m benchmarks.device $(ENTRIES) --seconds $(BUDGET) $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

# The same scripts on the CPU with tiny shapes: no minute of a GPU is spent on a typo.
device-rehearsal: setup
	$(BIN)/python -m benchmarks.device $(ENTRIES) --device cpu --seconds 3600 $(ARGS)

bench: setup
	$(BIN)/python benchmarks/pipeline.py $(ARGS)

bench-engine: setup
	$(BIN)/python benchmarks/engine.py $(ARGS)

bench-trainer: setup
	$(BIN)/python benchmarks/trainer.py $(ARGS)

bench-end-to-end: setup
	$(BIN)/python benchmarks/end_to_end.py $(ARGS)

clean:
	rm -rf $(VENV) $(PEERS) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

include benchmarks/peers.mk
