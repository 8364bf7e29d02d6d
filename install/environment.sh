#!/usr/bin/env bash
# Makes build/NAME with the packages of install/NAME.txt, for what is not to meet .venv's packages, and
# returns at once when it is up to date:  install/environment.sh NAME [--behind]
#   openenv     serves environments to tests of OpenEnvAgent and recipes/openenv_guess (450 MB); OpenEnv
#               asks for another MCP than vLLM
#   verifiers   hosts environments for tests of VerifiersAgent and recipes/hangman (450 MB)
#   agents_sdk  runs agents of the OpenAI Agents SDK in a test (60 MB)
#   notebook    has the kernel that runs docs/notebook.ipynb in a test (60 MB)
#   mlflow      runs the tests of MLFlowLogger; MLflow asks for older packages than vLLM (70 MB)
#   packaging   builds and checks what is released
# With --behind, what it lacks comes from .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
source install/common.sh

begin_environment "$1"
# Compiled now: importing verifiers takes 18 s of CPU without bytecode, and 7 with it.
.venv/bin/uv pip install --quiet --compile-bytecode --python $place/bin/python \
    --requirement "install/$1.txt"
[ "${2:-}" != --behind ] || put_venv_behind
environment_made
