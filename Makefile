# Two commands from nothing: `make quickstart` trains a small model, `make test` runs the test suite.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints/cpu.txt
INSTALL := $(BIN)/python scripts/install.py -c $(CONSTRAINTS)
TRIAL ?= $(shell date +%Y%m%d-%H%M%S)
PYTEST := $(BIN)/python -m pytest --durations 12 --durations-min 5
# One process for each processor, and a file of tests stays in one (those of vLLM in the same). What measures memory or runs many processes
# itself comes after, alone.
SIDE_BY_SIDE := -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 2
# What kernels compute: once more as on a processor without AVX-512, and as on one without vector instructions.
OF_KERNELS := tests/unit/inference/test_batch_invariance.py $(addprefix tests/unit/inference/test_builtin_,branches.py cache.py generation.py scores.py weights.py) \
	$(addprefix tests/unit/training/test_,actor.py fast_layers.py logprobs.py microbatch.py preferences.py prefix_tree.py) \
	$(addprefix tests/unit/rollout/test_,deterministic.py local_engine.py) tests/unit/sequence_processing/test_processor.py
# Only computes, and waits for nothing: no matter how slowly it goes on beside something else.
SUMS := tests/truth tests/unit/algorithms tests/unit/sequence_processing tests/unit/training
ALONE := tests/integration/test_rank_memory.py tests/clients tests/viewer tests/cluster tests/faults

.DEFAULT_GOAL := help
.PHONY: help quickstart gpu-check test test-quick test-sums test-servers test-alone test-fast lint docs clean test-processors

help:  ## What can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

$(VENV)/.python: constraints/cpu.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Rollwright needs Python 3.11 or later; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.core: $(VENV)/.python pyproject.toml
	$(INSTALL) -e '.[plots,view]'
	@touch $@

$(VENV)/.test: $(VENV)/.python pyproject.toml
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.core

quickstart: $(VENV)/.core  ## Train a small model with GRPO on this machine and show what it learned
	$(BIN)/rollwright run examples/quickstart.yaml trial_name=$(TRIAL)

gpu-check: $(VENV)/.test  ## What the tests cannot show without a GPU, in 45 minutes; GPU_CHECK='--only ...' takes options of `rollwright doctor --gpu`
	$(BIN)/rollwright doctor --gpu $(GPU_CHECK)

test: test-quick test-sums test-servers test-alone  ## All tests: quick ones first, then servers and runs that learn

test-quick: $(VENV)/.test
	$(PYTEST) $(SIDE_BY_SIDE) tests/unit $(SUMS:%=--ignore=%)

test-sums: $(VENV)/.test
	$(PYTEST) $(SIDE_BY_SIDE) $(SUMS)

test-servers: $(VENV)/.test
	$(PYTEST) $(SIDE_BY_SIDE) tests/end_to_end tests/extension tests/integration $(ALONE:%=--ignore=%)

test-alone: $(VENV)/.test
	$(PYTEST) $(ALONE)

test-fast: $(VENV)/.test  ## Only the quick tests
	$(PYTEST) $(SIDE_BY_SIDE) tests/unit

test-processors: $(VENV)/.test  ## The tests of engine, training and determinism as on smaller processors
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(PYTEST) $(SIDE_BY_SIDE) $(OF_KERNELS)
	ATEN_CPU_CAPABILITY=default $(PYTEST) $(SIDE_BY_SIDE) $(OF_KERNELS)

lint: $(VENV)/.test  ## Style, types and floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

docs: $(VENV)/.test  ## The documentation as a site, in build/site; a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## Remove the virtual environments (runs/ is yours: it stays)
	rm -rf .venv .venv-*
