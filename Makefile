# Every target sets up its own environment if needed, and reuses it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: setup vllm demo demo-vllm materials test test-vllm check fix bench drills docs clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)  ## train a real small model on a CPU and show that it learned
	rm -rf runs/demo
	$(BIN)/leadline train recipes/demo.toml

materials: $(READY)  ## warm start, then GRPO against a reward that computes band gaps, on a CPU
	rm -rf runs/materials-sft runs/materials
	$(BIN)/leadline sft recipes/materials-sft.toml
	$(BIN)/leadline train recipes/materials.toml

test: $(READY)  ## run all tests; those that need a real vLLM are skipped, and say so, where it cannot be installed
	$(MAKE) --no-print-directory vllm || test -z "$$LEADLINE_REQUIRE_VLLM"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 -m "not vllm"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m vllm -rs

check: $(READY)  ## formatting, lint, types, layout
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_layout.py

$(VENV)/.vllm: $(READY) requirements-vllm.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm.txt
	touch $@

vllm: $(VENV)/.vllm  ## add a real vLLM for CPUs to the environment

demo-vllm: $(VENV)/.vllm  ## the demo, sampled by a vLLM server that the run starts, one step ahead of the training
	rm -rf runs/demo-vllm
	OMP_NUM_THREADS=1 $(BIN)/leadline train recipes/demo-vllm.toml

test-vllm: $(VENV)/.vllm  ## the tests that need a real vLLM
	OMP_NUM_THREADS=1 LEADLINE_REQUIRE_VLLM=1 $(BIN)/python -m pytest -m vllm

fix: $(READY)  ## format and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## compare with TRL on the same work, and write docs/benchmarks.md (half an hour; FULL=--full for the grid)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.trl_compare $(FULL)

drills: $(READY)  ## break the trainer in every way that can be induced, and see what the doctor says
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.drills.matrix

docs: $(READY)  ## generate docs/config.md and docs/rules/
	$(BIN)/python -m leadline.settings_help > docs/config.md
	$(BIN)/python -m leadline.doctor.document

clean:
	rm -rf $(VENV)
