#!/usr/bin/env bash
# Makes build/verifiers, in which the tests of VerifiersAgent and recipes/hangman host environments,
# and returns at once when it is up to date. verifiers asks for other packages than vLLM, so it has
# an environment of its own (450 MB).
set -euo pipefail
cd "$(dirname "$0")/.."
source install/common.sh

begin_environment verifiers
# Compiled now: importing verifiers takes 18 s of CPU without bytecode, and 7 with it.
.venv/bin/uv pip install --quiet --compile-bytecode --python $place/bin/python \
    --requirement install/verifiers.txt
environment_made
