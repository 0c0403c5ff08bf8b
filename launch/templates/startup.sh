#!/usr/bin/env bash
# The startup script of every VM of a TPU slice: runs as root at each boot.
set -euo pipefail
mkdir /run/stppo 2>/dev/null || exit 0  # once a boot
release() {
  gcloud compute tpus queued-resources delete {{name}} --project={{project}} \
    --zone={{zone}} --force --quiet --async
}
# A setup that fails leaves a slice that does nothing and is paid for.
trap release ERR
mkdir -p {{mount}}
if ! mountpoint -q {{mount}}; then
  apt-get -qq update
  apt-get -qq install -y nfs-common git python3-venv
  mount -t nfs {{nfs}} {{mount}}
fi
if [ ! -d /opt/stppo_jax ]; then
  git clone --quiet {{repository}} /opt/stppo_jax
  git -C /opt/stppo_jax checkout --quiet {{revision}}
  {{worker_python}} -m venv /opt/stppo_jax/.venv
  /opt/stppo_jax/.venv/bin/pip install --quiet '/opt/stppo_jax[tpu,gcs]'
fi
cd /opt/stppo_jax
trap - ERR
code=0
{{env}} launch/run.sh {{train}} || code=$?
# Done, or broken: what would repeat for ever must not be paid for ever. After
# 75, the next boot or the next slice goes on.
if ((code != 75)); then release; fi
