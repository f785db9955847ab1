# make quickstart   train a small agent end to end, on two CPU cores
# make test         style, types and the fast suite
# make test-machine the slow tests, and those that need what this machine may have
# Each makes .venv where there is none, and installs again only when pyproject.toml or constraints.txt changed.

PYTHON ?= python3
PY := .venv/bin/python
ALONE := docker or sglang or openhands or gpu or alone
SPECIAL := slow or $(ALONE)

.PHONY: quickstart test test-machine lint types fast install
.DEFAULT_GOAL := test

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt requirements-sandbox.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sao-gym needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements-sandbox.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: install
	$(PY) -m sao_gym.quickstart

test: lint types fast

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: install
	$(PY) -m mypy

fast: install
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 -m "not ($(SPECIAL))"

# Exit code 5 says that no test was selected, which is no failure here.
test-machine: install
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -rs -n 2 -m "slow and not ($(ALONE))" || test $$? -eq 5
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -rs -m "$(ALONE)" || test $$? -eq 5
