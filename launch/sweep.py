"""Run a grid of configs: here, as a Slurm array, on a cluster, or on slices.

python -m launch.sweep --config=FILE.py --out=DIR [--on=LAUNCHER] [--jobs=N]
    [--OPTION=VALUE ...] [--config.KEY=VALUE ...]
    [--dry_run | --status | --stop]

  --config=FILE.py    a config file with a function sweep(), which returns a
                      dict of lists: the names of algorithms under 'algorithm',
                      and the values of any config key under its name
  --out=DIR           the folder of the sweep; each run has a folder in it
  --on=LAUNCHER       local, the default; slurm (an array); jobset; or tpu, on
                      slices, with --out in a bucket
  --jobs=N            how many runs there are at once, here or in the array
  --OPTION=VALUE      an option of the launcher, see launch/README.md
  --config.KEY=VALUE  sets a key of all configs
  --dry_run           prints what would be run
  --status            prints the state of each run
  --stop              ends the runs; they save, and the same command resumes

The same command goes on: finished runs are not repeated, interrupted ones are
resumed, and those that still run are left alone.

With tpu, all slices together spend one budget (--max_slices, --max_hours,
--max_cost).

With local and tpu, the exit code is 0 once all runs are finished; 75 if they
were stopped, or if runs of an earlier sweep still run; 130 after Ctrl-C; and
otherwise the largest one of the runs. With the others it is that of the
submission.
"""

from collections.abc import Iterable, Mapping, Sequence
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

from launch import budget
from launch import cloud
from launch import launchers
from launch import rendering
from launch import submit
from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import config_file
from stppo_jax.commands.flags import configuration
from stppo_jax.tools import run_state
from stppo_jax.tools.ablation import parallel_runs
from stppo_jax.workdir import lock
from stppo_jax.workdir import run_folder

LAUNCHERS = ('local', 'slurm', 'jobset', 'tpu')
_SCRIPT = launchers.ROOT / 'launch' / 'run.sh'  # also writes the log of a run


def main(argv: Sequence[str]) -> int:
  """Makes the runs of a sweep that are left; returns the exit code."""
  return command_line.program(_main, argv, __doc__)


def _main(argv: Sequence[str]) -> int:
  flags, given = parsed(argv, required=('config', 'out'))
  more = rendering.flags_of(given.overrides)
  runs = {name: [*own, *more] for name, own in grid(flags.config).items()}
  _check(runs, submit.unchecked(flags.on, is_dry=flags.dry_run))
  return carry_out(flags, flags.out, runs)


def parsed(
  argv: Sequence[str], *, required: Sequence[str], **more: Any
) -> tuple[absl_flags.FlagValues, command_line.Given]:
  """Returns the flags of a sweep or a study, with the options of its launcher.

  Args:
    argv: the command line.
    required: the names of the flags that must be given.
    **more: definitions of further flags.

  Returns:
    The flags, and the keys of the config that the command line sets.

  Raises:
    Misconfigured: if flags are wrong; the message has a line for each error.
  """

  def define(options: dict[str, Any]) -> absl_flags.FlagValues:
    return command_line.flags(
      **{'config': '', 'out': ''}
      | more
      | options
      | {
        'on': command_line.one_of(LAUNCHERS, LAUNCHERS[0]),
        'jobs': command_line.integer(1, lower_bound=1),
        'dry_run': False,
        'status': False,
        'stop': False,
      }
    )

  # Which other flags exist depends on the launcher.
  first = define({})
  command_line.parse(first, argv, overrides=True)
  flags = define(_options(first.on))
  needed = [key for key in _options(first.on) if flags[key].default is None]
  given = command_line.parse(
    flags, argv, required=[*required, *needed], overrides=True
  )
  command_line.refuse(given.errors)
  return flags, given


def _options(launcher: str) -> dict[str, Any]:
  if launcher == 'local':
    return {}
  options = dict(launchers.LAUNCHERS[launcher].options)
  # A sweep lacks these options: each run has a name of its own, and all runs
  # spend one budget.
  for key in ('command', 'name', 'reap', 'budget'):
    options.pop(key, None)
  return options


