#!/usr/bin/env bash
# Makes build/oldest or build/newest, in which `make test-range` runs unit tests with the oldest or the
# newest packages that setup.cfg admits, and returns at once when it is up to date:
#     install/range.sh oldest
# What they lack comes from .venv, which stands behind them: test tools, vLLM, and torch, of which
# other builds for CPUs are on no package index (500 MB each).
set -euo pipefail
cd "$(dirname "$0")/.."
source install/common.sh
declare -A resolutions=([oldest]=lowest-direct [newest]=highest)
resolution=${resolutions[${1:?oldest or newest}]}

begin_environment "$1"
.venv/bin/uv pip install --quiet --python $place/bin/python --resolution "$resolution" \
    --override install/$backend-overrides.txt --override <(echo 'torch ; python_version < "3"') \
    --editable ".[envs,math,qlora,ray,recipes,tools]"
put_venv_behind
environment_made
