"""Show how runs are doing: state, step, phase, speed, scores, checkpoint.

python -m stppo_jax status DIR... [--json]

  DIR     the folder of a run, its --workdir, or the address of its copy in a
          bucket, its writer.copy_to
  --json  prints one JSON object for each run, with all digits

Below the table are the errors that ended runs, and the alarms of their last
steps: skipped updates, numbers that are not finite, and the alarms that
docs/metrics.md lists.

The command only reads files of the folders, so it works during a run and after
it, on any machine that sees them. The exit code is 2 if a DIR is not that of a
run; the others are shown all the same.

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
import datetime
import json
import sys

from stppo_jax import exits
from stppo_jax import settings
from stppo_jax import streams
from stppo_jax.tools import run_state

_TITLES = (
  'run',
  'state',
  'step',
  'phase',
  's/step',
  'eta',
  'scores',
  'saved',
  'hosts',
)


def main(argv: Sequence[str]) -> int:
  """Prints the states of runs; returns the exit code."""
  flags = [word for word in argv if word.startswith('-')]
  folders = [word for word in argv if not word.startswith('-')]
  problems = [
    f'{flag}: unknown flag{settings.closest(flag, ["--json"])}'
    for flag in flags
    if flag != '--json'
  ]
  if not folders:
    problems.append('DIR: missing; give the folder of a run, or several')
  if problems:
    print('\n'.join(problems), file=sys.stderr)
    return exits.USAGE
  states = []
  for folder in folders:
    try:
      states.append(run_state.read(folder))
    except run_state.NoRun as error:
      problems.append(str(error))
  if flags:
    for state in states:
      print(json.dumps(dataclasses.asdict(state)))
  elif states:
    print('\n'.join(table(states)))
  for problem in problems:
    print(problem, file=sys.stderr)
  return 2 if problems else 0


def table(states: Sequence[run_state.RunState]) -> list[str]:
  """Returns the lines of a table of runs, and those of notes and alarms."""
  rows = [_TITLES]
  rows += [tuple(map(_line, _row(state))) for state in states]
  lines = streams.aligned(rows)
  for state in states:
    notes = [state.note] if state.note else []
    lines += [_line(f'{state.folder}: {x}') for x in notes + state.alarms]
  return lines


def _line(text: str) -> str:
  """Returns text of a run's files as one line without control characters."""
  return streams.escape(text).replace('\n', '\\n')


def _row(state: run_state.RunState) -> tuple[str, ...]:
  length = '?' if state.num_steps is None else state.num_steps
  pace = state.seconds_per_step
  eta = ''
  if state.eta is not None:
    eta = str(datetime.timedelta(seconds=round(state.eta)))
  scores = [f'{name} {x:.3f}' for name, x in state.metrics.items()]
  saved = state.checkpoint
  return (
    state.folder,
    state.state,
    f'{state.step}/{length}',
    state.phase,
    '' if pace is None else f'{pace:.3g}',
    eta,
    ' '.join(scores),
    '' if saved is None else str(saved),
    str(len(state.hosts) or ''),
  )