def carry_out(
  flags: absl_flags.FlagValues, out: str, runs: Mapping[str, list[str]]
) -> int:
  """Starts the runs that are left, or shows or ends the runs.

  Args:
    flags: see `parsed`.
    out: the folder of all runs, or its address in a bucket.
    runs: the flags of each run without its workdir, by name.

  Returns:
    The exit code.

  Raises:
    Misconfigured: if runs cannot be submitted or ended; the message is one
      line.
    BucketError: if the bucket cannot be read.
  """
  out, launcher = out.rstrip('/'), flags.on
  in_bucket = buckets.is_address(out)
  places = {'tpu': 'gs://BUCKET/FOLDER', 'local': 'a folder of this machine'}
  if launcher in places and in_bucket == (launcher == 'local'):
    raise exits.Misconfigured(
      f'--out={out}: must be {places[launcher]} with --on={launcher}'
    )
  if launcher == 'tpu' and not (flags.dry_run or flags.status):
    submit.require('gcloud')
  if in_bucket and not flags.dry_run:
    # If the bucket cannot be reached, this fails once. Otherwise every run
    # would wait for the network.
    buckets.Bucket(out).entries()
  runs = {name: [*own, f'--workdir={out}/{name}'] for name, own in runs.items()}
  if flags.status:
    print('\n'.join(_table(out, runs)))
    return 0
  if flags.stop and launcher == 'local':
    return _stop(pathlib.Path(out))
  # Runs in progress are included if they are to be stopped, and with tpu,
  # because their slices are to be followed.
  runs_too = flags.stop or launcher == 'tpu'
  left = {
    name: own
    for name, own in runs.items()
    # A dry run reads no bucket, so that it needs no account.
    if (in_bucket and flags.dry_run)
    or _is_left(f'{out}/{name}', runs_too=runs_too)
  }
  if not left:
    print(f'nothing is left to {"stop" if flags.stop else "start"}')
    print('\n'.join(_table(out, runs)))
    return 0 if flags.stop or launcher != 'local' else _unfinished(out, runs)
  extra = [
    f'--{key}={flags[key].value}'
    for key in _options(launcher)
    if flags[key].present
  ]
  extra += [f'--{name}' for name in ('dry_run', 'stop') if flags[name].value]
  if launcher == 'slurm':
    return _array(out, left, str(flags.jobs), extra)
  if launcher == 'local' and flags.dry_run:
    for own in left.values():
      print(shlex.join([os.path.relpath(_SCRIPT), *own]))
    return 0
  if launcher == 'tpu' and not flags.dry_run:
    # The programs that follow the runs read this marker. After a stop, they
    # must not begin other runs in place of the runs that end.
    cloud.write(budget.stopped(out), b'stopped' if flags.stop else b'')
  if launcher == 'jobset' or flags.dry_run or flags.stop:
    worst = 0
    for own in left.values():
      worst = max(worst, submit.main([launcher, *own, *extra]))
      if worst == exits.USAGE:
        break  # the other runs have the same options, and would be refused too
    return worst
  if launcher == 'tpu':
    exit_code = _follow(out, left, flags.jobs, extra)
  else:
    with lock.held(pathlib.Path(out)):
      exit_code = parallel_runs.run(
        {name: [_SCRIPT, *own] for name, own in left.items()},
        jobs=flags.jobs,
        # Runs that differ only in numbers have the same compiled programs.
        compiled=pathlib.Path(out, f'.{run_folder.COMPILED}'),
      )
  print('\n'.join(_table(out, runs)), flush=True)
  return exit_code or (_unfinished(out, runs) if launcher == 'local' else 0)


def _follow(
  out: str, left: Mapping[str, list[str]], jobs: int, extra: Sequence[str]
) -> int:
  """Runs on slices of Cloud TPU, each followed by a process of its own.

  Args:
    out: the address of the runs, which spend one budget.
    left: the flags of the runs to start or to follow, by name.
    jobs: the largest number of slices at a time.
    extra: options of the launcher.

  Returns:
    The exit code.
  """
  logs = pathlib.Path(f'{rendering.name_of(out)}.logs').absolute()
  logs.mkdir(exist_ok=True)
  print(f'logs: {logs}', flush=True)
  submit_words = [sys.executable, '-u', '-m', 'launch.submit', 'tpu']
  return parallel_runs.run(
    {
      name: [*submit_words, *own, f'--budget={out}', *extra]
      for name, own in left.items()
    },
    jobs=jobs,
    logs=logs,
  )


