#!/usr/bin/env bash
# Resolves setup.cfg anew and rewrites the constraints files (make lock). They hold for every
# supported Python; the CUDA set is resolved here, but runs only where there is a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
source install/common.sh

lock() { # backend, options...
    local backend=$1
    shift
    .venv/bin/uv pip compile setup.cfg --quiet --universal --python-version 3.11 --no-annotate \
        --no-header --extra "$backend" --extra dev --extra docs --extra recipes --upgrade \
        --override "install/$backend-overrides.txt" --output-file "install/$backend-constraints.txt" "$@"
}
# Environments of their own (agents_sdk.sh, mlflow.sh, notebook.sh, openenv.sh, packaging.sh,
# verifiers.sh), so the other constraints do not hold for them.
.venv/bin/uv pip compile - --quiet --universal --python-version 3.11 --no-annotate --no-header \
    --upgrade --output-file install/agents_sdk.txt <<<'openai-agents>=0.24'
.venv/bin/uv pip compile - --quiet --universal --python-version 3.11 --no-annotate --no-header \
    --upgrade --output-file install/mlflow.txt <<<'mlflow-skinny>=3'
.venv/bin/uv pip compile - --quiet --universal --python-version 3.11 --no-annotate --no-header \
    --upgrade --output-file install/notebook.txt <<<$'nbclient>=0.10\nipykernel>=6.29'
.venv/bin/uv pip compile - --quiet --universal --python-version 3.11 --no-annotate --no-header \
    --upgrade --output-file install/verifiers.txt <<<'verifiers[ta]==0.4.*'
# With fastmcp 4 OpenEnv 0.3 loses the arguments of tools, which MCP 2 names differently.
.venv/bin/uv pip compile - --quiet --universal --python-version 3.11 --no-annotate --no-header \
    --upgrade --output-file install/openenv.txt <<<$'openenv-core==0.3.*\nfastmcp>=3,<4'
.venv/bin/uv pip compile - --quiet --universal --python-version 3.11 --no-annotate --no-header \
    --upgrade --output-file install/packaging.txt <<<$'build>=1.3\ntwine>=6\nsetuptools>=77'
# Packed attention is checked against this transformers; the CPU engine limits it by itself.
lock cpu ${torch_source[@]+"${torch_source[@]}"}
# A folder of wheels may hold the CPU build of torch, which would take the place of the CUDA build.
UV_FIND_LINKS= lock cuda --constraint <(echo 'transformers==5.19.*')
