# What the README names and what CI runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_VENV ?= .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed

.PHONY: install install-vllm demo test test-slow test-vllm test-all lint types format clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)  ## fine-tune a tiny model on arithmetic, on a laptop CPU
	rm -rf demo
	$(BIN)/python examples/arithmetic/make_task.py demo
	$(BIN)/podium train examples/arithmetic/sft.yaml
	$(BIN)/podium export demo/runs/arithmetic-sft demo/export
	$(BIN)/python examples/arithmetic/summary.py demo/runs/arithmetic-sft

test: lint types  ## what every change must pass
	$(BIN)/python -m pytest -q -m "not slow and not gpu"

test-slow: $(INSTALLED)  ## the rest: several ranks, kills, restarts
	$(BIN)/python -m pytest -q -m "slow and not gpu"

install-vllm: $(VLLM_INSTALLED)  ## an environment of its own, with vLLM's CPU build

$(VLLM_INSTALLED): constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

test-vllm: $(VLLM_INSTALLED)  ## the rollout engines' tests with vLLM behind them
	VLLM_LOGGING_LEVEL=ERROR $(VLLM_VENV)/bin/python -m pytest -q -m vllm tests/rollout

test-all: test test-slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf demo runs .mypy_cache .pytest_cache .ruff_cache .hypothesis
