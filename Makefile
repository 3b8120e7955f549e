# Everything runs from .venv, which the first target that needs it builds from the locks in
# requirements/. Stamp files remember what is done, so that the second run starts at once.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
ICEBERG := .venv-iceberg# Spark 4.1, for tests of Iceberg
BIN := $(VENV)/bin
PYTEST_ARGS ?=
PYTHONS ?= 3.10 3.13
JOBS ?= 3
CORES ?= 2
PARTS := rules queues brokers spark web
PART ?= $(PARTS)
FAULTS_rules := tests/model tests/sim tests/unit tests/wire
FAULTS_queues := tests/contract tests/integration tests/interop
FAULTS_brokers := $(filter-out tests/faults/test_spark% tests/faults/test_web%,$(wildcard tests/faults/test_*.py))
FAULTS_web := $(wildcard tests/faults/test_web*.py) tests/integration/test_web.py
FAULTS_spark := tests/spark tests/e2e $(wildcard tests/faults/test_spark*.py)
NONE := 5# how pytest says that PYTEST_ARGS select nothing there
ARGS ?=
# Tests start hundreds of processes: none of them is to compile what another one has.
export PYTHONDONTWRITEBYTECODE :=
COMPILE := $(BIN)/python -m compileall -q src harness tests
# Pytest compiles tests with its own `assert`: in a new tree, one process does so for all workers.
COLLECT := grep -rlq . tests --include='*-pytest-*.pyc' || $(BIN)/python -m pytest --collect-only -qq >/dev/null || true

UV_INSTALL := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python
UV_COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes \
	--no-emit-index-url --no-header

SEEDS ?= 0..999
.PHONY: help demo sim chromium postgres check test test-faults mutants lint compiled format types imports sizes \
	bench lock screenshots docs dist clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(VENV)/.installed ## a real broker, workers that are killed, and what became of every message
	@tools/check_machine java
	@$(BIN)/kafkamq demo $(ARGS)

# Most of the time the shells' tests wait.
CHECK_JOBS = $(shell echo $$((3 * $(CORES))))
check: BESIDE := compiled
check: lint ## lint, and the tests that need no JVM: rules, wire formats, simulator; at most 90 s
	QUICK_TESTS=1 $(BIN)/python -m pytest -q -m "not faults and not slow and not spark" -n $(CHECK_JOBS) --dist worksteal \
		$(FAULTS_rules) $(PYTEST_ARGS)

# Most of them wait for Kafka most of the time: four for each core, each with up to 2 GiB;
# tests/scheduling.py says who takes what.
TEST_JOBS = $(shell $(PYTHON) -c 'import os; memory = os.sysconf("SC_PAGE_SIZE") * \
	os.sysconf("SC_PHYS_PAGES"); print(max(1, min(4 * os.cpu_count(), memory >> 31)))')
test: JOBS := $(if $(filter file,$(origin JOBS)),$(TEST_JOBS),$(JOBS))
test: BESIDE := compiled
test: lint ## lint, then all tests but the fault suite
	@tools/check_machine java
	@test "$(CI)" != true || test -e /usr/bin/chromium || $(MAKE) --no-print-directory chromium
	@test "$(CI)" != true || test -e /usr/lib/postgresql || $(MAKE) --no-print-directory postgres
	$(BIN)/python -m pytest -m "not faults" -n $(JOBS) --dist loadfile --durations=20 --durations-min=5 \
		$(PYTEST_ARGS)

test-faults: $(VENV)/.installed ## kills, cuts and long runs; PART=rules, queues, brokers, spark or web, all without it
	@tools/check_machine java
	@$(COMPILE)
	@failed=; for part in $(PART); do \
		$(MAKE) --no-print-directory test-faults-$$part || failed="$$failed $$part"; \
	done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

test-faults-%: $(VENV)/.installed
	$(if $(FAULTS_$*),,$(error PART is one or more of $(PARTS)))
	$(BIN)/python -m pytest -m faults -n $(JOBS) $(if $(filter rules,$*),,--dist loadfile) \
		$(FAULTS_$*) $(PYTEST_ARGS) || test $$? = $(NONE)
	$(if $(filter rules,$*),FRESH_EXAMPLES=1 $(BIN)/python -m pytest -m "not faults" -n $(CORES) -o timeout=1800 \
		tests/model tests/wire $(PYTEST_ARGS) || test $$? = $(NONE))

