#!/usr/bin/env bash
# Makes build/openenv, in which the tests of OpenEnvAgent and recipes/openenv_guess serve environments,
# and returns at once when it is up to date. OpenEnv asks for another MCP than vLLM, so it has an
# environment of its own (450 MB).
set -euo pipefail
cd "$(dirname "$0")/.."
source install/common.sh

begin_environment openenv
.venv/bin/uv pip install --quiet --compile-bytecode --python $place/bin/python \
    --requirement install/openenv.txt
environment_made
