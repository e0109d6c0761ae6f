# make train   train on real data, on all GPUs or two CPU ranks
# make test    lint, types, tests, and all notebooks executed and compared
# make soak    what takes long: storms of kills and interrupts, sweeps, planted faults
# make lab     open the notebooks in JupyterLab
# Each makes .venv and installs into it first, once.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test soak lab clean

train: .venv/installed
	$(BIN)/python -m ddp_lab.train $(ARGS)

test: .venv/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check.sh

soak: .venv/installed
	$(BIN)/python benchmarks/kill_storm.py 200
	$(BIN)/python benchmarks/interrupt_storm.py 100
	$(BIN)/python benchmarks/one_curve.py
	$(BIN)/python benchmarks/planted_faults.py

lab: .venv/installed
	$(BIN)/jupyter lab notebooks/00_start_here.ipynb

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache artifacts
