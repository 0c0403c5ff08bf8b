#!/usr/bin/env bash
# A workload of XPK. The volume of /shared must be attached to the cluster with
# `xpk storage attach --auto-mount=true`.
exec xpk workload create --workload=st-ppo-e2ad2f --cluster=pods \
  --project=lab --zone=us-west4-a --tpu-type=v5litepod-16 \
  --num-slices=1 --docker-image=registry/stppo_jax:tpu \
  --max-restarts=20 --restart-on-exit-codes=75 \
  --command='env RESTARTS=0 launch/run.sh --config=quickstart:st_ppo '"'"'--workdir=/shared/runs/ST ppo'"'"''
