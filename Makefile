# Everything builds its own environment; only Python 3.11+ and GNU make are needed.
#   make test | lowest | lint | check | demo | demo-cooldown | peers | clean        PYTHON=python3.12 chooses the interpreter
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
# Most of a test's time is waiting for something to be killed, paused or taken over; one module stays in one process.
PYTEST_ARGS ?= -n 4 --dist loadfile

.DELETE_ON_ERROR:
.PHONY: help test lowest lint check demo demo-cooldown peers clean

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))

# pip learned --group in 25.1.
$(VENV)/.pip:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "celery_leases needs Python 3.11 or newer, and this is %d.%d: try make PYTHON=python3.12" % v[:2])'
	@echo "== building $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade "pip>=25.1"
	@touch $@

# One stamp per dependency group, renewed when pyproject.toml changes.
$(VENV)/.group-%: $(VENV)/.pip pyproject.toml
	@echo "== installing the group '$*'"
	@$(PIP) install --editable . --group $*
	@touch $@

test: $(VENV)/.group-test
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

# The oldest release of everything the package allows, on the tests that see a difference.
lowest: $(VENV)/.group-matrix
	@$(BIN)/nox --session lowest

lint: $(VENV)/.group-dev
	@echo "== ruff check"   && $(BIN)/ruff check --quiet .
	@echo "== ruff format"  && $(BIN)/ruff format --quiet --check .
	@echo "== mypy"         && $(BIN)/mypy
	@echo "== lint-imports" && $(BIN)/lint-imports --no-logo

check: lint test

demo: $(VENV)/.group-demo
	@$(BIN)/python -m example_project.demo

demo-cooldown: $(VENV)/.group-demo
	@$(BIN)/python -m example_project.demo_cooldown

# PEERS_ARGS=--check compares with docs/comparison.md; the environments of the others are made in build/peers.
peers: $(VENV)/.group-demo
	@$(BIN)/python -m benchmarks.peers $(PEERS_ARGS)

clean:
	rm -rf $(VENV) .nox build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
