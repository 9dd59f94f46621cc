# Everything builds its own environment; only Python 3.11+ and GNU make are needed.
#   make test            each test on one combination of broker, lease store and database
#   make test-all        each test on all of them, and the client libraries whose errors the rules are tested with
#   make simulate        clusters in one process, each from its seed, with everything that can go wrong (SIMULATE_ARGS)
#   make planted         the bugs that the simulator must find, and how many seeds it takes
#   make mutants         changes of one token in attempts and decisions, and which of them no test notices (MUTANTS_ARGS)
#   make faults          each request of a delivery to a real server, cut before and after it (FAULTS_ARGS)
#   make soak            three workers and faults of all kinds for MINUTES=10 (SOAK_ARGS)
#   make docs            the documentation as a site, in build/site; its links and anchors are checked
#   make release-check   what a release uploads, built, and installed with the oldest and newest dependencies (TAG=v1.2.3)
#   make lowest | lint | check | demo | demo-cooldown | play | peers | bench | clean       PYTHON=python3.12 chooses the interpreter
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
# Most of a test's time is waiting for something to be killed, paused or taken over.
PROCESSES := 6
PYTEST_ARGS ?= --processes $(PROCESSES)
# CI has the client libraries whose errors the rules are tested with; elsewhere these tests are skipped without them.
TEST_GROUPS := test $(if $(CI),clients)
# Tests start hundreds of workers, and these start sooner from compiled files.
export PYTHONDONTWRITEBYTECODE :=

.DELETE_ON_ERROR:
.PHONY: help test test-again test-all simulate planted mutants faults soak lowest lint check demo demo-cooldown play peers docs release-check bench clean

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))

# pip learned --group in 25.1.
$(VENV)/.pip:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "celery_leases needs Python 3.11 or newer, and this is %d.%d: try make PYTHON=python3.12" % v[:2])'
	@echo "== building $(VENV) with $$($(PYTHON) --version): a few seconds"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade "pip>=25.1"
	@touch $@

# The times shown before pip runs, because pip prints nothing. On a slow line it takes longer.
TIME_FOR_demo := about a minute
TIME_FOR_matrix := about a minute

# One stamp per dependency group, renewed when pyproject.toml changes.
$(VENV)/.group-%: $(VENV)/.pip pyproject.toml
	@echo "== installing the group '$*': once, $(or $(TIME_FOR_$*),a few minutes)"
	@$(PIP) install --editable . --group $*
	@touch $@

test: $(TEST_GROUPS:%=$(VENV)/.group-%)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

# Up to three tests that the last `make test` saw fail, one after the other. None, or more: fails.
test-again:
	@$(BIN)/python -c 'import json, sys; tests = json.load(open(".pytest_cache/v/cache/lastfailed")); print("== failed beside others, once more alone:", *tests, sep="\n   "); sys.exit(not 0 < len(tests) <= 3)'
	@$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

# Each worker imports all it needs there, so two cores are busy with fewer processes.
test-all: PROCESSES := 4
test-all: $(VENV)/.group-test $(VENV)/.group-clients
	@CELERY_LEASES_TEST_EXEC=1 $(BIN)/python -m pytest $(PYTEST_ARGS) --all-combinations

# SIMULATE_ARGS=--minutes 60 runs new seeds for an hour; --seed 7 tells what happens in one.
simulate: $(VENV)/.group-test
	@$(BIN)/python -m tests.simulation $(or $(SIMULATE_ARGS),--seeds 1-3000)

planted: $(VENV)/.group-test
	@$(BIN)/python -m tests.simulation.planted

# MUTANTS_ARGS="--minutes 10" runs as many as fit, in random order; --only "decide.claim" those of one module.
mutants: $(VENV)/.group-test
	@$(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

# FAULTS_ARGS="--on redis --only replay" plays one scenario on one combination.
faults: $(VENV)/.group-test
	@$(BIN)/python -m tests.faults $(FAULTS_ARGS)

soak: $(VENV)/.group-test
	@$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),10) $(SOAK_ARGS)

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
	@$(BIN)/python -m example_project.demo.cooldown

play: $(VENV)/.group-demo
	@$(BIN)/python -m example_project.play $(PLAY_ARGS)

# PEERS_ARGS=--check compares with docs/explanation/comparison.md; the environments of the others are made in build/environments.
peers: $(VENV)/.group-demo
	@$(BIN)/python -m benchmarks.peers $(PEERS_ARGS)

docs: $(VENV)/.group-docs
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env docs build/site
	@echo "== build/site/index.html, with llms.txt and each page as Markdown beside it"

# The files are in dist, the list of what an installation contains (CycloneDX) in build. With TAG, all must be of its version.
release-check: docs $(VENV)/.group-release
	@$(BIN)/nox --session package installed $(if $(TAG),-- $(TAG))

# BENCH_ARGS=--quick is a small version that writes nothing; --only throughput,writes measures a part.
bench: $(VENV)/.group-bench
	@$(BIN)/python -m benchmarks.performance $(BENCH_ARGS)

clean:
	rm -rf $(VENV) .nox build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
