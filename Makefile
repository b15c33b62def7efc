# What the README names and what CI runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_VENV ?= .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
VERL_VENV ?= .venv-verl
VERL_INSTALLED := $(VERL_VENV)/.installed

.PHONY: install install-vllm install-verl demo bytecode test test-parallel-and-serial test-parallel test-serial test-slow test-slow-parallel test-slow-serial test-slow-again test-soak test-vllm test-verl test-all bench chaos lint types format clean docs docs-reference docs-benchmarks docs-serve

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)  ## teach a tiny model sums by imitation, then by reinforcement, on a laptop CPU
	rm -rf demo
	$(BIN)/python examples/arithmetic/make_task.py demo
	$(BIN)/podium train examples/arithmetic/pipeline.yaml
	$(BIN)/podium export demo/runs/arithmetic demo/export --stage sft  # what the recipes in examples/methods begin with
	$(BIN)/python examples/arithmetic/summary.py demo/runs/arithmetic/sft demo/runs/arithmetic/grpo

FAST := not slow and not gpu and not verl and not trl and not trackers and not environments and not browser and not clients and not verifiers and not lm_eval
SLOW := slow and not soak and not gpu and not trl and not trackers and not environments and not jobs and not clients and not verifiers and not lm_eval
TWO_PROCESSES := -n 2 --dist loadfile --no-loadscope-reorder

# Also where PYTHONDONTWRITEBYTECODE is set: the tests start hundreds of processes, and each would compile Podium again.
bytecode: $(INSTALLED)
	$(BIN)/python -m compileall -q src

test: lint bytecode  ## what every change must pass
	$(MAKE) --no-print-directory -j 2 types test-parallel-and-serial

test-parallel-and-serial:
	$(MAKE) --no-print-directory test-parallel
	$(MAKE) --no-print-directory test-serial

# What fails beside other work is tried once more, alone, and fails if it fails again. Only failed tests are (pytest's
# exit code 1), and what failed in an earlier run is forgotten first: a test over its time ends pytest with that code
# before it notes what failed.
AGAIN := --last-failed --last-failed-no-failures none
FORGET = rm -f $(1)/v/cache/lastfailed
OR_AGAIN = || { test $$? = 1 && $(1) $(AGAIN); }

FAST_PARALLEL_CACHE := .pytest_cache/parallel
FAST_PARALLEL := $(BIN)/python -m pytest -q -o cache_dir=$(FAST_PARALLEL_CACHE) -m "$(FAST) and not serial"
FAST_SERIAL_CACHE := .pytest_cache/serial
FAST_SERIAL := $(BIN)/python -m pytest -q -o cache_dir=$(FAST_SERIAL_CACHE) -m "$(FAST) and serial"

test-parallel: $(INSTALLED)  ## in two processes
	@$(call FORGET,$(FAST_PARALLEL_CACHE))
	$(FAST_PARALLEL) $(TWO_PROCESSES) $(call OR_AGAIN,$(FAST_PARALLEL))

test-serial: $(INSTALLED)  ## what needs Ray or a steady clock
	@$(call FORGET,$(FAST_SERIAL_CACHE))
	$(FAST_SERIAL) $(call OR_AGAIN,$(FAST_SERIAL))

test-slow: bytecode  ## the rest: several ranks, kills, restarts
	$(MAKE) --no-print-directory -k -j 2 test-slow-parallel test-slow-serial || $(MAKE) --no-print-directory test-slow-again

# Both parts at once: what failed is tried again when both have ended.
# SLOW_SECONDS skips what has not begun by then: CI has a limit. It fails if that is everything.
SLOW_LIMIT = $(if $(SLOW_SECONDS),--begin-within-s $(SLOW_SECONDS))
PARALLEL_CACHE := .pytest_cache/slow-parallel
SERIAL_CACHE := .pytest_cache/slow-serial
SLOW_PARALLEL := --timeout 600 --durations=30 -o cache_dir=$(PARALLEL_CACHE) -m "$(SLOW) and not serial"
SLOW_SERIAL := --timeout 600 --durations=30 -o cache_dir=$(SERIAL_CACHE) -m "$(SLOW) and serial"
# How a part ended.
NOTE_END = && touch $(1)/passed || { code=$$?; test $$code != 1 || touch $(1)/failed; exit $$code; }
BEGIN = mkdir -p $(1)-end && rm -f $(1)-end/passed $(1)-end/failed && $(call FORGET,$(1))
PARALLEL_END := $(PARALLEL_CACHE)-end
SERIAL_END := $(SERIAL_CACHE)-end

