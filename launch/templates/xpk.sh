#!/usr/bin/env bash
# A workload of XPK. The volume of {{mount}} must be attached to the cluster with
# `xpk storage attach --auto-mount=true`.
exec xpk workload create --workload={{name}} --cluster={{cluster}} \
  --project={{project}} --zone={{zone}} --tpu-type={{tpu_type}} \
  --num-slices=1 --docker-image={{image}} \
  --max-restarts={{restarts}} --restart-on-exit-codes=75 \
  --command={{command}}
