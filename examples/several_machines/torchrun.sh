#!/bin/bash
# Trains a config on several machines by torchrun. On each of them, at about the same time:
#     NODES=2 PER_NODE=8 HOST=first-node ./torchrun.sh config.yaml [key=value ...]
# NODES: machines. PER_NODE: ranks of each, mostly its GPUs. HOST, PORT: of the first machine, reached by the others.
set -euo pipefail

NODES=${NODES:-1}
PER_NODE=${PER_NODE:?the number of ranks of each machine}

exec torchrun --nnodes "$NODES" --nproc-per-node "$PER_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "${HOST:-localhost}:${PORT:-29500}" --rdzv-id "${JOB:-shardlight}" \
    -m shardlight.cli fit "$@" trainer.num_nodes="$NODES" trainer.devices="$PER_NODE"
