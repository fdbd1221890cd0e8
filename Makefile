# Everything happens in .venv. `make demo` and `make test` set it up themselves; a second run installs nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TORCH  := 2.13.0

.PHONY: demo test test-gaudi check bench soak setup clean help
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP)  ## create .venv with the locked CPU build of vLLM and this package

$(STAMP): requirements/cpu.txt requirements/dev.txt pyproject.toml
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(TORCH)" sh requirements/setup.sh
	@touch $@

demo: setup  ## the main job: four arms served by real vLLM, the same agent sessions replayed against each
	@$(BIN)/inpage demo $(DEMO)

test: setup  ## all tests, the ones that start real engines too
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST)

test-gaudi:  ## the Gaudi engine on the real plugin, emulated device: VLLM_GAUDI=<checkout of v0.26.0>
	@PYTHON="$(PYTHON)" VENV=.venv-gaudi TORCH="$(TORCH)" VLLM_GAUDI="$(VLLM_GAUDI)" sh tests/emulated_hpu/setup.sh
	@VLLM_GAUDI="$(abspath $(VLLM_GAUDI))" OMP_NUM_THREADS=1 \
		.venv-gaudi/bin/python -m pytest tests/gaudi/test_gaudi_plugin.py $(PYTEST)

check: setup  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: setup  ## benchmarks, as ratios taken in one run
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks

soak: setup  ## 20,000 requests with aborts, preemptions and resets: memory flat, all slots home, 0 wrong
	@$(BIN)/inpage soak $(SOAK)

clean:  ## remove both environments and what the demo and the soak wrote
	rm -rf $(VENV) .venv-gaudi demo soak
