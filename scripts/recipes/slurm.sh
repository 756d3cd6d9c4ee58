#!/usr/bin/env bash
# A stage on two hosts of eight GPUs, started from the checkout's folder (with .venv in it) as
#     sbatch scripts/recipes/slurm.sh infer --model DIR --input prompts.jsonl --output answers.jsonl --tp-size 8
# The hosts share that folder. Other numbers of hosts: sbatch --nodes=4 ...
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --output=slurm-%j.out
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../..}"
source scripts/usage.sh
if [ $# = 0 ] || [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "error: start this as a Slurm job: sbatch scripts/recipes/slurm.sh STAGE [FLAGS of python -m scripts.STAGE]" >&2
    exit 2
fi
stage="$1"
shift

# One torchrun a host (the one task of each) starts a rank a GPU; they meet on the first host.
first_host="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"
port=$((20000 + SLURM_JOB_ID % 10000)) # two jobs on one host do not meet by mistake
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}" # no C++ backtrace for each connection that a failure cuts

# A rank that fails ends all ranks, and says why. --kill-on-bad-exit is for a whole torchrun that is gone.
srun --kill-on-bad-exit=1 .venv/bin/python -m pipeline_parallel.torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node gpu \
    --rdzv-backend c10d --rdzv-endpoint "$first_host:$port" --rdzv-id "$SLURM_JOB_ID" \
    -m "scripts.$stage" "$@"
