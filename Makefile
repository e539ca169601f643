# `make demo` trains the example agent, `make test` runs the tests; each makes its own environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-clients check bench clean

help:
	@echo "make demo    train the multiply agent on this machine (minutes, no GPU)"
	@echo "make test    run the tests"
	@echo "make test-clients   install real clients and coding agents (pip, npm) and run them against the gateway"
	@echo "make check   format, lint, types, layers, fast tests"
	@echo "make bench   print performance ratios"

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e ".[local,dev]"
	@touch $(STAMP)

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/penstock train examples/multiply/train.toml

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-clients: $(STAMP)
	$(BIN)/python tests/clients/environments.py
	PENSTOCK_TEST_CLIENTS=1 $(BIN)/python -m pytest tests/clients

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	@echo "types and fast tests, side by side"; \
	$(BIN)/pyright & types=$$!; \
	$(BIN)/python -m pytest -n 2 -m "not slow" tests/unit tests/contracts; tests=$$?; \
	wait $$types && exit $$tests

bench: $(STAMP)
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) build dist src/*.egg-info
