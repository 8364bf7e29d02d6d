#!/usr/bin/env bash
# Makes build/notebook, whose kernel runs docs/notebook.ipynb in a test, and returns at once when it
# is up to date. What a kernel needs is no business of the library, so it has an environment of its
# own; the library and its packages come from .venv, which stands behind it (60 MB, some seconds).
set -euo pipefail
cd "$(dirname "$0")/.."
source install/common.sh

begin_environment notebook
.venv/bin/uv pip install --quiet --python $place/bin/python --requirement install/notebook.txt
put_venv_behind
environment_made
