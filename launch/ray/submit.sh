#!/usr/bin/env bash
# lightning-rl fit as a job of the cluster that launch/ray/start.sh began, from the head or through ssh -L:
#   launch/ray/submit.sh --config recipes/sort_digits/grpo.yaml --config recipes/sort_digits/variants/ray.yaml
# The trainer runs on the head, in the folder that this is called in; engines run where there is room.
set -euo pipefail
export RAY_AUTH_MODE=token

exec ray job submit --address "http://127.0.0.1:${DASHBOARD_PORT:-8265}" -- \
    bash -c 'cd "$0" && exec lightning-rl fit "$@"' "$PWD" "$@" --ckpt_path last