test-slow-parallel: $(INSTALLED)  ## beside the serial ones; both have twice the usual time for a test
	@$(call BEGIN,$(PARALLEL_CACHE))
	$(BIN)/python -m pytest -q $(SLOW_PARALLEL) $(SLOW_LIMIT) $(call NOTE_END,$(PARALLEL_END))

test-slow-serial: $(INSTALLED)  ## what needs Ray or a steady clock
	@$(call BEGIN,$(SERIAL_CACHE))
	$(BIN)/python -m pytest -q $(SLOW_SERIAL) $(SLOW_LIMIT) $(call NOTE_END,$(SERIAL_END))

test-slow-again: $(INSTALLED)  ## what failed the last time
	test -e $(PARALLEL_END)/passed || { test -e $(PARALLEL_END)/failed && $(BIN)/python -m pytest -q $(SLOW_PARALLEL) $(AGAIN); }
	test -e $(SERIAL_END)/passed || { test -e $(SERIAL_END)/failed && $(BIN)/python -m pytest -q $(SLOW_SERIAL) $(AGAIN); }

test-soak: $(INSTALLED)  ## kills at more moments, longer sweeps of simulated schedules
	$(BIN)/python -m pytest -q --timeout 600 -m "soak and not gpu"

bench: bytecode  ## CPU benchmarks beside those of an earlier commit, as ratios; on an idle machine, about 5 minutes
	$(BIN)/python benchmarks/regression.py

SECONDS ?= 300
chaos: $(INSTALLED)  ## simulated runs with random faults, for SECONDS
	PYTHONPATH=tests $(BIN)/python tests/chaos.py --seconds $(SECONDS)

install-vllm: $(VLLM_INSTALLED)  ## an environment of its own, with vLLM's CPU build

$(VLLM_INSTALLED): constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

test-vllm: $(VLLM_INSTALLED)  ## the rollout engines' tests with vLLM behind them
	VLLM_LOGGING_LEVEL=ERROR $(VLLM_VENV)/bin/python -m pytest -q -m vllm tests/rollout tests/e2e/test_on_policy_vllm.py

install-verl: $(VERL_INSTALLED)  ## an environment of its own, with verl to compare the formulas with

