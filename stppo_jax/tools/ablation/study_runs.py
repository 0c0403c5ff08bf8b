"""Makes the missing runs of a study, and compares all its runs."""

from collections.abc import Sequence
import dataclasses
import hashlib
import os
import pathlib
import shlex
import sys
import time

from stppo_jax import exits
from stppo_jax.tools import run_state
from stppo_jax.tools.ablation import parallel_runs
from stppo_jax.tools.ablation import plan as plan_lib
from stppo_jax.tools.ablation import results
from stppo_jax.tools.ablation import study as study_lib
from stppo_jax.tools.ablation import verdict
from stppo_jax.tools.report import report
from stppo_jax.workdir import lock
from stppo_jax.workdir import run_folder

Commands = dict[str, list[str] | parallel_runs.Orphan]


def make(plan: plan_lib.Plan, *, is_dry: bool, trains: bool = True) -> int:
  """Makes the missing runs of a study and compares all its runs.

  Args:
    plan: the study, and the runs to make.
    is_dry: whether to print the commands of the runs and do nothing else.
    trains: whether to make the missing runs. If not, only the finished runs
      are compared.

  Returns:
    The exit code, see the command `ablate`.

  Raises:
    Misconfigured: a table is damaged or does not fit the study.
    Locked: another process is already making this study.
  """
  runs = results.read(plan.table)
  results.check(runs, plan.digests, plan.table)
  copied = _copied(plan, runs)
  runs += copied
  if is_dry:
    commands = _start_commands(plan, runs) | _run_commands(plan, runs)
    for words in commands.values():
      if not isinstance(words, parallel_runs.Orphan):
        print(shlex.join(['python', *words[1:]]))
    return 0
  # With `is_dry` no lock is taken, so that commands can also be printed while
  # another process makes the study.
  with lock.held(plan.folder):
    _record(plan)
    if copied:
      runs = results.add(plan.table, copied, plan.digests)
    return _carry_out(plan, runs, trains=trains)


def flags_of_missing(plan: plan_lib.Plan) -> dict[str, list[str]]:
  """Returns the flags of `train` for each missing run, by the run's name.

  The flags have no workdir. If several missing runs are equal, the result has
  the flags of the first of these runs only.

  Raises:
    Misconfigured: a table is damaged.
  """
  runs = results.read(plan.table)
  found: dict[tuple[str, int], tuple[str, list[str]]] = {}
  for arm, seed in _missing(plan, [*runs, *_copied(plan, runs)]):
    flags = [*plan.train_flags(arm), f'--config.seed={seed}']
    equal = plan.digests[arm.key], seed
    found.setdefault(equal, (arm.run_name(seed), flags))
  return dict(found.values())


def _copied(
  plan: plan_lib.Plan, runs: Sequence[results.Run]
) -> list[results.Run]:
  """Returns the missing runs that can be copied from equal finished runs.

  Args:
    plan: the plan, which names the tables of other studies.
    runs: the finished runs of this study.
  """
  others = [run for path in plan.reuse for run in results.read(path)]
  # Runs are equal if their settings and seeds are equal, whatever their names.
  # Equal arms of two groups, or of two studies, share one run.
  found = {(run.settings, run.seed): run for run in [*others, *runs]}
  return [
    dataclasses.replace(
      found[plan.digests[arm.key], seed], group=arm.group, arm=arm.name
    )
    for arm, seed in _missing(plan, runs)
    if (plan.digests[arm.key], seed) in found
  ]


def _record(plan: plan_lib.Plan) -> None:
  """Records in the study's folder which study `ablate` makes in the folder."""
  digest = hashlib.sha256(plan.study.name.encode()).hexdigest()
  run_folder.mark(plan.folder, 'ablate', digest)
  plan.record()


def _missing(plan: plan_lib.Plan, runs) -> list[tuple[study_lib.Arm, int]]:
  """Returns (arm, seed) of each missing run, sorted by seed, then by arm."""
  done = {(run.key, run.seed) for run in runs}
  return [
    (arm, seed)
    for seed in plan.seeds
    for arm in plan.study.arms
    if (arm.key, seed) not in done
  ]


def _state(folder: pathlib.Path) -> str:
  """Returns the state of the run in a folder, or '' if it contains no run."""
  try:
    return run_state.read(folder).state
  except run_state.NoRun:
    return ''


def _start_commands(plan: plan_lib.Plan, runs) -> Commands:
  """Returns the commands that make or resume the missing supervised starts."""
  commands: Commands = {}
  for start in dict.fromkeys(arm.start for arm, _ in _missing(plan, runs)):
    folder = plan.start_folder(start)
    if start and (state := _state(folder)) != run_state.FINISHED:
      flags = plan.start_flags(start)
      _add(commands, _command('sft', flags, folder), folder, state)
  return commands


