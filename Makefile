# Every target sets up its own environment if needed, and reuses it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: setup demo test check fix bench docs clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)  ## train a real small model on a CPU and show that it learned
	rm -rf runs/demo
	$(BIN)/leadline train recipes/demo.toml

test: $(READY)  ## run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

check: $(READY)  ## formatting, lint, types, layout
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_layout.py

fix: $(READY)  ## format and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## time the parts of a step, packed against one by one
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/update.py

docs: $(READY)  ## generate docs/config.md and docs/rules/
	$(BIN)/python -m leadline.settings_help > docs/config.md
	$(BIN)/python -m leadline.doctor.document

clean:
	rm -rf $(VENV)