chromium: ## Debian's browser for the tests of the pages, by apt
	apt-get update --quiet=2
	apt-get install --quiet=2 --yes --no-install-recommends chromium

postgres: ## Debian's PostgreSQL for the test of its example, by apt
	apt-get update --quiet=2
	apt-get install --quiet=2 --yes --no-install-recommends postgresql

sim: $(VENV)/.installed ## seeds of the simulator: SEEDS=A..B
	$(BIN)/python -m harness.simulation $(SEEDS) $(ARGS)

mutants: $(VENV)/.installed ## break each rule on a copy of the tree: its tests must fail; ARGS="--only R15"
	$(BIN)/python tools/run_mutants.py --jobs $(JOBS) $(ARGS)

lint: $(VENV)/.installed ## style, types, layers, sizes and what tests reach
	@$(MAKE) --no-print-directory --jobs=$(CORES) --output-sync types format imports sizes $(BESIDE)

compiled: $(VENV)/.installed
	@$(COMPILE)
	@$(COLLECT)

format: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

imports: $(VENV)/.installed
	$(BIN)/lint-imports

sizes: $(VENV)/.installed
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/check_privates.py

bench: $(VENV)/.installed ## measure queues and Spark on this machine
	@tools/check_machine java
	$(BIN)/python benchmarks/queue.py $(ARGS)
	$(BIN)/python benchmarks/batches.py $(ARGS)
	$(BIN)/python benchmarks/spark.py $(ARGS)
	$(BIN)/python benchmarks/spark_queue.py $(ARGS)
	$(BIN)/python benchmarks/claims.py $(ARGS)
	$(BIN)/python benchmarks/parallel.py $(ARGS)
	$(BIN)/python benchmarks/compare.py $(ARGS)
	$(BIN)/python benchmarks/web.py $(ARGS)

lock: $(VENV)/.uv ## resolve the locks in requirements/ again
	$(UV_COMPILE) requirements/bootstrap.in --output-file requirements/bootstrap.txt
	$(UV_COMPILE) pyproject.toml --extra all --output-file requirements/runtime.txt
	$(UV_COMPILE) pyproject.toml --extra dev --output-file requirements/dev.txt \
		--constraint requirements/runtime.txt
	$(UV_COMPILE) --group docs --output-file requirements/docs.txt
	$(UV_COMPILE) pyproject.toml --group iceberg --output-file requirements/iceberg.txt

screenshots: $(VENV)/.installed ## the pictures in docs/web.md, of queues that run for some minutes
	@tools/check_machine java
	$(BIN)/python tools/make_screenshots.py $(ARGS)

docs: $(VENV)/.docs ## the documents as a site in build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict

dist: $(VENV)/.uv ## wheel and sdist in dist/, checked on PYTHONS="3.10 3.13" (versions or interpreters)
	@tools/check_machine java
	@$(BIN)/python tools/check_distributions.py $(PYTHONS)

clean: ## remove .venv, caches and built packages
	rm -rf $(VENV) $(ICEBERG) dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment, one step per stamp: uv, then the locked packages, then this package itself.
$(VENV)/.uv: requirements/bootstrap.txt
	@tools/check_machine python "$(PYTHON)"
	@echo "Preparing $(VENV) (only once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		--requirement requirements/bootstrap.txt
	@touch $@

$(VENV)/.locked: requirements/dev.txt $(VENV)/.uv
	@$(UV_INSTALL) --require-hashes --requirement requirements/dev.txt
	@touch $@

# The site's own: tests need none of it.
$(VENV)/.docs: requirements/docs.txt $(VENV)/.uv
	@$(BIN)/uv venv --quiet --clear $(VENV)/docs
	@$(BIN)/uv pip install --quiet --python $(VENV)/docs/bin/python --require-hashes \
		--requirement requirements/docs.txt
	@touch $@

# Iceberg has no runtime for the Spark of the extra `spark`.
$(ICEBERG)/.installed: requirements/iceberg.txt $(VENV)/.uv
	@echo "Preparing $(ICEBERG) (only once)"
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(ICEBERG)
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(ICEBERG)/bin/python --require-hashes \
		--requirement requirements/iceberg.txt
	@$(BIN)/uv pip install --quiet --python $(ICEBERG)/bin/python --no-deps --editable .
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.locked
	@$(UV_INSTALL) --no-deps --editable .
	@touch $@
