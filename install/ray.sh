#!/usr/bin/env bash
# Makes build/ray, in which the test of `ray job submit` runs: Ray with its dashboard, which .venv has
# no use for. Returns at once when it is up to date. What it lacks comes from .venv, which stands
# behind it.
set -euo pipefail
cd "$(dirname "$0")/.."
source install/common.sh

begin_environment ray
.venv/bin/uv pip install --quiet --python $place/bin/python --constraint install/$backend-constraints.txt \
    --requirement install/ray.txt
put_venv_behind
environment_made
