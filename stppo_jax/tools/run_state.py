"""Reads the state of a run from the files in its folder.

The run may be on another machine. Only small files and the end of metrics.jsonl
are read, so reading the states of many runs is fast.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import datetime
import json
import pathlib
import re
import statistics
import time
from typing import Any

from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax import streams
from stppo_jax.records import headline
from stppo_jax.training import alarms
from stppo_jax.workdir import bucket_files
from stppo_jax.workdir import heartbeat
from stppo_jax.workdir import lock
from stppo_jax.workdir import run_folder

FINISHED, RUNNING, INTERRUPTED = 'finished', 'running', 'interrupted'
FAILED, DEAD = 'failed', 'dead'
# The exit codes of a run after which the same command resumes the run.
_RESUMABLE = (exits.TRY_AGAIN, exits.INTERRUPTED)
# Seconds without a heartbeat after which a run on another machine counts as
# dead. The time is long, because the clocks of machines differ and shared file
# systems show changes late.
_SILENCE = 120.0
# The number of bytes that are read from the end of metrics.jsonl.
_TAIL = 1 << 20
_PACE = 20  # the number of last steps whose median duration is the pace
# The errors that a line or a file raises if it is damaged, or was written by
# another program.
_UNREADABLE = (ValueError, KeyError, TypeError, RecursionError)
_COMMANDS = ('train', 'sft', 'prefer')
# Matches the path of a run's config, relative to a folder of runs or studies,
# and captures the path of the run's folder.
_CONFIG = re.compile(r'([^/]+(?:/[^/]+)?)/config\.json')


class NoRun(exits.Misconfigured):
  """The error of a folder that holds no run; the message is one line."""


@dataclasses.dataclass(frozen=True)
class RunState:
  """The state of a run.

  Attributes:
    folder: the run's folder.
    command: the command of the run: train, sft or prefer.
    state: finished; running; interrupted (the run was stopped, or a server was
      out of reach, and the same command resumes the run); failed (an error
      ended the run); or dead (the process is gone and left no exit code).
    step: the number of steps that are done.
    num_steps: the number of steps of the whole run; None if it is not known.
    phase: the phase that a running run is in, such as update; '' if it is not
      known.
    seconds_per_step: the median duration of the last steps; None if no duration
      is recorded, as before the first step is done.
    eta: the seconds until the end of the run, if its steps go on taking
      `seconds_per_step`; None if `seconds_per_step` is None, or if the run is
      not running.
    metrics: the reward or the loss of the last step, and the score of the last
      evaluation, by the name of the metric.
    checkpoint: the step of the newest checkpoint; None if there is none.
    hosts: the machine name of each host; [] if they are not known.
    note: one line about why the run has ended, or about the process that holds
      its lock; '' if there is nothing to add to `state`.
    alarms: a line for each problem of the last step.
  """

  folder: str
  command: str
  state: str
  step: int
  num_steps: int | None
  phase: str
  seconds_per_step: float | None
  eta: float | None
  metrics: dict[str, float]
  checkpoint: int | None
  hosts: list[str]
  note: str
  alarms: list[str]


def runs_in(folders: Sequence[str]) -> list[str]:
  """Returns the folders of all runs in the given folders.

  A given folder that is itself the folder of a run is returned as it is. In any
  other folder, the folders of runs lie directly in it or one level deeper, as
  in a folder of several studies. A folder without runs is also returned as it
  is, so that `read` can say what is wrong with this folder.
  """
  return [run for folder in folders for run in _runs_in(folder)]


def _runs_in(folder: str) -> list[str]:
  """Returns the folders that `runs_in` returns for one given folder."""
  path, names = pathlib.Path(folder), set()
  if buckets.is_address(folder):
    with contextlib.suppress(buckets.BucketError):  # `read` reports the error
      names = {*buckets.Bucket(folder).entries()}
  elif not run_folder.command_of(path):
    found = [*path.glob('*/config.json'), *path.glob('*/*/config.json')]
    names = {x.relative_to(path).as_posix() for x in found}
  inner = {match[1] for match in map(_CONFIG.fullmatch, names) if match}
  # The folder `policy` inside a run also has a config.json, but is no run.
  inner = {x for x in inner if x.partition('/')[0] not in inner - {x}}
  if run_folder.IDENTITY in names or not inner:
    return [folder]
  return [f'{folder.rstrip("/")}/{x}' for x in sorted(inner)]


def read(folder: str | pathlib.Path) -> RunState:
  """Returns the state of the run in a folder, which may be in a bucket.

  Raises:
    NoRun: the folder is missing or holds no run, or its bucket cannot be read.
  """
  try:
    with bucket_files.downloaded(str(folder)) as path:
      return read_from(path, str(folder))
  except buckets.BucketError as error:
    raise NoRun(str(error)) from error


def read_from(path: pathlib.Path, folder: str) -> RunState:
  """Returns the state of a run whose files are on this machine.

  Args:
    path: the folder with the files.
    folder: the name of the run's folder in the state and in errors: `path`, or
      the address in a bucket from which the files were downloaded.

  Raises:
    NoRun: the folder is missing or holds no run.
  """
  if path.is_file():
    raise NoRun(f'{folder}: not the folder of a run: it is a file')
  if not path.is_dir():
    raise NoRun(f'{folder}: no such folder')
  command = run_folder.command_of(path)
  if command not in _COMMANDS:
    reason = f'it was written by {command}' if command else 'no run.json'
    raise NoRun(f'{folder}: not the folder of a run: {reason}')
  lines = _last_lines(path / 'metrics.jsonl')
  steps = [line for line in lines if line['step'] > 0]
  beat = heartbeat.read(path)
  # `num_steps` in the heartbeat is 0 until the run knows how many steps it has.
  num_steps = (beat.num_steps if beat else 0) or _num_steps(path, command)
  step = max([line['step'] for line in lines[:1]] + [beat.step if beat else 0])
  state, note = _state(
    path,
    beat,
    is_complete=0 < num_steps <= step,
    has_lock=not buckets.is_address(folder),
  )
  pace = _pace(steps)
  is_running = state == RUNNING
  return RunState(
    folder=folder,
    command=command,
    state=state,
    step=step,
    num_steps=num_steps or None,
    phase=beat.phase if beat and is_running else '',
    seconds_per_step=pace,
    eta=pace * (num_steps - step) if is_running and pace else None,
    metrics=_shown(lines),
    checkpoint=_newest_checkpoint(path / 'checkpoints'),
    hosts=list(beat.hosts) if beat else [],
    note=note,
    alarms=_alarms(steps[0]) if steps else [],
  )


def _state(
  folder: pathlib.Path,
  beat: heartbeat.Beat | None,
  *,
  is_complete: bool,
  has_lock: bool,
) -> tuple[str, str]:
  """Returns `state` and `note` of the `RunState` of a run.

  Args:
    folder: the run's folder.
    beat: the run's last heartbeat; None if there is none, as in runs of earlier
      versions.
    is_complete: whether all steps of the run are done.
    has_lock: whether a running run has a lock file in this folder. It is False
      for a folder in a bucket, where only a recent heartbeat shows that the run
      is running.
  """
  # If the run is on another machine, its process cannot be looked up here. Then
  # only the time of the last heartbeat shows whether the run is alive.
  silence = time.time() - beat.time if beat else 0.0
  held = lock.holder(folder)
  if held is not None:
    holder, is_alive = held
    # A process in another container cannot be looked up, but its heartbeat can
    # be read.
    is_heard = beat is not None and beat.exit_code is None
    is_heard = is_heard and silence < _SILENCE
    if is_alive or is_heard:
      return RUNNING, ''
    if is_alive is None and beat is None:
      return RUNNING, f'{holder}, which cannot be seen from here'
    if is_alive is None:
      return DEAD, f'{holder}: no sign of life for {silence:.0f} s'
    return DEAD, f'{holder}: that process is gone; the same command resumes'
  if beat is None:
    return (FINISHED if is_complete else INTERRUPTED), ''
  if beat.exit_code is None and not has_lock:
    if silence < _SILENCE:
      return RUNNING, ''
    return DEAD, (
      f'host {beat.host}: no sign of life for {silence:.0f} s; if that machine '
      'is gone, the same command resumes on another one'
    )
  if beat.exit_code is None:
    return DEAD, f'process {beat.pid} on host {beat.host} left no exit code'
  if beat.exit_code == 0:
    return FINISHED, ''
  if beat.exit_code in _RESUMABLE:
    return INTERRUPTED, beat.error
  return FAILED, f'exit code {beat.exit_code}: {beat.error}'


def _last_lines(path: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the newest records of a metrics file, as `_parsed` yields them.

  The list is empty if the file cannot be read.
  """
  try:
    with open(path, 'rb') as file:
      # The reading may begin inside a line; `_parsed` skips such a line.
      file.seek(max(path.stat().st_size - _TAIL, 0))
      return list(_parsed(file.read()))
  except OSError:
    return []


