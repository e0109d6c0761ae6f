#!/usr/bin/env bash
# Everything that must hold before a commit: lint, types, tests, notebooks.
# Uses the python on PATH; `make test` puts the virtual environment's there.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$1"; }

say "lint"
python -m ruff check .
python -m ruff format --check .

say "types"
python -m mypy

say "tests"
# two files at a time, on two cores a third gained nothing; the longest first
python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder \
    tests/multihost tests/runs tests/test_train.py tests/test_equivalence.py tests

say "notebooks: built from their sources?"
python scripts/build_notebooks.py --check

say "notebooks: executed and compared"
# two at a time, each whole on one kernel: much of a notebook waits for its ranks
python -m pytest --numprocesses 2 --dist loadscope \
    --nbval --nbval-current-env --nbval-cell-timeout=240 \
    --nbval-sanitize-with=notebooks/sanitize.cfg notebooks
