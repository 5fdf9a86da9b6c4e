# branchgrpo: everything runs in ./.venv, which the first target that needs it makes.
#
#   make audit   judge the implementation: a verdict with its evidence in runs/audit/report.html
#   make demo    train on handwritten digits with three methods, write runs/demo/report.html
#   make test    tests that take seconds                                (minutes in all)
#   make check   formatting, types, import contracts, the audit, the demo, every test
#   make spec    regenerate spec/traceability.md, then the clause linter
#   make vectors regenerate spec/vectors, then recompute them in NumPy
#   make calibrate   size and power of the statistical checks, resumable  (up to 90 minutes)
#   make bench   time and memory of the batched path, into benchmarks/results.json (15 minutes; a quiet machine)
#   make venv    only the virtual environment
#   make clean   remove what was generated here, the virtual environment last

# The first Python that is new enough; `make PYTHON=/path/to/python` names another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ROOMS := reference optimized properties conformance
SOURCES := $(ROOMS) tests

# The tensors of tests and demo are small: threads would wait for each other. Two processes share the test files instead.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS
WORKERS ?= 2
SPREAD := -n $(WORKERS) --dist loadfile
export PIP_DISABLE_PIP_VERSION_CHECK := 1
MAKEFLAGS += --no-print-directory

.PHONY: help venv audit demo test check bench calibrate spec vectors lint types imports audit-check demo-check format clean
.NOTPARALLEL:
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "branchgrpo needs Python 3.11 or newer; name one: make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

audit: $(STAMP)
	$(BIN)/branchgrpo audit

demo: $(STAMP)
	$(BIN)/branchgrpo demo

test: $(STAMP)
	$(BIN)/pytest tests $(SPREAD) -m "not slow" -rs
	$(BIN)/pytest properties -m quick -rs

check: lint types imports audit-check demo-check
	$(BIN)/pytest tests $(SPREAD) -rs
	$(BIN)/pytest properties -rs

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

calibrate: $(STAMP)
	JAXTYPING_DISABLE=1 $(BIN)/python benchmarks/calibrate.py --minutes 85

spec: $(STAMP)
	$(BIN)/python -m branchgrpo.conformance.traceability
	$(BIN)/python -m branchgrpo.conformance.lint

vectors: $(STAMP)
	$(BIN)/python -m branchgrpo.conformance.vectors.generate
	$(BIN)/python examples/check_vectors.py

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(STAMP)
	$(BIN)/mypy $(ROOMS)

imports: $(STAMP)
	$(BIN)/lint-imports --no-logo

# From nothing, so that no stored stage answers; a verdict of "reject" ends the check.
audit-check: $(STAMP)
	@rm -rf runs/audit-check
	@started=$$(date +%s); $(BIN)/branchgrpo audit --out runs/audit-check && \
		echo "audit: $$(($$(date +%s) - started)) seconds from nothing, at most 300 are allowed" && \
		test $$(($$(date +%s) - started)) -le 300

demo-check: $(STAMP)
	$(BIN)/branchgrpo demo --check

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf runs dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache $(VENV)
