#!/usr/bin/env bash
# Makes build/mlflow, in which the tests of MLFlowLogger run, and returns at once when it is up to
# date. MLflow asks for older packages than vLLM, so it has an environment of its own; what that one
# lacks comes from .venv, which stands behind it (70 MB, three seconds).
set -euo pipefail
cd "$(dirname "$0")/.."
source install/common.sh

begin_environment mlflow
.venv/bin/uv pip install --quiet --python $place/bin/python --requirement install/mlflow.txt
put_venv_behind
environment_made