def _parsed(text: bytes) -> Iterator[dict[str, Any]]:
  """Yields the newest `_PACE + 1` records of metrics, the newest first.

  If none of these records has an evaluation, the newest record that has one
  follows.

  Args:
    text: lines of a metrics file.
  """
  # If evaluations are rare, many lines may lie between the last evaluation and
  # the newest lines. These lines are not parsed.
  has_evaluation, count = False, 0
  for line in reversed(text.splitlines()):
    is_evaluation = b'"val/' in line
    if count > _PACE and (has_evaluation or not is_evaluation):
      continue
    try:
      record = json.loads(line)
      # This raises an error if the step is missing or is not a number.
      record['step'] += 0
    except _UNREADABLE:  # a part of the line is missing
      continue
    has_evaluation |= is_evaluation
    count += 1
    yield record


def _shown(lines: list[dict[str, Any]]) -> dict[str, float]:
  """Returns the newest reward or loss, and the newest evaluation score.

  The keys are the names of the metrics.

  Args:
    lines: the metrics of each step, the newest step first.
  """
  shown: dict[str, float] = {}
  for select in (headline.training, headline.evaluation):
    for line in lines:
      finite = {name: x for name, x in line.items() if x is not None}
      if selected := select(finite):
        shown |= selected
        break
  return shown


