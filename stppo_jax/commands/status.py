"""Show how runs are doing: state, step, phase, speed, scores, checkpoint.

python -m stppo_jax status DIR... [--json] [--watch=SECONDS]

  DIR     the folder of a run, its --workdir; or a folder that has folders of
          runs in it, such as that of a sweep, of a study, or runs/; both may be
          in a bucket
  --json  prints one JSON object for each run, with all digits
  --watch=SECONDS  prints the table again every so many seconds, until Ctrl-C

Below the table are the errors that ended runs, and the alarms of their last
steps: skipped updates, numbers that are not finite, and the alarms that
docs/metrics.md lists.

The command only reads files of the folders, so it works during and after a run,
on any machine that can read the folders. If a DIR is no folder of a run, the
exit code is 2, and all other runs are still shown.

The state of a run is one of

  finished     all steps are done
  running      its process lives
  interrupted  a signal has ended it, or a server was out of reach; the same
               command resumes it
  failed       an error has ended it
  dead         its process is gone and could not say why

eta, in hours:minutes:seconds, is the time that remains at the pace of the last
steps.
"""

from collections.abc import Sequence
import dataclasses
import json
import sys
import time

from stppo_jax.commands.flags import command_line
from stppo_jax.tools import run_state


def main(argv: Sequence[str]) -> int:
  """Prints the states of runs; returns the exit code."""
  flags = command_line.flags(
    json=False, watch=command_line.number(0.0, lower_bound=0)
  )
  given = command_line.parse(
    flags, argv, words=sys.maxsize, missing=command_line.NO_RUNS
  )
  command_line.refuse(given.errors)
  if not flags.watch:
    return _print(given.words, as_json=flags.json)
  while True:
    if sys.stdout.isatty() and not flags.json:
      print('\033[2J\033[H', end='')  # clears the screen
    _print(given.words, as_json=flags.json)
    # Without a flush, the reader of a pipe would not see the table yet.
    sys.stdout.flush()
    time.sleep(flags.watch)


def _print(folders: Sequence[str], *, as_json: bool) -> int:
  """Prints the states of runs once; returns the exit code."""
  states, problems = [], []
  for folder in run_state.runs_in(folders):
    try:
      states.append(run_state.read(folder))
    except run_state.NoRun as error:
      problems.append(error)
  if as_json:
    for state in states:
      print(json.dumps(dataclasses.asdict(state)))
  elif states:
    print('\n'.join(run_state.table(states)))
  return command_line.lost(problems)
