# Everything a newcomer needs: `make demo` and `make test` set themselves up.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.guerdon-setup

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup: $(STAMP)  ## make .venv and install Guerdon with its development tools

# torch goes first and alone: with it in place no other package pulls in a second build.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)  ## run what there is of the workflow on the embedded environment
	$(BIN)/guerdon demo

test: $(STAMP)  ## run the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not bench'

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## side-by-side measurements
	$(BIN)/python -m benchmarks

docs: $(STAMP)  ## regenerate the pictures and printed results in README and docs
	$(BIN)/python docs/make_assets.py

clean:  ## remove what the other targets made
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache *.egg-info
