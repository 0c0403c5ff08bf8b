#!/usr/bin/env bash
# Requests a TPU slice, and requests it again when it was taken away. Leave it
# running, in tmux for instance; after a restart of it the same command goes on.
# The workers delete the slice when the run is done.
set -uo pipefail
startup=$(mktemp)
trap 'rm -f "$startup"' EXIT
cat >"$startup" <<'STARTUP'
#!/usr/bin/env bash
# The startup script of every VM of a TPU slice: runs as root at each boot.
set -euo pipefail
mkdir /run/stppo 2>/dev/null || exit 0  # once a boot
release() {
  gcloud compute tpus queued-resources delete st-ppo-e2ad2f --project=lab \
    --zone=us-west4-a --force --quiet --async
}
# A setup that fails leaves a slice that does nothing and is paid for.
trap release ERR
mkdir -p /shared
if ! mountpoint -q /shared; then
  apt-get -qq update
  apt-get -qq install -y nfs-common git python3-venv
  mount -t nfs 10.0.0.2:/share /shared
fi
if [ ! -d /opt/stppo_jax ]; then
  git clone --quiet https://example.com/stppo_jax.git /opt/stppo_jax
  git -C /opt/stppo_jax checkout --quiet main
  python3.11 -m venv /opt/stppo_jax/.venv
  /opt/stppo_jax/.venv/bin/pip install --quiet '/opt/stppo_jax[tpu,gcs]'
fi
cd /opt/stppo_jax
trap - ERR
code=0
env RESTARTS=20 launch/run.sh --config=quickstart:st_ppo '--workdir=/shared/runs/ST ppo' '--config.title=what happens?' || code=$?
# Done, or broken: what would repeat for ever must not be paid for ever. After
# 75, the next boot or the next slice goes on.
if ((code != 75)); then release; fi
STARTUP
where=(--project=lab --zone=us-west4-a)
create() {
  gcloud compute tpus queued-resources create st-ppo-e2ad2f "${where[@]}" \
    --node-id=st-ppo-e2ad2f --accelerator-type=v5litepod-16 \
    --runtime-version=v2-alpha-tpuv5-lite --spot \
    --metadata-from-file=startup-script="$startup"
}
state() {
  gcloud compute tpus queued-resources list "${where[@]}" \
    --filter='name ~ /st-ppo-e2ad2f$' --format='value(state.state)'
}
now=$(state) || exit
if [ -z "$now" ]; then create || exit; fi
for ((again = 0; again <= 20; )); do
  sleep 60
  now=$(state) || continue  # the network; it is asked again
  echo "$(date -u +%FT%TZ) st-ppo-e2ad2f: ${now:-gone}"
  case $now in
    '') exit 0 ;;  # its workers have deleted it: the run has ended
    SUSPENDED | FAILED)
      gcloud compute tpus queued-resources delete st-ppo-e2ad2f "${where[@]}" \
        --force --quiet
      create || exit
      again=$((again + 1))
      ;;
  esac
done
exit 75
