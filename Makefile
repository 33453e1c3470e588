# Two commands: `make demo` runs the whole pipeline on a small real model, `make test` runs the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint schemas fuzz clean

demo: $(INSTALLED)
	rm -rf build/demo
	$(BIN)/quantkit demo --output build/demo

# Two workers of one thread each: on two cores, more threads would spend their time waiting for each other.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

schemas: $(INSTALLED)
	$(BIN)/python -m quantkit.schemas

# Every reader of files that others wrote, fuzzed for FUZZ_SECONDS (60) each; where atheris has no build, it says so.
fuzz: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris -c constraints.txt || true
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz

# torch first and by its exact version: a range would let the resolver pick a build with gigabytes of GPU libraries.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" -c constraints.txt
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
