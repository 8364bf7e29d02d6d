#!/usr/bin/env bash
# A node of a Ray cluster that asks for a token. On the head without arguments, elsewhere with its address:
#   ray get-auth-token --generate        once, on the head; copy ~/.ray/auth_token to the others
#   launch/ray/start.sh                  on the head
#   launch/ray/start.sh 10.0.0.1:6379    on each other node
# The dashboard and `ray job submit` need ray[default] on the head: pip install 'ray[default]>=2.50,<3'
set -euo pipefail
export RAY_AUTH_MODE=token
# Ray gives workers the lowest priority, by which engines compute only what others leave.
export RAY_worker_niceness="${RAY_worker_niceness:-0}"

if [ $# = 0 ]; then
    # The dashboard listens on the loopback interface: reach it by ssh -L 8265:localhost:8265 HEAD.
    exec ray start --head --port "${RAY_PORT:-6379}" --dashboard-port "${DASHBOARD_PORT:-8265}" ${RAY_OPTIONS:-}
else
    exec ray start --address "$1" ${RAY_OPTIONS:-}
fi