def _run_commands(plan: plan_lib.Plan, runs) -> Commands:
  """Returns the commands that make or resume the missing runs.

  Of equal runs, only the first run is made. `_copied` copies its results for
  the other runs.
  """
  commands: Commands = {}
  begun: set[tuple[str, int]] = set()
  for arm, seed in _missing(plan, runs):
    folder = plan.run_folder(arm, seed)
    state, equal = _state(folder), (plan.digests[arm.key], seed)
    # A finished run is not made again. It is missing because its metrics are
    # damaged, or because no `ablate` has added it to the table yet.
    if state == run_state.FINISHED or equal in begun:
      continue
    begun.add(equal)
    path = plan.start_folder(arm.start) / 'policy'
    flags = [*plan.train_flags(arm, str(path)), f'--config.seed={seed}']
    _add(commands, _command('train', flags, folder), folder, state)
  return commands


def _add(
  commands: Commands, words: list[str], folder: pathlib.Path, state: str
) -> None:
  """Adds a run to `commands`: its command, or the process that makes it now.

  Nothing is added if a process of another host is making the run.
  """
  orphan = parallel_runs.Orphan.find(folder)
  if orphan or state != run_state.RUNNING:
    commands[folder.name] = orphan or words


def _command(
  name: str, flags: Sequence[str], folder: pathlib.Path
) -> list[str]:
  # The variable PYTHON names the interpreter, as in launch/run.sh.
  python = os.environ.get('PYTHON', sys.executable)
  words = [python, '-m', 'stppo_jax', name, *flags]
  return [*words, f'--workdir={folder}']


def _carry_out(
  plan: plan_lib.Plan, runs: list[results.Run], *, trains: bool
) -> int:
  """Makes the missing runs, compares all runs, and returns the exit code.

  Args:
    plan: the study, and the runs to make.
    runs: the runs of the table. This function adds the new runs to the list.
    trains: whether to make the missing runs.
  """
  damaged: dict[str, str] = {}  # a run's name to the error of reading it
  made: set[str] = set()

  def gather(*_) -> None:
    """Adds to the table the finished runs that the table does not have yet."""
    found = []
    for arm, seed in _missing(plan, runs):
      folder = plan.run_folder(arm, seed)
      if _state(folder) == run_state.FINISHED:
        try:
          run = results.from_folder(
            folder, arm.key, seed, plan.digests[arm.key]
          )
        except exits.Misconfigured as error:
          damaged[arm.run_name(seed)] = str(error)
        else:
          found.append(run)
          made.add(folder.name)
    if found:
      found += _copied(plan, [*runs, *found])
      runs[:] = results.add(plan.table, found, plan.digests)

  # Runs may have finished while no `ablate` watched: a user started them, or
  # the `ablate` that started them was killed. Such runs are compared, but they
  # are not counted among the runs that this call makes.
  gather()
  made.clear()
  exit_code, start = 0, time.monotonic()
  # The runs train from the policies of the starts. So their commands are listed
  # after the starts have ended, and are not run if a start failed.
  for make in (_start_commands, _run_commands):
    commands = make(plan, runs) if trains else {}
    if commands and not exit_code:
      exit_code = parallel_runs.run(
        commands, jobs=plan.jobs, logs=plan.folder, on_end=gather
      )
  gather()
  if made:
    minutes = (time.monotonic() - start) / 60
    print(
      f'runs made: {len(made)} in {minutes:.0f} minutes, {plan.jobs} at once'
    )
  names = [arm.run_name(seed) for arm, seed in _missing(plan, runs)]
  _report(plan, runs, draws=not names)
  if going := [name for name in names if name not in damaged]:
    print(f'not finished: {", ".join(going)}', file=sys.stderr)
    exit_code = exit_code or exits.TRY_AGAIN
  if wrong := [damaged[name] for name in names if name in damaged]:
    print('\n'.join(wrong), file=sys.stderr)
  return exit_code or (exits.USAGE if wrong else 0)


def _report(
  plan: plan_lib.Plan, runs: Sequence[results.Run], *, draws: bool
) -> None:
  """Prints and writes the tables of the finished runs.

  Args:
    plan: the study and its folder.
    runs: the finished runs.
    draws: whether to also make the figures and the HTML report of the runs.
      Making them takes time, so the caller asks for them only if no run is
      missing.
  """
  if not runs:
    print('no run has finished yet')
    return
  study = plan.whole
  shown = verdict.tables(study, runs)
  tables = shown | verdict.alarms(runs)
  print(verdict.as_text(tables))
  text = plan.folder / f'{study.name}.md'
  text.write_text(
    f'# {study.title}\n\n{verdict.as_markdown(tables)}', encoding='utf-8'
  )
  written = [plan.table, text]
  if draws:
    from stppo_jax.tools.ablation import figures

    written.append(plan.folder / 'figures')
    figures.draw(study, runs, written[-1])
    # Runs that were copied from other tables have no folder in this study.
    folders = [
      str(folder)
      for arm in study.arms
      for run in runs
      if run.key == arm.key
      and (folder := plan.run_folder(arm, run.seed)).is_dir()
    ]
    if folders:
      written.append(plan.folder / 'report.html')
      for loss in report.write(written[-1], folders, tables=shown):
        print(loss, file=sys.stderr)
  print(f'\nwritten: {", ".join(map(str, written))}')
