# On a fresh machine with Python 3.11 and make: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint types bench audit clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

demo: $(READY)  ## train seven methods privately on embedded data and compare them
	$(BIN)/clipwise compare --data digits --epsilon 3 --epochs 20

test: $(READY)
	$(BIN)/python -m pytest -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

$(VENV)/.bench: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	@touch $(VENV)/.bench

bench: $(VENV)/.bench  ## the CPU table of docs/performance.md, with Opacus beside it
	$(BIN)/clipwise bench

audit: $(READY)  ## attack every method and hold what that shows against the claimed ε
	$(BIN)/clipwise audit

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis runs build src/clipwise.egg-info src/clipwise/*.so
