# Every target makes its own environment first (.venv, pinned versions, CPU or CUDA by what the
# machine has); install/setup.sh returns at once when it is up to date.
PY := .venv/bin/python
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-all all-units all-engines mlflow conformance test-range test-touched test-rounding real-models lint docs verifiers openenv environments browser launch-tools wheel release doctor bench-floor gpu-check gpu-figures lock

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 22

setup:  ## make or update .venv (the others do it by themselves)
	@install/setup.sh

# One OpenMP thread: two on a busy machine are many times slower than one. No vLLM plugins:
# an installed torchrl would load its own and change how processes start.
ALL_TESTS := test test-all all-units all-engines mlflow conformance test-range test-touched test-rounding
$(ALL_TESTS) bench-floor: export OMP_NUM_THREADS ?= 1
$(ALL_TESTS) bench-floor: export VLLM_PLUGINS ?=
$(ALL_TESTS) bench-floor: export VLLM_NO_USAGE_STATS ?= 1
# Tests make their own models and data; a hub look-up is a mistake, and fails at once.
$(ALL_TESTS): export HF_HUB_OFFLINE ?= 1

# A test that takes its worker down is tried again, by which a hang would never end.
TWO := -n 2 --max-worker-restart 2

quickstart: setup  ## train a real model of 135M parameters, and see its accuracy rise (8 minutes)
	@$(PY) -m lightning_rl quickstart

UNIT := tests/unit $(TWO)
ENGINES := tests/integration $(TWO) --dist loadfile  # files that share engines share a worker
NOTED := --durations-to .ci/durations.txt

test: setup  ## what the README promises: unit tests, then real vLLM engines (ten minutes)
	$(PY) -m pytest $(UNIT) -m "not slow"
	$(PY) -m pytest $(ENGINES) -m "not slow"

# Each part is a target, so that `make --keep-going test-all` runs them all if one fails.
test-all: all-units all-engines mlflow conformance wheel test-range  ## every test; notes each file's seconds in .ci/durations.txt (an hour)

all-units: environments
	$(PY) -m pytest $(UNIT) $(NOTED)
	$(PY) -m benchmarks.versions units

all-engines: environments
	$(PY) -m pytest $(ENGINES) $(NOTED)
	$(PY) -m benchmarks.versions engines

mlflow: environments  # left out of the others
	build/mlflow/bin/python -m pytest tests/integration/test_loggers.py -k mlflow

conformance: setup
	$(PY) -m pytest tests/conformance $(TWO) --dist loadfile $(NOTED)
	$(PY) -m benchmarks.versions conformance

# Where we build on others most; all unit tests would take three times as long.
RANGE := $(addprefix tests/unit/,data models vision engines learn) $(TWO)

test-range: setup  ## unit tests with the oldest and the newest packages that setup.cfg admits
	@install/range.sh oldest
	@install/range.sh newest
	build/oldest/bin/python -m pytest $(RANGE)
	build/oldest/bin/python -m benchmarks.versions "units of models and data"
	build/newest/bin/python -m pytest $(RANGE)
	build/newest/bin/python -m benchmarks.versions "units of models and data"

test-touched: environments  ## the slow tests that changes since the last whole test-all touch
	$(PY) -m tests.touched $(TWO)

test-rounding: setup  ## the tests as other CPUs round, and the margins of bounds (TESTS=path)
	$(PY) -m tests.disturbed $(TESTS)

real-models: setup  ## real tokenizers and templates for tests/conformance, into the user's cache (needs npm)
	@$(PY) -m tests.support.real_models

lint: setup  ## ruff and mypy
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

# Not --quiet: it hides warnings from --strict too, and a dead link would pass.
docs: export NO_MKDOCS_2_WARNING ?= 1
docs: setup  ## build the documentation into site/, warnings are errors
	$(PY) -m mkdocs build --strict

verifiers: setup  ## an environment for verifiers' environments, in build/verifiers
	@install/environment.sh verifiers

openenv: setup  ## an environment for OpenEnv's environments, in build/openenv
	@install/environment.sh openenv

environments: verifiers openenv  ## these two, and those for notebooks, builds, MLflow and agents, which some tests need
	@install/environment.sh agents_sdk
	@install/environment.sh notebook --behind
	@install/environment.sh packaging
	@install/environment.sh mlflow --behind

browser: setup  ## a Chromium for the viewer's tests, into build/browser (needs npm)
	install/browser.sh

launch-tools: setup  ## Slurm and Ray's dashboard into build/, for the tests of launch/
	install/slurm.sh
	install/ray.sh

wheel: setup  ## sdist and wheel into dist/, and the quickstart from the wheel, outside of here
	@install/wheel.sh

release: setup  ## changelog entry, tag, sdist and wheel; uploads nothing (VERSION=0.1.0)
	@install/release.sh $(VERSION)

doctor: setup  ## versions, engine, devices, threads, and what is wrong with each
	@$(PY) -m lightning_rl.cli.check.doctor

bench-floor: setup  ## step time against its floor; the last line is JSON
	@$(PY) -m benchmarks.floor

# GPU_PYTHON=python3 takes a machine's own packages, where no .venv can be made for lack of a network.
gpu-check: $(if $(GPU_PYTHON),,setup)  ## try all on a GPU, a line of JSON each (LIST=1, ONLY=push)
	@$(or $(GPU_PYTHON),$(PY)) -m benchmarks.gpu $(if $(LIST),--list) $(if $(ONLY),--only=$(ONLY)) \
		$(if $(DEVICE),--device=$(DEVICE)) $(if $(SECONDS),--seconds=$(SECONDS)) $(if $(OUT),--out=$(OUT))
	$(if $(LIST)$(ONLY),,@$(or $(GPU_PYTHON),$(PY)) -m benchmarks.versions gpu-check)

# What fails or runs out of time costs its own figures alone.
gpu-figures: $(if $(GPU_PYTHON),,setup)  ## all figures of docs/gpu.md, in ten minutes on a GPU
	-@$(or $(GPU_PYTHON),$(PY)) -m benchmarks.gpu --only=machine,compiled,tokens-per-second --seconds=150
	-@$(or $(GPU_PYTHON),$(PY)) -m benchmarks.gpu.peers --only=full --seconds=270
	-@$(or $(GPU_PYTHON),$(PY)) -m benchmarks.gpu.learning --seeds 0 --seconds=170

lock: setup  ## resolve the pinned versions anew (install/*-constraints.txt)
	install/lock.sh
