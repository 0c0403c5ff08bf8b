"""Run a grid of configs: here, as a Slurm array, or as jobs of a cluster.

python -m launch.sweep --config=FILE.py --out=DIR [--on=LAUNCHER] [--jobs=N]
    [--OPTION=VALUE ...] [--config.KEY=VALUE ...]
    [--dry_run | --status | --stop]

  --config=FILE.py    a config file with a function sweep(), which returns a
                      dict of lists: the names of algorithms under 'algorithm',
                      and the values of any config key under its name
  --out=DIR           the folder of the sweep; each run has a folder in it
  --on=LAUNCHER       local, the default; slurm (an array); or jobset
  --jobs=N            how many runs there are at once, here or in the array
  --OPTION=VALUE      an option of the launcher, see launch/README.md
  --config.KEY=VALUE  sets a key of all configs
  --dry_run           prints what would be run
  --status            prints the state of each run
  --stop              ends the runs; they save, and the same command resumes

The same command goes on: finished runs are not repeated, interrupted ones are
resumed, and those that still run are left alone.

The exit code here is 0 once all runs are finished; 75 if they were stopped, or
if runs of an earlier sweep still run; 130 after Ctrl-C; and otherwise the
largest one of the runs. With another launcher it is that of the submission.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from typing import Any

from absl import flags as absl_flags

from launch import launchers
from launch import rendering
from launch import submit
from stppo_jax import exits
from stppo_jax import settings
from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import config_file
from stppo_jax.commands.flags import configuration
from stppo_jax.tools import run_state
from stppo_jax.tools.ablation import parallel_runs
from stppo_jax.workdir import lock
from stppo_jax.workdir import run_folder

_LAUNCHERS = ('local', 'slurm', 'jobset')
_ALGORITHM = 'algorithm'


def main(argv: Sequence[str]) -> int:
  """Runs what is left of a sweep; returns the exit code."""
  if not argv or argv[0] in ('-h', '--help', 'help'):
    print(__doc__)
    return 0 if argv else 2
  try:
    return _main(argv)
  except (exits.Misconfigured, lock.Locked) as error:
    print(error, file=sys.stderr)
    return error.exit_code


def _main(argv: Sequence[str]) -> int:
  # The launcher says which other flags there are.
  first = _flags([])
  command_line.parse(first, argv, overrides=True)
  if first.on not in _LAUNCHERS:
    choices = settings.closest(first.on, _LAUNCHERS)
    raise exits.Misconfigured(f'--on={first.on}: unknown launcher{choices}')
  launcher = first.on
  options = (
    [] if launcher == 'local' else list(launchers.LAUNCHERS[launcher].options)
  )
  given_flags = _flags(options)
  given = command_line.parse(
    given_flags, argv, required=('config', 'out'), overrides=True
  )
  command_line.refuse(given.errors)
  values = given_flags.flag_values_dict()
  out, jobs = pathlib.Path(values['out']), values['jobs']
  runs = {}
  for name, flags in grid(values['config']).items():
    flags = [*flags, *rendering.flags_of(given.overrides)]
    flags += parallel_runs.own_copy(flags, name)
    runs[name] = [*flags, f'--workdir={out / name}']
  _check(runs)
  if values['status']:
    print('\n'.join(_table(out, runs)))
    return 0
  if values['stop'] and launcher == 'local':
    return _stop(out)
  is_stop = values['stop']
  left = [name for name in runs if _is_left(out / name, runs_too=is_stop)]
  if not left:
    print(f'nothing is left to {"stop" if is_stop else "start"}')
    print('\n'.join(_table(out, runs)))
    return 0 if is_stop or launcher != 'local' else _unfinished(out, runs)
  extra = [f'--{key}={values[key]}' for key in options if values[key]]
  extra += [f'--{name}' for name in ('dry_run', 'stop') if values[name]]
  if launcher == 'slurm':
    return _array(out, {name: runs[name] for name in left}, str(jobs), extra)
  if launcher != 'local':
    return max(submit.main([launcher, *runs[name], *extra]) for name in left)
  if values['dry_run']:
    for name in left:
      print(shlex.join(['launch/run.sh', *runs[name]]))
    return 0
  with lock.held(out):
    return _run_here(out, {name: runs[name] for name in left}, jobs, runs)


def _flags(options: Sequence[str]) -> absl_flags.FlagValues:
  """Returns the flags of a sweep, with options of its launcher."""
  return command_line.flags(
    config='',
    out='',
    **dict.fromkeys(options, ''),
    on='local',
    jobs=command_line.integer(1, lower_bound=1),
    dry_run=False,
    status=False,
    stop=False,
  )


def grid(file: str) -> dict[str, list[str]]:
  """Returns name to flags of each run of the sweep of a config file.

  Raises:
    Misconfigured: the file has no sweep, or one that is no dict of lists.
  """
  start = f'--config={file}: '
  with exits.naming(f'--config={file}'):
    axes = config_file.call(file, 'sweep')
  if not isinstance(axes, dict) or not all(
    isinstance(x, list | tuple) and len(x) for x in axes.values()
  ):
    raise exits.Misconfigured(
      f"{start}sweep() must return a dict of lists, such as {{'seed': [0, 1]}}"
    )
  runs = {}
  for point in itertools.product(*axes.values()):
    chosen = dict(zip(axes, point))
    algorithm = chosen.pop(_ALGORITHM, '')
    flags = [f'--config={file}:{algorithm}'.rstrip(':')]
    flags += [f'--config.{key}={value}' for key, value in chosen.items()]
    # The size of a model may follow the algorithm behind a comma.
    first = algorithm.replace(',', '-') or pathlib.Path(file).stem
    name = '-'.join([first, *map(_part, chosen.items())])
    if name in runs:
      raise exits.Misconfigured(f'{start}two runs of sweep() are named {name}')
    runs[name] = flags
  return runs


def _part(item: tuple[str, Any]) -> str:
  """Returns what a key and its value add to the name of a run."""
  key, value = item
  text = f'{key.rpartition(".")[2]}{value}'
  return re.sub(r'[^A-Za-z0-9_.]+', '_', text)


def _check(runs: Mapping[str, list[str]]) -> None:
  """Raises `UsageError` unless the configs of all runs are valid."""
  lines = []
  for name, flags in runs.items():
    words = [word for word in flags if not word.startswith('--workdir=')]
    try:
      configuration.parse(words)
    except exits.Misconfigured as error:
      lines += [f'{name}: {line}' for line in str(error).splitlines()]
  command_line.refuse(lines)


def _is_left(folder: pathlib.Path, *, runs_too: bool = False) -> bool:
  """Returns whether a run is still to be started.

  Args:
    folder: the folder of the run.
    runs_too: whether one that runs now counts, too.
  """
  try:
    state = run_state.read(folder).state
  except run_state.NoRun:
    return True
  if state != run_state.RUNNING or runs_too:
    return state != run_state.FINISHED
  # A killed process counts as running for two minutes, in which its heartbeat
  # is new. But `train` takes over at once where it can see that it is gone.
  held = lock.holder(folder)
  return held is not None and held[1] is False


def _table(out: pathlib.Path, runs: Mapping[str, Any]) -> list[str]:
  """Returns the lines that tell the state of each run."""
  states, waiting = [], []
  for name in runs:
    try:
      states.append(run_state.read(out / name))
    except run_state.NoRun:
      waiting.append(name)
  lines = run_state.table(states) if states else []
  return lines + ([f'not started: {", ".join(waiting)}'] if waiting else [])


def _run_here(
  out: pathlib.Path,
  left: Mapping[str, list[str]],
  jobs: int,
  runs: Mapping[str, Any],
) -> int:
  """Runs on this machine, each run on cores of its own; returns the exit code.

  Args:
    out: the folder of the sweep.
    left: name to flags of the runs to start.
    jobs: how many there are at once.
    runs: all runs, for the table at the end.
  """
  script = launchers.ROOT / 'launch' / 'run.sh'  # it writes a log of each run
  exit_code = parallel_runs.run(
    {name: [script, *flags] for name, flags in left.items()},
    jobs=jobs,
    # Many runs differ in numbers only, and then their programs are the same.
    compiled=out / f'.{run_folder.COMPILED}',
  )
  print('\n'.join(_table(out, runs)), flush=True)
  return exit_code or _unfinished(out, runs)


def _unfinished(out: pathlib.Path, runs: Iterable[str]) -> int:
  """Returns 0 if all runs of the sweep are finished, otherwise 75."""
  return 75 if any(_is_left(out / run, runs_too=True) for run in runs) else 0


def _stop(out: pathlib.Path) -> int:
  """Ends the sweep that runs in a folder on this machine."""
  found = lock.holder(out)
  if found is None:
    print(f'{out}: no sweep runs here')
    return 0
  holder, is_alive = found
  if not is_alive:
    raise exits.Misconfigured(
      f'{out}: {holder} is not a process of this machine'
    )
  os.kill(holder.pid, signal.SIGTERM)
  print(f'{out}: {holder} saves its runs and ends')
  return 0


def _array(
  out: pathlib.Path,
  left: Mapping[str, list[str]],
  jobs: str,
  extra: Sequence[str],
) -> int:
  """Submits runs as an array of Slurm; returns the exit code.

  Raises:
    UsageError: runs of this sweep wait in the queue.
  """
  first = next(iter(left.values()))
  name = rendering.name_of(str(out))
  is_submitted = not {'--dry_run', '--stop'}.intersection(extra)
  if is_submitted and shutil.which('squeue') is not None:
    queue = ['squeue', '--noheader', f'--name={name}', '--states=PENDING']
    waiting = subprocess.run(queue, capture_output=True, text=True, check=False)
    if waiting.stdout.strip():
      raise exits.Misconfigured(
        f'--out={out}: runs of this sweep wait in the queue of Slurm; let them '
        'start, or take them out of it with --stop'
      )
  # The array is one job; its flags are checked as those of its first run.
  command = ['slurm', *first, f'--name={name}', *extra]
  return submit.main(command, array=(list(left.values()), jobs))


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