$(VERL_INSTALLED): tests/verl/requirements.txt constraints.txt
	$(PYTHON) -m venv $(VERL_VENV)
	$(VERL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r tests/verl/requirements.txt
	$(VERL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1 tensordict==0.10.0 pyvers==0.1.0
	$(VERL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

test-verl: $(VERL_INSTALLED)  ## the RL formulas beside verl's own, on fresh random inputs
	$(VERL_VENV)/bin/python -m pytest -q -m verl tests/verl

test-all: test test-slow test-soak

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## in the time that tests leave
	nice -n 19 $(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: docs-reference docs-benchmarks  ## the site in site/; a broken link or an unknown reference is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-reference: $(INSTALLED)  ## docs/recipe_reference.md, from the recipe's classes
	$(BIN)/python docs/make_recipe_reference.py

docs-benchmarks: $(INSTALLED)  ## the tables of docs/benchmarks.md, from benchmarks/results/
	$(BIN)/python benchmarks/result_tables.py

docs-serve: $(INSTALLED)  ## the site on localhost, rebuilt while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf demo tutorial site runs .mypy_cache .pytest_cache .ruff_cache .hypothesis

TRL_VENV ?= .venv-trl
TRL_INSTALLED := $(TRL_VENV)/.installed

.PHONY: install-trl test-trl

install-trl: $(TRL_INSTALLED)  ## an environment of its own, with TRL to compare the losses with

$(TRL_INSTALLED): tests/trl/requirements.txt constraints.txt
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r tests/trl/requirements.txt
	$(TRL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

test-trl: $(TRL_INSTALLED)  ## losses of preferences, reward models and distillation beside TRL's own
	$(TRL_VENV)/bin/python -m pytest -q -m trl tests/trl

BROWSER_VENV ?= .venv-browser
BROWSER_INSTALLED := $(BROWSER_VENV)/.installed

.PHONY: install-browser test-browser

install-browser: $(BROWSER_INSTALLED)  ## an environment of its own, with playwright for the distribution's Chromium

$(BROWSER_INSTALLED): tests/browser/requirements.txt constraints.txt
	$(PYTHON) -m venv $(BROWSER_VENV)
	$(BROWSER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r tests/browser/requirements.txt
	$(BROWSER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

BROWSER_CACHE := .pytest_cache/browser
BROWSER_TESTS := $(BROWSER_VENV)/bin/python -m pytest -q -o cache_dir=$(BROWSER_CACHE) --confcutdir tests/browser -m browser tests/browser

test-browser: $(BROWSER_INSTALLED)  ## the page of `podium ui` in Chromium; skipped where there is none
	@$(call FORGET,$(BROWSER_CACHE))
	$(BROWSER_TESTS) $(call OR_AGAIN,$(BROWSER_TESTS))

TRACKERS_VENV ?= .venv-trackers
TRACKERS_INSTALLED := $(TRACKERS_VENV)/.installed

.PHONY: install-trackers test-trackers

install-trackers: $(TRACKERS_INSTALLED)  ## an environment of its own, with wandb, MLflow and Trackio

$(TRACKERS_INSTALLED): constraints-trackers.txt
	$(PYTHON) -m venv $(TRACKERS_VENV)
	$(TRACKERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-trackers.txt
	$(TRACKERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

test-trackers: $(TRACKERS_INSTALLED)  ## trackers with the real packages, in their offline modes
	$(TRACKERS_VENV)/bin/python -m pytest -q -m trackers tests/trackers

JOBS_VENV ?= .venv-jobs
JOBS_INSTALLED := $(JOBS_VENV)/.installed

.PHONY: install-jobs test-jobs

install-jobs: $(JOBS_INSTALLED)  ## an environment of its own, with Ray's job server

$(JOBS_INSTALLED): tests/jobs/requirements.txt constraints.txt
	$(PYTHON) -m venv $(JOBS_VENV)
	$(JOBS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r tests/jobs/requirements.txt
	$(JOBS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

test-jobs: $(JOBS_INSTALLED)  ## runs as jobs of a Ray cluster: ray job submit, logs and stop
	$(JOBS_VENV)/bin/python -m pytest -q -m jobs tests/jobs

ENVIRONMENTS_VENV ?= .venv-environments
ENVIRONMENTS_INSTALLED := $(ENVIRONMENTS_VENV)/.installed

.PHONY: install-environments test-environments

install-environments: $(ENVIRONMENTS_INSTALLED)  ## an environment of its own, with Gymnasium and OpenEnv

$(ENVIRONMENTS_INSTALLED): tests/field_environments/requirements.txt constraints.txt
	$(PYTHON) -m venv $(ENVIRONMENTS_VENV)
	$(ENVIRONMENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r tests/field_environments/requirements.txt
	$(ENVIRONMENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps openenv-core==0.3.0
	$(ENVIRONMENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

test-environments: $(ENVIRONMENTS_INSTALLED)  ## environments of other packages, with the real packages
	$(ENVIRONMENTS_VENV)/bin/python -m pytest -q -m environments tests/field_environments

CLIENTS_VENV ?= .venv-clients
CLIENTS_INSTALLED := $(CLIENTS_VENV)/.installed

.PHONY: install-clients test-clients

install-clients: $(CLIENTS_INSTALLED)  ## an environment of its own, with the clients of OpenAI and Anthropic

$(CLIENTS_INSTALLED): tests/clients/requirements.txt constraints.txt
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r tests/clients/requirements.txt
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

test-clients: $(CLIENTS_INSTALLED)  ## the gateway with real clients, unchanged from PyPI
	$(CLIENTS_VENV)/bin/python -m pytest -q -m clients tests/clients

VERIFIERS_VENV ?= .venv-verifiers
VERIFIERS_INSTALLED := $(VERIFIERS_VENV)/.installed

.PHONY: install-verifiers test-verifiers

install-verifiers: $(VERIFIERS_INSTALLED)  ## an environment of its own, with verifiers

$(VERIFIERS_INSTALLED): tests/verifiers_environments/requirements.txt constraints.txt
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r tests/verifiers_environments/requirements.txt
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

test-verifiers: $(VERIFIERS_INSTALLED)  ## environments of verifiers, unchanged from PyPI
	PATH="$(abspath $(VERIFIERS_VENV))/bin:$$PATH" $(VERIFIERS_VENV)/bin/python -m pytest -q -m verifiers tests/verifiers_environments

LM_EVAL_VENV ?= .venv-lm-eval
LM_EVAL_INSTALLED := $(LM_EVAL_VENV)/.installed

.PHONY: install-lm-eval test-lm-eval

install-lm-eval: $(LM_EVAL_INSTALLED)  ## an environment of its own, with lm-eval

$(LM_EVAL_INSTALLED): tests/lm_eval_tasks/requirements.txt constraints.txt
	$(PYTHON) -m venv $(LM_EVAL_VENV)
	$(LM_EVAL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r tests/lm_eval_tasks/requirements.txt
	$(LM_EVAL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

test-lm-eval: $(LM_EVAL_INSTALLED)  ## podium serve and podium evaluate --tasks with lm-eval, unchanged from PyPI
	$(LM_EVAL_VENV)/bin/python -m pytest -q -m lm_eval tests/lm_eval_tasks
