# Every target does its own set-up: Debian packages, .venv, an editable install, the C part.
# On a fresh Debian 12 machine with root, `make demo` and `make test` are all there is to type.

SHELL   := /bin/bash
PYTHON  ?= python3
BIN     := .venv/bin
READY   := .venv/.ready
FULL    := .venv/.full
CPART   := src/deltabox/deltacr/_interpreter
CACHE   := .cache/demo/.ready
EXAMPLE := .cache/examples/.ready
# Much of what the tests do is waiting. Each worker has a state directory, and so a keeper, of its own.
WORKERS ?= -n 2 --dist worksteal

.DELETE_ON_ERROR:
.PHONY: demo test test-full bench lint doctor setup clean
.DEFAULT_GOAL := test

setup: $(READY) $(CPART)

demo: setup $(CACHE)
	@$(BIN)/python -m deltabox demo

test: setup $(CACHE) $(EXAMPLE)
	$(BIN)/python -m pytest -m "not full" $(WORKERS) $(ARGS)

test-full: setup $(CACHE) $(EXAMPLE) $(FULL)
	$(BIN)/python -m pytest --timeout=1800 $(WORKERS) $(ARGS)

bench: setup
	$(BIN)/python bench/suite.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

doctor: setup
	@$(BIN)/deltabox doctor

$(READY): pyproject.toml setup.py tools/system-packages
	@PYTHON="$(PYTHON)" tools/system-packages
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

$(FULL): $(READY) tools/full-packages
	@tools/full-packages
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[full]'
	@touch $@

$(CPART): $(READY) setup.py $(wildcard src/deltabox/*/*.c src/deltabox/*/*.h)
	$(BIN)/python setup.py --quiet build_interpreter --inplace
	@touch $@

$(CACHE): $(READY) src/deltabox/demo/library.py
	@$(BIN)/python -m deltabox demo --fetch .cache/demo
	@touch $@

$(EXAMPLE): $(READY) examples/issue/library.py
	@$(BIN)/python examples/solve_issue.py --fetch
	@touch $@

clean:
	rm -rf build dist .cache bench/out src/*.egg-info $(CPART) src/deltabox/deltacr/_nat src/deltabox/linux/_bulk
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
