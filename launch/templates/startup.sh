#!/usr/bin/env bash
# The startup script of every VM of a TPU slice: runs as root at each boot. What
# it has to say stands in the folder of the slice, see launch/slices.py.
set -uo pipefail
export PATH="$PATH:/snap/bin" HOME="${HOME:-/root}"
home=/opt/stppo_jax place={{place}} beat='' limit=''
mkdir -p "$home/logs"
boot=$(cat /proc/sys/kernel/random/boot_id)
if [ "$(cat "$home/boot" 2>/dev/null)" = "$boot" ]; then exit 0; fi
echo "$boot" >"$home/boot"

put() { gcloud storage cp --quiet "$1" "$place/$2-$HOSTNAME" >/dev/null 2>&1; }
tell() { echo "$HOSTNAME $(date +%s) $(cat "$home/state")" | put - state; }
say() {
  echo "$*"
  echo "$*" >"$home/state.new" && mv "$home/state.new" "$home/state" && tell
}
release() {
  for ((n = 0; n < 20; n++)); do
    if gcloud compute tpus queued-resources delete {{slice}} \
      --project={{project}} --zone={{zone}} --force --quiet --async
    then break; fi
    sleep {{poll}}
  done
}
# A slice is paid for even if it does nothing. When this script has ended, for
# whatever reason, the machine that submitted the run deletes the slice. If that
# machine is gone, this trap does it after a while. Until then the last state is
# reported again and again.
trap 'sleep {{patience}}; kill "$beat" 2>/dev/null; release' EXIT
# The VM is stopped: the next boot or the next slice goes on.
trap 'trap - EXIT; kill "$beat" "$limit" 2>/dev/null; exit 75' TERM
# The budget holds even if nobody follows the run.
if [ ! -e "$home/deadline" ]; then
  echo $(($(date +%s) + {{left}})) >"$home/deadline"
fi
(
  while (($(date +%s) < $(cat "$home/deadline"))); do sleep {{poll}}; done
  release
) &
limit=$!

setup() {
  gcloud storage cp {{source}} "$home/source.tar.bz2" &&
    rm -rf "$home/source" && mkdir "$home/source" &&
    python3 -m tarfile -e "$home/source.tar.bz2" "$home/source" &&
    curl -LsSf --retry 3 --max-time 300 https://astral.sh/uv/0.13.9/install.sh \
      -o "$home/install.sh" &&
    UV_UNMANAGED_INSTALL="$home" sh "$home/install.sh" &&
    "$home/uv" venv --clear --python 3.12 "$home/venv" &&
    timeout 1800 "$home/uv" pip install --python "$home/venv/bin/python" \
      -r "$home/source/launch/requirements.txt" \
      -c "$home/source/launch/requirements.txt" 'jax[tpu]' 'gcsfs>=2025.3' &&
    if [ -n "$secrets" ]; then
      (umask 077 && gcloud secrets versions access latest --project={{project}} \
        --secret="$secrets" >"$home/secrets")
    fi
}

secrets={{secrets}}
say setup
date +%s | put - born
while sleep {{poll}}; do
  tell
  if [ "$(cat "$home/state")" = setup ]; then put "$home/setup" setup; fi
  put "$home/logs/$HOSTNAME.log" log
done &
beat=$!
for ((try = 1; ; try++)); do
  echo "setup, attempt $try"
  if setup >>"$home/setup" 2>&1; then break; fi
  put "$home/setup" setup
  if ((try == 5)); then
    say failed
    exit 1
  fi
  sleep $(({{delay}} << try))
done
put "$home/setup" setup
say running
export PYTHON="$home/venv/bin/python" LOGS="$home/logs"
if [ -n "$secrets" ]; then export SECRETS="$home/secrets"; fi
cd "$home/source" || exit
code=0
# Values are taken as they are.
# shellcheck disable=SC2016
{{env}} bash launch/run.sh {{flags}} || code=$?
put "$home/logs/$HOSTNAME.log" log
say ended "$code"
if ((code == 0)); then
  # The worker that ends last writes into the folder of the run that all have
  # ended well: the launcher may be gone, and no other file says this.
  for ((try = 0; try < 20; try++)); do
    if tell && states=$(gcloud storage cat "$place/state-*"); then
      if (($(grep -c ' ended 0$' <<<"$states") < {{machines}})); then break; fi
      if echo {{job}} | gcloud storage cp --quiet - {{workdir:plain}}/launched
      then break; fi
    fi
    sleep {{poll}}
  done
fi
