#!/usr/bin/env bash
# Processes of one run on this machine, each with devices of its own.
set -uo pipefail
port=$({{python}} -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
workers=() signalled=''
stop() { kill -TERM "${workers[@]}" 2>/dev/null; }
trap 'signalled=yes; stop' TERM INT HUP
for ((i = 0; i < {{processes}}; i++)); do
  # GPUs are dealt out in equal parts; CPUs are shared.
  if (({{gpus}} > 0)); then
    each=$(({{gpus}} / {{processes}}))
    CUDA_VISIBLE_DEVICES=$(seq -s, $((i * each)) $((i * each + each - 1)))
    export CUDA_VISIBLE_DEVICES
  fi
  # Values are taken as they are.
  # shellcheck disable=SC2016
  PYTHON={{python}} {{env}} bash {{root}}/launch/run.sh {{flags}} \
    --coordinator=127.0.0.1:"$port" --num_processes={{processes}} \
    --process_id="$i" &
  workers+=($!)
done
worst=0
# 127: no worker is left.
while wait -n; code=$?; ((code != 127)); do
  if [ -n "$signalled" ]; then
    signalled=''  # the signal has ended `wait`, and no worker
  elif ((code != 0)); then
    # A bug or a wrong config of one ends the others, which would wait for it.
    if ((code != 75)); then stop; fi
    if ((code > worst)); then worst=$code; fi
  fi
done
exit "$worst"
