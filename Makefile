# Everything a newcomer needs: `make demo` and `make test` set themselves up.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.guerdon-setup
OLD_PYTHON := the versions in constraints.txt need Python 3.11 or later: make setup PYTHON=python3.11
# Test processes: two more than cores, as some of them wait; each takes about 1 GB.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n > 6 ? 8 : n + 2)))
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder
# Compiled files are kept: three test processes and the commands they start import the same ones.
unexport PYTHONDONTWRITEBYTECODE
SIM_STAMP := $(VENV)/.guerdon-setup-sim

.DEFAULT_GOAL := help
.PHONY: help setup setup-sim demo browser test test-full test-realtime fuzz lint bench docs docs-site release-check clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup: $(STAMP)  ## make .venv and install Guerdon with its development tools

# torch goes first and alone: with it in place no other package pulls in a second build.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(OLD_PYTHON)")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

setup-sim: $(SIM_STAMP)  ## add the ManiSkill simulator and, without a GPU, a software driver to render with
	scripts/setup_sim.sh $(BIN)/python

$(SIM_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[maniskill]'
	touch $@

demo: $(STAMP)  ## run what there is of the workflow on the embedded environment
	$(BIN)/guerdon demo

browser:  ## the browser that the tests open pages with
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
	  sudo="$$(test "$$(id -u)" = 0 || echo sudo)"; \
	  $$sudo apt-get update -qq && $$sudo apt-get install -y -qq --no-install-recommends chromium; }

test: $(STAMP)  ## the tests of a developer: all code, no long trainings, simulator or browser (4 to 7 minutes)
	$(PYTEST) --cpu-limit 20 -m 'not slow and not sim and not system and not bench and not realtime'

test-full: $(STAMP) browser setup-sim  ## all tests, with the simulator, the browser and trainings (21 to 45 minutes)
	$(PYTEST) -m 'not bench and not realtime'

test-realtime: $(STAMP)  ## the driver over franky-control, on a quiet machine
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[franky]' franky-sim
	$(BIN)/python -m pytest -m realtime

INPUTS ?= 20000
fuzz: $(STAMP)  ## damaged and hostile inputs for every reader; INPUTS=1000000 for more, LOG=file to go on and add up
	$(BIN)/python -m fuzz --inputs $(INPUTS) $(if $(LOG),--log $(LOG))

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## side-by-side measurements
	$(BIN)/python -m benchmarks

docs: $(STAMP) browser  ## regenerate the pictures and printed results in README and docs
	$(BIN)/python -m docs.make_assets

release-check: $(STAMP)  ## version, changelog, build, metadata and contents of the package; TAG=v0.2.0 before it is published
	$(BIN)/python scripts/release.py check $(if $(TAG),--tag $(TAG))

docs-site: $(STAMP)  ## build the documentation site into site/
	$(BIN)/python -m mkdocs build --strict

clean:  ## remove what the other targets made
	rm -rf $(VENV) runs site .pytest_cache .mypy_cache .ruff_cache dist *.egg-info
