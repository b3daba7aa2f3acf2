# What a user and the CI call. No root needed. Everything is installed into .venv, under constraints.txt.
#   TORCH_INDEX=<url>   take torch from that package index: a CPU or CUDA build (default: pip's own index)
#   PYTHON=python3.12   the interpreter that makes .venv (3.11 or newer)

PYTHON      ?= python3
TORCH_INDEX ?=
ARGS        ?=
NAME        ?=
SEED        ?=
# Three processes more than there are cores: many tests wait. The longest tests start first (tests/schedule.py).
PYTEST_ARGS ?= -n $(shell echo $$((3 + $$(env -u OMP_NUM_THREADS nproc)))) --dist loadscope --no-loadscope-reorder --durations=50

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS   += --no-print-directory
.DEFAULT_GOAL := help

# Paths that recipes write to or remove: `override`, so that no variable on the command line points them elsewhere.
override VENV   := .venv
override BIN    := .venv/bin
override STAMP  := .venv/.installed
override CHOICE := .venv/.torch-index
PIP     := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore $(BIN)/python -m pip install --quiet --use-pep517
TORCH   := $(shell grep '^torch==' constraints.txt)
BENCHES := $(filter-out _%,$(notdir $(basename $(wildcard benchmarks/*.py))))

# Another index than the one that torch was taken from: install again.
ifneq ($(TORCH_INDEX),)
ifneq ($(TORCH_INDEX),$(shell cat $(CHOICE) 2>/dev/null))
$(STAMP): FORCE
endif
endif

# What Python compiles of elasticd and of the tests is kept, whatever the environment says: hundreds of processes
# of the tests import it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help venv demo test test-all durations lint bench soak clean FORCE

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "  TORCH_INDEX=<url> chooses the build of torch (CPU or CUDA); PYTHON=<python3.11 or newer> the interpreter"

venv: $(STAMP) ## make .venv and install elasticd into it

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "elasticd needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo 'not there')." \
	       "Install one, or name it: make PYTHON=python3.12" >&2; exit 1; }
	@rm -f .venv/.installed
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  echo "making $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); \
	    echo "'$(PYTHON) -m venv' failed: its venv module or pip is missing." \
	         "On Debian: apt-get install python3-venv; or name a complete Python: make PYTHON=..." >&2; exit 1; }; }
ifneq ($(TORCH_INDEX),)
	@echo "installing $(TORCH) from $(TORCH_INDEX) (a large download the first time)"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip uninstall --quiet --yes torch 2>/dev/null
# Only torch itself is pinned here: such an index carries its own versions of what torch needs, and the
# next step brings those to the tested ones.
	@$(PIP) --index-url $(TORCH_INDEX) $(TORCH)
	@echo $(TORCH_INDEX) > $(CHOICE)
else
	@echo "installing $(TORCH) (a large download the first time)"
	@$(PIP) --constraint constraints.txt torch
endif
	@echo "installing elasticd and what it needs"
	@$(PIP) --constraint constraints.txt --editable '.[dev]'
	@touch .venv/.installed

demo: $(STAMP) ## a real job replans around a slowed worker, under 3 minutes (ARGS=...)
	@$(BIN)/elasticd demo $(ARGS)

# Compiled once here, not by each of the processes that begin with it at the same moment.
COMPILE = $(BIN)/python -m compileall -q -j 0 elasticd agent migration planner tests

test: $(STAMP) ## every behaviour, in about 20 minutes on two cores (PYTEST_ARGS='-n 2 tests/planner' for a part)
	@$(COMPILE)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

# Sizes that take minutes have half an hour, as the machine may be busy; a test of 'make test' that hangs is known sooner.
FULL = --full --timeout 1800

test-all: $(STAMP) ## all sizes, seeds and matrices too; prints its seed (SEED=N for the same again)
	@$(COMPILE)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(FULL) $(if $(SEED),--seed $(SEED)) $(PYTEST_ARGS)

durations: $(STAMP) ## measure anew how long tests take (tests/durations.json), by which they are ordered
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(FULL) --write-durations $(PYTEST_ARGS)

# The pages' types and form, where node is there and its packages are or can be fetched; nobody needs node otherwise.
TOOLS := elasticd/dashboard/tools
PAGES = if ! command -v npm >/dev/null; then echo "the pages were not checked: npm is not there"; \
	elif [ -d $(TOOLS)/node_modules ] || npm --prefix $(TOOLS) ci --silent >/dev/null 2>&1; then \
	  npm --prefix $(TOOLS) run --silent check; \
	else echo "the pages were not checked: npm could not fetch what checks them"; fi

lint: $(STAMP) ## ruff, mypy strict over all packages, who may import whom, what is pure
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/python -m tests.house
	@$(BIN)/mypy
	@$(PAGES)

bench: $(STAMP) ## benchmarks/NAME.py, or all of them without NAME
	@names='$(or $(NAME),$(BENCHES))'; failed=; \
	for name in $$names; do \
	  [ -f "benchmarks/$$name.py" ] || { \
	    echo "there is no benchmark '$$name'; there are: $(or $(BENCHES),none yet)" >&2; exit 2; }; \
	  echo "== $$name"; \
	  $(BIN)/python "benchmarks/$$name.py" $(ARGS) || failed="$$failed $$name"; \
	done; \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

soak: $(STAMP) ## 200 random faults on a real job, and what must hold is checked (ARGS='--seed 7 --faults 50')
	@$(BIN)/python -m tests.soak.soak $(ARGS)

clean: ## remove .venv, caches and reports: all that make made
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist demo-report
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
