#!/usr/bin/env bash
# Requests a TPU slice, and requests it again when it was taken away. Leave it
# running, in tmux for instance; after a restart of it the same command goes on.
# The workers delete the slice when the run is done.
set -uo pipefail
startup=$(mktemp)
trap 'rm -f "$startup"' EXIT
cat >"$startup" <<'STARTUP'
{{startup:plain}}STARTUP
where=(--project={{project}} --zone={{zone}})
create() {
  gcloud compute tpus queued-resources create {{name}} "${where[@]}" \
    --node-id={{name}} --accelerator-type={{accelerator}} \
    --runtime-version={{runtime}} {{spot:plain}} \
    --metadata-from-file=startup-script="$startup"
}
state() {
  gcloud compute tpus queued-resources list "${where[@]}" \
    --filter='name ~ /{{name:plain}}$' --format='value(state.state)'
}
now=$(state) || exit
if [ -z "$now" ]; then create || exit; fi
for ((again = 0; again <= {{restarts}}; )); do
  sleep {{poll}}
  now=$(state) || continue  # the network; it is asked again
  echo "$(date -u +%FT%TZ) {{name}}: ${now:-gone}"
  case $now in
    '') exit 0 ;;  # its workers have deleted it: the run has ended
    SUSPENDED | FAILED)
      gcloud compute tpus queued-resources delete {{name}} "${where[@]}" \
        --force --quiet
      create || exit
      again=$((again + 1))
      ;;
  esac
done
exit 75
