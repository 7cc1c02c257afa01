#!/bin/bash
# One model over the GPUs of a Slurm job, behind one address:
#   sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 deploy/slurm.sh MODEL [OPTION...]
# starts a worker for each task, and `inl serve MODEL OPTION...` on the first node. The model
# has the same path on all nodes; PLACEMENT, DEVICE, PORT and WORKER_PORT may be set.
#SBATCH --job-name=inl
#SBATCH --exclusive
set -euo pipefail
if [ $# -eq 0 ]; then
    echo "usage: sbatch [OPTION OF SBATCH...] $0 MODEL [OPTION OF inl serve...]" >&2
    exit 2
fi
model=$1
shift
: "${SLURM_NTASKS:?is not set; start this script with sbatch and a number of tasks}"
host=${HOST_ADDRESS:-$(hostname -I | cut -d ' ' -f 1)}
workers=$host:${WORKER_PORT:-7000}
# Tasks get the environment of this script. Other users cannot read it.
INL_WORKER_SECRET=$(openssl rand -hex 32)
export INL_WORKER_SECRET

srun --ntasks="$SLURM_NTASKS" --kill-on-bad-exit=1 inl worker "$workers" --wait 600 &
tasks=$!
inl serve "$model" --device "join:$workers/${DEVICE:-cuda:0}" \
    --placement "${PLACEMENT:-tensor=$SLURM_NTASKS}" \
    --host "$host" --port "${PORT:-8000}" "$@" &
server=$!
# `scancel --batch --signal=TERM JOB` ends this script alone: the server finishes its
# requests, and its workers end. Without --batch Slurm ends the workers at once.
trap 'kill -TERM "$server" 2>/dev/null' TERM INT
trap 'kill "$server" "$tasks" 2>/dev/null || true' EXIT
status=0
wait "$server" || status=$?
while kill -0 "$server" 2>/dev/null; do # the wait has ended by a signal
    status=0
    wait "$server" || status=$?
done
exit "$status"
