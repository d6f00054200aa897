# `make` lists the targets. Everything that is made lies in .venv/, build/ and the engine cache (~/.cache/moe-l2).

PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest
JOBS   := $(shell nproc)

# Where the tests, the demo and the benchmarks find the engine and our native part.
export MOE_L2_ENGINE_DIR := $(CURDIR)/build/engine-home/build/bin
export MOE_L2_NATIVE_DIR := $(CURDIR)/build/native

.DEFAULT_GOAL := help
.PHONY: help setup setup-test engine native demo test test-fast lint native-test unit-test e2e-test bench test-fresh clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1~\2/p' $(MAKEFILE_LIST) | column -t -s '~' 2>/dev/null \
	    || sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1: \2/p' $(MAKEFILE_LIST)

setup: ## install missing system packages, make .venv
	@tools/setup.sh

setup-test:
	@tools/setup.sh test

engine: setup ## build the pinned llama.cpp, once, outside the clone (10 minutes on 2 cores)
	@tools/native.sh engine

native: setup ## build the plug-in and libmoe_l2_arena.so
	@tools/native.sh

demo: native ## serve the demo model, ask it three questions, show the statistics
	@$(PYTHON) tools/demo.py

# One after the other, cheapest first; the last line is pytest's.
test: setup-test ## everything: lint, types, native, unit and end-to-end tests
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory native-test
	@$(MAKE) --no-print-directory unit-test
	@$(MAKE) --no-print-directory e2e-test

test-fast: setup-test lint unit-test ## lint, types and unit tests only

lint: setup ## ruff and mypy
	@echo "== lint"
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m mypy --strict moe_l2d moe_l2ctl

native-test: native
	@echo "== native tests"
	@ctest --test-dir build/native --output-on-failure --no-tests=error -j $(JOBS)

unit-test: native
	@echo "== unit tests"
	@$(PYTEST) tests/unit -n $(JOBS)

e2e-test: native
	@echo "== end-to-end tests"
	@$(PYTEST) tests/e2e

bench: native ## measure, print one table, write docs/results/serve.json
	@$(PYTHON) -m tools.bench.run

test-fresh: setup ## prove `make demo` and `make test` in clean Debian 12 and 13 roots (needs root, 45 minutes)
	@$(PYTHON) tools/fresh/fresh.py $(FRESH)

clean: ## remove what was built here; the engine cache stays
	rm -rf build .pytest_cache .mypy_cache .ruff_cache
