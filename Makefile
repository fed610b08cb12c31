# Needs python3 and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
TOX := $(VENV)/bin/tox run
DIR ?=
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs bench clean

help:  ## Show these targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## Run the failover story on real processes (DIR=path keeps its files)
	@echo "Running the failover story: two beats, two workers, SQLite"
	@$(VENV)/bin/python -m example_project.failover $(if $(DIR),--dir "$(DIR)")

test: $(VENV)/.tox  ## Run the tests with this Python (ARGS="-k name" goes to pytest)
	@echo "Running the tests with $$($(PYTHON) --version)"
	@$(TOX) -e py -- $(ARGS)

lint: $(VENV)/.tox  ## Check style, types and the direction of imports
	@echo "Checking style, types and the direction of imports"
	@$(TOX) -e lint

docs: $(VENV)/.tox  ## Build the documentation, warnings as errors
	@echo "Building the documentation"
	@$(TOX) -e docs

bench: $(VENV)/.tox  ## Run the benchmarks (ARGS goes to them)
	@echo "Running the benchmarks"
	@$(TOX) -e bench -- $(ARGS)

clean:  ## Remove the environments and what tools left behind
	@echo "Removing .venv, .tox, caches and build results"
	@rm -rf $(VENV) .tox .coverage .coverage.* .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A tox that was run by itself leaves a file of this name, which says where its environment is.
$(VENV)/bin/python:
	@[ ! -f $(VENV) ] || rm $(VENV)
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: setup.cfg | $(VENV)/bin/python
	@echo "Installing celery-lease and its two dependencies into $(VENV)"
	@$(VENV)/bin/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.tox: setup.cfg tox.ini | $(VENV)/bin/python
	@echo "Installing tox into $(VENV)"
	@$(VENV)/bin/python -m pip install --quiet "tox>=4.20"
	@touch $@
