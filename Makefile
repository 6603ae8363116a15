# The usual ways in:  make .venv   make demo   make test   make lint types floors   make bench   make clean
#
# PYTHON       the interpreter for a new .venv:            PYTHON=python3.12 make .venv
# TORCH_INDEX  a package index to take torch from, where pip's default one serves a build with CUDA and
#              the smaller CPU build is wanted:            make .venv TORCH_INDEX=...
# ARGS         more arguments for demo, test and bench:    make demo ARGS="--seconds 30"
PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
CHECKED := $(wildcard comera_compile benchmarks examples)

.PHONY: .venv demo test lint types floors bench clean need

.venv: $(STAMP)

$(STAMP): requirements-dev.txt pyproject.toml
	@$(MAKE) --no-print-directory need
	@echo "Installing into .venv: takes some minutes"
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX),$(BIN)/pip install --quiet --index-url $(TORCH_INDEX) $$(grep '^torch==' requirements-dev.txt))
	$(BIN)/pip install --quiet --requirement requirements-dev.txt
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

# One line for each thing without which the installation or torch.compile would fail later, and less clearly.
need:
	@$(PYTHON) -V >/dev/null 2>&1 || { echo "$(PYTHON) not found: install Python 3.11-3.13 or say PYTHON=python3.12 make .venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { echo "Python 3.11-3.13 is needed, $(PYTHON) is $$($(PYTHON) -V): say PYTHON=python3.12 make .venv"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) has no venv module: install it (Debian, Ubuntu: python3-venv)"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { echo "Python.h of $(PYTHON) not found, torch.compile needs it: install the headers (Debian, Ubuntu: python3-dev)"; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || { echo "C++ compiler $${CXX:-g++} not found, torch.compile needs one: install it (Debian, Ubuntu: g++) or set CXX"; exit 1; }

demo: $(STAMP)
	$(BIN)/python examples/train_code_lm.py --out out/train_code_lm $(ARGS)

# Everything but the tests marked slow or gpu (`make test ARGS="-m slow"` runs the slow ones), two at a time.
test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy $(CHECKED)

floors: $(STAMP)
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m benchmarks.transformer_step $(ARGS)

# Leaves .venv alone: rm -r .venv to begin anew.
clean:
	rm -rf build dist out *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
