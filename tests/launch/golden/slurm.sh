#!/usr/bin/env bash
#SBATCH --job-name=st-ppo-e2ad2f
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --partition=gpu
#SBATCH --output=/shared/runs/ST ppo.slurm.log
#SBATCH --open-mode=append
#SBATCH --requeue
# Two minutes before the time is over, the run saves and ends with exit code 75.
#SBATCH --signal=TERM@120
# One process on each node, with all GPUs of the node. The coordinator is given,
# because jax would otherwise take one GPU for each process.
set -uo pipefail
cd /srv/lab/.sources/source-HASH || exit 2
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export COORDINATOR=$head:$((20000 + SLURM_JOB_ID % 20000))
# The variables are those of each process.
# shellcheck disable=SC2016
PYTHON=/srv/stppo_jax/.venv/bin/python env RESTARTS=0 SECRETS=/srv/lab/secrets srun --kill-on-bad-exit=1 bash -c \
  'exec bash launch/run.sh "$@" --coordinator="$COORDINATOR" \
    --num_processes="$SLURM_NTASKS" --process_id="$SLURM_PROCID"' \
  run.sh --config=quickstart:st_ppo '--workdir=/shared/runs/ST ppo' &
step=$!
# scancel --batch signals only this script, which passes the signal to its step.
trap 'kill -TERM "$step" 2>/dev/null' TERM
while wait "$step"; code=$?; ((code > 128)) && kill -0 "$step" 2>/dev/null
do :; done
# A job that was cancelled is not running any more.
if ((code == 75 && ${SLURM_RESTART_COUNT:-0} < 20)) &&
  scontrol show job "$SLURM_JOB_ID" | grep JobState=RUNNING >/dev/null; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
