# Everything sets itself up: `make demo` and `make test` work in a fresh clone.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
BUILD_INPUTS := pyproject.toml constraints.txt engine/formats/block_types.h engine/formats/grids.h engine/formats/expert_job.h $(wildcard cpu/*.cpp cpu/*.h cpu/CMakeLists.txt)

.PHONY: help setup demo test slow lint type bench bench-gpu docs results check clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP) ## a virtual environment with Spark and its development tools

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Spark needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# pip brings CMake and ninja for the build where the system has none; a C++ compiler it cannot bring.
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt

$(STAMP): $(BUILD_INPUTS) | $(VENV)/bin/python
	@echo "installing Spark and its development tools into $(VENV)"
	@$(PIP) -e '.[dev]'
	@touch $(STAMP)

# The demo trains small predictors, which takes torch; DEMO_EXTRAS= leaves that step (and torch) out.
DEMO_EXTRAS ?= [train]

$(VENV)/.demo: $(BUILD_INPUTS) | $(VENV)/bin/python
	@if test -e $(STAMP); then $(MAKE) --no-print-directory setup; else \
	  echo "installing Spark into $(VENV)" && $(PIP) -e '.$(DEMO_EXTRAS)'; fi
	@touch $@

demo: $(VENV)/.demo ## the whole pipeline on the bundled model and sessions, CPU only, < 2 minutes
	@$(VENV)/bin/spark demo

# More workers than cores, as some often wait for servers and clusters; memory holds four (3 GB each).
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(4, 2 + len(os.sched_getaffinity(0))))')
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist loadfile

test: setup ## the test suite, < 12 minutes on two cores
	$(PYTEST) -m "not slow" $(PYTEST_FLAGS)

slow: setup ## the tests that take minutes, which CI runs too
	$(PYTEST) -m slow $(PYTEST_FLAGS)

lint: setup ## ruff: style, imports, docstrings
	$(VENV)/bin/ruff check .

type: setup ## mypy, strict on spark and engine
	$(VENV)/bin/mypy

bench: setup ## the CPU benchmarks of RESULTS.md (about ten minutes)
	$(PY) benchmarks/cpu_kernels.py --json data/results/cpu_kernels.json
	$(PY) benchmarks/pipeline.py --json data/results/pipeline.json
	$(PY) benchmarks/render.py

bench-gpu: setup ## the GPU benchmarks of RESULTS.md (about two hours; models of 17 GiB in build/gpu, one at a time)
	$(PY) benchmarks/on_gpu.py
	$(PY) benchmarks/render.py

docs: setup ## docs/commands.md, from what the program says of its commands
	$(PY) docs/make_commands.py

results: setup ## render RESULTS.md from data/results/*.json
	$(PY) benchmarks/render.py

check: lint type test ## what CI runs

clean: ## remove the environment and caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