def grid(file: str) -> dict[str, list[str]]:
  """Returns the flags of each run of a config file's sweep, by name.

  Raises:
    Misconfigured: if the file has no function sweep(), if the function does not
      return a dict of lists, or if two runs would have the same name.
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
    algorithm = chosen.pop('algorithm', '')
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
  """Returns the text that a key and its value add to the name of a run."""
  key, value = item
  return re.sub(r'[^\w.]+', '_', f'{key.rpartition(".")[2]}{value}', flags=re.A)


def _check(runs: Mapping[str, list[str]], ignored: Sequence[Any]) -> None:
  """Raises `Misconfigured` unless the configs of all runs are valid.

  Args:
    runs: the flags of each run, by name.
    ignored: the checks that are left out, see `submit.unchecked`.
  """
  named: dict[str, list[str]] = {}  # error -> the runs that have the error
  for name, flags in runs.items():
    try:
      configuration.parse(flags, ignored=ignored)
    except exits.Misconfigured as error:
      for line in str(error).splitlines():
        named.setdefault(line, []).append(name)
  command_line.refuse(
    [
      f'{"all runs" if len(names) == len(runs) else ", ".join(names)}: {line}'
      for line, names in named.items()
    ]
  )


def _is_left(folder: str, *, runs_too: bool = False) -> bool:
  """Returns whether a run is still to be started.

  Args:
    folder: the folder of the run.
    runs_too: whether a run in progress counts as a run to be started.
  """
  try:
    state = run_state.read(folder).state
  except run_state.NoRun:
    return True
  if state != run_state.RUNNING or runs_too:
    return state != run_state.FINISHED
  # A killed process counts as running for two minutes, in which its heartbeat
  # is new. But `train` takes over at once if it can see that the process is
  # gone.
  held = lock.holder(pathlib.Path(folder))
  return held is not None and held[1] is False


def _table(out: str | pathlib.Path, runs: Mapping[str, Any]) -> list[str]:
  """Returns the lines that tell the state of each run."""
  states, waiting = [], []
  for name in runs:
    try:
      states.append(run_state.read(f'{out}/{name}'))
    except run_state.NoRun:
      waiting.append(name)
  lines = run_state.table(states) if states else []
  return lines + ([f'not started: {", ".join(waiting)}'] if waiting else [])


def _unfinished(out: str | pathlib.Path, runs: Iterable[str]) -> int:
  """Returns 0 if all runs of the sweep are finished, otherwise 75."""
  left = any(_is_left(f'{out}/{run}', runs_too=True) for run in runs)
  return exits.TRY_AGAIN if left else 0


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
  out: str,
  left: Mapping[str, list[str]],
  jobs: str,
  extra: Sequence[str],
) -> int:
  """Submits runs as an array of Slurm; returns the exit code.

  Raises:
    Misconfigured: if runs of this sweep wait in the queue.
  """
  first = next(iter(left.values()))
  name = rendering.name_of(out)
  is_submitted = not {'--dry_run', '--stop'}.intersection(extra)
  if is_submitted and shutil.which('squeue') is not None:
    queue = ['squeue', '--noheader', f'--name={name}', '--states=PENDING']
    waiting = subprocess.run(queue, capture_output=True, text=True, check=False)
    if waiting.stdout.strip():
      raise exits.Misconfigured(
        f'--out={out}: runs of this sweep wait in the queue of Slurm; let them '
        'start, or take them out of it with --stop'
      )
  # The array is one job, for which `submit` checks the flags of the first run.
  # The configs of all runs have been checked before.
  command = ['slurm', *first, f'--name={name}', *extra]
  return submit.main(command, array=(list(left.values()), jobs))


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
