#!/usr/bin/env bash
# Trains on this worker, and starts again where that helps. Every launcher ends
# here; by hand it is the same:
#
#   launch/run.sh --config=FILE.py[:ALGORITHM] --workdir=DIR [FLAGS OF train]
#
# Variables, all of them optional:
#   PYTHON    the interpreter; otherwise .venv/bin/python of this clone, then
#             python3
#   RESTARTS  how often the run is started again; 20 by default. Only after exit
#             code 75, which says that another attempt may succeed, and never
#             after a signal to this script
#   COMMAND   what is run: a module and its words; `stppo_jax train` by default
#   DELAY     seconds between two starts; 10 by default
#   LOGS      the folder of logs, one for each worker; WORKDIR.logs by default,
#             because WORKDIR itself must hold nothing when a run begins, or a
#             folder in /tmp if WORKDIR is a bucket
#   SECRETS   a file of lines NAME=VALUE, such as STPPO_RETRIEVAL_TOKEN=...,
#             which become environment variables: arguments are visible to all
#             users of a machine, and are logged
#   RETRIEVER arguments of `serve`, such as --index=DIR: a retrieval server that
#             runs beside the run, and is started again with it if it has ended
#   PORT      the server listens there, plus the number of the process; by
#             default on any free port
#
# The exit code is that of the last start.
set -uo pipefail

# bash reads a function as a whole: this file may be replaced while it runs.
main() {
  workdir='' rank='' before=''
  for word in "$@"; do
    case $before in  # `--workdir DIR` means the same as `--workdir=DIR`
      --workdir | --process_id) word=$before=$word ;;
    esac
    before=$word
    case $word in
      --workdir=*) workdir=${word#*=} ;;
      --process_id=*) rank=${word#*=} ;;
      --restart | --restart=*)
        echo 'run.sh: --restart: every start would begin anew; use train' >&2
        exit 2
        ;;
    esac
  done
  if [ -z "$workdir" ]; then
    echo 'run.sh: --workdir=DIR is missing; other flags are as for train' >&2
    exit 2
  fi

  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  python=${PYTHON:-}
  if [ -z "$python" ]; then
    python=python3
    [ -x "$root/.venv/bin/python" ] && python=$root/.venv/bin/python
  fi
  if ! command -v "$python" >/dev/null; then
    echo "run.sh: PYTHON=$python: no such program" >&2
    exit 2
  fi
  export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

  if [ -n "${SECRETS:-}" ]; then
    if [ ! -r "$SECRETS" ]; then
      echo "run.sh: SECRETS=$SECRETS: no such file" >&2
      exit 2
    fi
    # Values are taken as they are: a token may have a $ in it.
    while IFS= read -r line || [ -n "$line" ]; do
      case $line in
        '' | '#'*) ;;
        [a-zA-Z_]*=*) export "${line?}" ;;
        *)
          echo "run.sh: SECRETS=$SECRETS: a line is not NAME=VALUE" >&2
          exit 2
          ;;
      esac
    done <"$SECRETS"
  fi

  logs=${workdir%/}.logs
  case $logs in *://*) logs=/tmp/${logs##*/} ;; esac
  logs=${LOGS:-$logs}
  log=$logs/$HOSTNAME${rank:+-$rank}.log
  mkdir -p "$logs" || exit 2
  # `tee` ignores signals: it must copy even the last line of a stopped run.
  exec > >(trap '' INT TERM HUP; exec tee -a "$log") 2>&1

  # The run has a session of its own, so that a Ctrl-C of the terminal reaches
  # it only once, from here. But some supervisors send SIGTERM to every process,
  # so the run may have got that signal already. A second SIGTERM would make it
  # abandon what it saves. So this script waits a little and sends SIGHUP, which
  # a run that is ending ignores.
  tell=HUP
  # Under nohup the run would ignore SIGHUP from its beginning (bit 0 of the
  # mask of ignored signals), so there it is told by SIGTERM.
  if ((0x$(awk '/^SigIgn/ { print $2 }' /proc/self/status) & 1)); then
    tell=TERM
  fi
  child='' stopped='' signalled=''
  # shellcheck disable=SC2329  # it is called by the traps
  stop() {
    stopped=$1 signalled=yes
    sleep 0.5
    [ -n "$child" ] && kill -s "$tell" "$child" 2>/dev/null
  }
  trap 'stop 75' TERM HUP
  trap 'stop 130' INT

  server='' url='' port=0  # a free one, which no other retriever has
  if [ -n "${PORT:-}" ]; then port=$((PORT + ${rank:-0})); fi
  trap '[ -n "$server" ] && kill "$server" 2>/dev/null' EXIT
  # Starts the retriever unless it runs; ends this script if it cannot.
  retrieve() {
    if [ -n "$server" ] && kill -0 "$server" 2>/dev/null; then return; fi
    # The arguments are words.
    # shellcheck disable=SC2086
    exec 3< <(exec "$python" -m stppo_jax serve $RETRIEVER --port="$port")
    server=$!
    # When it is ready, it prints its URL.
    until read -r -t 1 url <&3; do
      if [ -n "$stopped" ]; then exit "$stopped"; fi
      if ! kill -0 "$server" 2>/dev/null; then
        wait "$server"
        exit
      fi
    done
    url=--config.retrieval.url=$url
  }

  code=75
  for ((start = 0; start <= ${RESTARTS:-20}; start++)); do
    if ((start > 0)); then
      echo "run.sh: exit code 75; start $((start + 1)) in ${DELAY:-10} s"
      sleep "${DELAY:-10}" &
      wait $!
    fi
    if [ -n "$stopped" ]; then code=$stopped && break; fi
    if [ -n "${RETRIEVER:-}" ]; then retrieve; fi
    # The command is words.
    # shellcheck disable=SC2086
    setsid "$python" -u -m ${COMMAND:-stppo_jax train} "$@" ${url:+"$url"} &
    child=$!
    # The signal came before there was a child to tell.
    if [ -n "$stopped" ]; then kill -s "$tell" "$child" 2>/dev/null; fi
    # A signal to this script ends `wait` early, so it waits again; 127 means
    # that the child had ended before.
    signalled=yes
    while [ -n "$signalled" ]; do
      signalled=''
      wait "$child"
      result=$?
      if ((result != 127)); then code=$result; fi
    done
    child=''
    # 129 and 143: SIGHUP or SIGTERM came before the run could handle signals.
    if [ -n "$stopped" ] && ((code == 75 || code == 129 || code == 143)); then
      code=$stopped
    fi
    if ((code != 75)) || [ -n "$stopped" ]; then break; fi
  done
}

main "$@"; exit "$code"
