#!/usr/bin/env bash
# Makes build/agents_sdk, in which a test runs agents of the OpenAI Agents SDK, and returns at once
# when it is up to date. Such an agent imports nothing of the library, so it has an environment of
# its own (60 MB, some seconds).
set -euo pipefail
cd "$(dirname "$0")/.."
source install/common.sh

begin_environment agents_sdk
.venv/bin/uv pip install --quiet --python $place/bin/python --requirement install/agents_sdk.txt
environment_made
