# The commands of this repository. `make run` and `make test` work on a fresh machine with
# Python 3.11 or newer; everything they need is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PORT ?= 8000
STORE ?= sqlite:///var/demo.db
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup run test test-all lint format bench soak docs pictures pins clean

help: ## Show what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

setup: $(STAMP) ## Make the environment in .venv

$(STAMP): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "retrysafe needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Setting up $(VENV); this takes about a minute, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $(STAMP)

run: setup ## Serve the demo on SQLite (PORT=8000, STORE=sqlite:///var/demo.db)
	@$(BIN)/retrysafe demo --port $(PORT) --store $(STORE)

# Pieces of the suite, those that take longest first. Most of them wait for leases to end and for
# processes to start and to die, so that two cores have work for three at a time. Each is also a
# target of its own: `make tested-stores`, with ALL=1 for what takes long as well.
FOLDERS := attacks stores processes consumers tasks demo http_cases postgres dashboard cli atomic \
	observe runtime docs relay contrib client http guards
PIECES := $(FOLDERS:%=tested-%) tested-rest tested-core
JOBS ?= 3
PYTEST := $(BIN)/python -m pytest $(if $(ALL),-m "long or not long")
.PHONY: $(PIECES)

test: setup ## Run the whole test suite, JOBS=3 pieces at a time
	@echo "Testing in $(words $(PIECES)) pieces, $(JOBS) at a time; each shows its output when it is done."
	@$(MAKE) --no-print-directory --jobs=$(JOBS) --output-sync=target lint $(PIECES)

test-all: ## Run the whole test suite and what takes long: leases of default length, every server
	@$(MAKE) --no-print-directory test ALL=1

$(FOLDERS:%=tested-%): tested-%: setup
	$(PYTEST) tests/$*

tested-core: setup
	$(BIN)/python -m coverage run -m pytest $(if $(ALL),-m "long or not long") tests/core
	$(BIN)/python -m coverage report

# Whatever the other pieces do not name.
tested-rest: setup
	$(PYTEST) tests $(patsubst %,--ignore=tests/%,core $(FOLDERS))

lint: setup ## Check style, types, import direction and generated documents
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/generate_docs.py --check

format: setup ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## Measure against bare programs in the same run; QUICK=1 only shows that everything runs
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements/bench.txt
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick)

soak: setup ## Run simulation, overlapping batches, dying consumers and workers for much longer than the tests do
	$(BIN)/python -m tests.processes.overlapping --seconds 60
	$(BIN)/python -m tests.simulation --seeds 1000000 --minutes 20
	$(BIN)/python -m tests.consumers.soak --messages 10000 --minutes 6
	$(BIN)/python -m tests.tasks.soak --tasks 500 --minutes 5
	$(BIN)/python -m tests.processes.resumed_soak --requests 500 --minutes 5

docs: setup ## Generate the generated parts of the documents
	$(BIN)/python scripts/generate_docs.py

pictures: setup ## Make the pictures of the README from the running demo
	$(BIN)/python scripts/make_pictures.py

pins: setup ## Pin the development requirements again
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate requirements/dev.in -o requirements/dev.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate requirements/bench.in -o requirements/bench.txt

clean: ## Remove the environment and what the tests left
	rm -rf $(VENV) .coverage .hypothesis .mypy_cache .ruff_cache var dist build
