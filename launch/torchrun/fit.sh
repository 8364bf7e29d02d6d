#!/usr/bin/env bash
# lightning-rl fit on several nodes. The same command on each node, but for NODE_RANK:
#   MASTER_ADDR=10.0.0.1 NODES=2 NODE_RANK=0 launch/torchrun/fit.sh --config recipes/sort_digits/grpo.yaml
# All nodes see the folder of the run. Give the command again to go on after a stop.
set -euo pipefail

: "${MASTER_ADDR:?address of node 0, as the other nodes reach it}"
: "${NODE_RANK:?0 on the node with that address, 1 on the next, and so on}"
nodes=${NODES:-2}
processes=${PROCESSES:-1} # on each node, one for each GPU

# By default torchrun dies of SIGUSR1 without telling its processes, and kills them 30 s after SIGTERM.
exec torchrun \
    --nnodes "$nodes" --node_rank "$NODE_RANK" --nproc_per_node "$processes" \
    --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}" \
    --signals_to_handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown_timeout "${SAVE_SECONDS:-300}" \
    -m lightning_rl fit "$@" \
    --trainer.devices "$processes" --trainer.num_nodes "$nodes" --ckpt_path last