def _pace(steps: Sequence[Mapping[str, Any]]) -> float | None:
  """Returns the median duration of the last steps in seconds.

  The result is None if no step has a duration, see `headline.seconds`.

  Args:
    steps: the metrics of each step, the newest step first.
  """
  found = [headline.seconds(line) for line in steps[:_PACE]]
  seconds = [x for x in found if x is not None]
  return statistics.median(seconds) if seconds else None


def _alarms(line: Mapping[str, Any]) -> list[str]:
  """Returns a line for each problem that the metrics of a step show."""
  found = []
  if skipped := line.get('update/skipped'):
    found.append(f'{skipped:.0%} of the updates were skipped')
  if names := line.get('writer/non_finite'):
    found.append(f'not finite: {", ".join(names)}')
  found += alarms.recorded(line)
  return [f'step {line["step"]}: {alarm}' for alarm in found]


def _num_steps(folder: pathlib.Path, command: str) -> int:
  """Returns the number of steps that a run's config sets; 0 if not known."""
  try:
    config = json.loads((folder / 'config.json').read_text('utf-8'))
    section = {'train': config, 'sft': config['sft']}.get(command, {})
    return int(section.get('num_steps', 0))
  except (OSError, AttributeError, *_UNREADABLE):
    return 0


def _newest_checkpoint(folder: pathlib.Path) -> int | None:
  names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
  return max((int(name) for name in names if name.isdecimal()), default=None)


_TITLES = 'run state step phase s/step eta scores saved hosts'.split()


def table(states: Sequence[RunState]) -> list[str]:
  """Returns the lines of a table of runs, then the notes and alarms of runs."""
  rows = [
    _TITLES,
    *([streams.one_line(x) for x in _row(state)] for state in states),
  ]
  lines = streams.aligned(rows)
  for state in states:
    notes = [state.note] if state.note else []
    lines += [
      streams.one_line(f'{state.folder}: {x}') for x in notes + state.alarms
    ]
  return lines


def _row(state: RunState) -> tuple[str, ...]:
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
