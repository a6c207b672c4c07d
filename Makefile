# The verbs of this repository. `make help` lists them.
SHELL  := bash
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
READY  := $(VENV)/ready
# Logs name files by their path in this repository or in their package.
SHORT  := sed -u 's|$(CURDIR)/||g; s|/[^ ]*/site-packages/||g'

.PHONY: help setup mve bench test test-gpu sanitize lint lock clean
.DEFAULT_GOAL := help

help:  ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## create .venv with the pinned packages (done once; the other verbs call it)

$(READY): requirements.lock pyproject.toml scripts/setup_venv.py
	$(PYTHON) scripts/setup_venv.py $(VENV)

mve: $(READY)  ## run the minimum viable experiment of the proposal; verdict table, data and picture in results/mve
	$(RUN) experiments/mve/run.py

bench: $(READY)  ## time, memory, error of every linear cross-entropy; tables and picture in results/loss_heads (ARGS="--shapes A")
	$(RUN) experiments/loss_heads/run.py $(ARGS)

test: $(READY)  ## run the test suite (no GPU needed)
	$(RUN) -m ruff check .
	$(RUN) -m pytest -m "not gpu and not interpret"
	TRITON_INTERPRET=1 $(RUN) -m pytest -m interpret

test-gpu: $(READY)  ## run the tests that need a CUDA GPU; the log goes to results/test-gpu.log
	cd scripts && ../$(RUN) -m training.provenance > ../results/test-gpu.log
	$(RUN) -m pytest tests/test_loss_heads.py tests/gpu -m "not interpret" 2>&1 | $(SHORT) | tee -a results/test-gpu.log; exit $${PIPESTATUS[0]}

sanitize: $(READY)  ## run every kernel under compute-sanitizer (needs a CUDA GPU); the log goes to results/sanitize.log
	cd scripts && ../$(RUN) -m training.provenance > ../results/sanitize.log
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(RUN) tests/gpu/sanitize.py 2>&1 | $(SHORT) | tee -a results/sanitize.log; exit $${PIPESTATUS[0]}

lint: $(READY)  ## check the style (ruff)
	$(RUN) -m ruff check .

lock: $(READY)  ## resolve the newest allowed packages anew and write requirements.lock
	$(RUN) scripts/lock_packages.py requirements.lock

clean:  ## remove .venv, caches and runs (results/ stays)
	rm -rf $(VENV) .cache runs .pytest_cache .ruff_cache .hypothesis
