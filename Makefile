# Two commands for people: `make run` and `make test`. Both make the environment first; a second call finds it made.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.PHONY: run test environment system

PYTHON ?= python3
PROFILE ?= smoke
BIN := .venv/bin
STAMP := .venv/.installed

# uv does not read pip's own settings: hand on a folder of wheels and a certificate bundle where pip has them.
export UV_FIND_LINKS := $(PIP_FIND_LINKS)
ifdef PIP_CERT
export SSL_CERT_FILE ?= $(PIP_CERT)
endif
export VIRTUAL_ENV := $(CURDIR)/.venv

run: environment
	@$(BIN)/cuda-agent run --profile $(PROFILE)

test: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

environment: system $(STAMP)

system:
	@.ci/system-packages

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11; call make with PYTHON=/path/to/python3.11 or newer." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { echo "python3 -m venv failed; install it with: sudo apt-get install -y python3-venv" >&2; exit 2; }
	@echo "making the environment in .venv (about two minutes, once)" >&2
	umask 022 && $(BIN)/python -m pip install -q --disable-pip-version-check uv
	$(BIN)/uv pip install -q -c constraints.txt torch wheel setuptools packaging ninja py-cpuinfo
	$(BIN)/uv pip install -q -c constraints.txt --no-build-isolation-package deepspeed -r pyproject.toml --extra train --extra orchestrate --group dev
	$(BIN)/uv pip install -q --no-deps --no-build-isolation -e .
	@touch $(STAMP)
