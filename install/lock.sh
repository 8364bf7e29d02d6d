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
# Environments of their own (environment.sh), so the other constraints do not hold for them.
lock_alone() { # name, requirements
    .venv/bin/uv pip compile - --quiet --universal --python-version 3.11 --no-annotate --no-header \
        --upgrade --output-file "install/$1.txt" <<<"$2"
}
lock_alone agents_sdk 'openai-agents>=0.24'
lock_alone mlflow 'mlflow-skinny>=3'
lock_alone notebook $'nbclient>=0.10\nipykernel>=6.29'
lock_alone verifiers 'verifiers[ta]==0.4.*'
lock_alone openenv 'openenv==0.10.*'
lock_alone packaging $'build>=1.3\ntwine>=6\nsetuptools>=77'
# Packed attention is checked against this transformers; the CPU engine limits it by itself.
lock cpu ${torch_source[@]+"${torch_source[@]}"}
# A folder of wheels may hold the CPU build of torch, which would take the place of the CUDA build.
UV_FIND_LINKS= lock cuda --constraint <(echo 'transformers==5.19.*')
