#!/usr/bin/env bash
# Makes build/packaging, which builds and checks what is released, and returns at once when it is up
# to date.
set -euo pipefail
cd "$(dirname "$0")/.."
source install/common.sh

begin_environment packaging
.venv/bin/uv pip install --quiet --python $place/bin/python --requirement install/packaging.txt
environment_made
