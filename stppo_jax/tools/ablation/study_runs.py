"""Makes the runs of a study that are missing, and compares all of them."""

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
  """Trains what a study lacks and compares its runs.

  Args:
    plan: what is to be made.
    is_dry: whether the commands are only printed.
    trains: whether runs are made here; otherwise those that have finished are
      compared.

  Returns:
    The exit code, see the command `ablate`.

  Raises:
    Misconfigured: a table cannot be used.
    Locked: another process makes this study.
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
  # A dry run takes no lock, so that it can be asked for while the study is
  # made.
  with lock.held(plan.folder):
    _record(plan)
    if copied:
      runs = results.add(plan.table, copied, plan.digests)
    return _carry_out(plan, runs, trains=trains)


def flags_of_missing(plan: plan_lib.Plan) -> dict[str, list[str]]:
  """Returns the flags of `train`, but the workdir, for each missing run.

  Of equal runs, only the first one is there.

  Raises:
    Misconfigured: a table cannot be used.
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
  """Returns copies of finished runs for missing ones that would equal them.

  Args:
    plan: names the tables of other studies.
    runs: the finished runs of this study.
  """
  others = [run for path in plan.reuse for run in results.read(path)]
  # A run is known by what it computes and its seed, not by its name: equal arms
  # of two groups, or of two studies, share one run.
  found = {(run.settings, run.seed): run for run in [*others, *runs]}
  return [
    dataclasses.replace(
      found[plan.digests[arm.key], seed], group=arm.group, arm=arm.name
    )
    for arm, seed in _missing(plan, runs)
    if (plan.digests[arm.key], seed) in found
  ]


def _record(plan: plan_lib.Plan) -> None:
  """Records in the folder which command and which study it belongs to."""
  digest = hashlib.sha256(plan.study.name.encode()).hexdigest()
  run_folder.mark(plan.folder, 'ablate', digest)
  plan.record()


def _missing(plan: plan_lib.Plan, runs) -> list[tuple[study_lib.Arm, int]]:
  """Returns the missing runs, all arms of a seed before the next seed."""
  done = {(run.key, run.seed) for run in runs}
  return [
    (arm, seed)
    for seed in plan.seeds
    for arm in plan.study.arms
    if (arm.key, seed) not in done
  ]


def _state(folder: pathlib.Path) -> str:
  """Returns the state of the run of a folder; '' if there is none."""
  try:
    return run_state.read(folder).state
  except run_state.NoRun:
    return ''


def _start_commands(plan: plan_lib.Plan, runs) -> Commands:
  """Returns the commands of the supervised starts that are to be made."""
  commands: Commands = {}
  for start in dict.fromkeys(arm.start for arm, _ in _missing(plan, runs)):
    folder = plan.start_folder(start)
    if start and (state := _state(folder)) != run_state.FINISHED:
      flags = plan.start_flags(start)
      _add(commands, _command('sft', flags, folder), folder, state)
  return commands


def _run_commands(plan: plan_lib.Plan, runs) -> Commands:
  """Returns the commands of the runs that are to be made or to go on.

  Of equal runs, only the first one is made; `_copied` has the others.
  """
  commands: Commands = {}
  begun: set[tuple[str, int]] = set()
  for arm, seed in _missing(plan, runs):
    folder = plan.run_folder(arm, seed)
    state, equal = _state(folder), (plan.digests[arm.key], seed)
    # If it has finished, it is missing because it is damaged.
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
  """Adds the command of a run, or the run if a process here still makes it."""
  orphan = parallel_runs.Orphan.find(folder)
  if orphan or state != run_state.RUNNING:
    commands[folder.name] = orphan or words


def _command(
  name: str, flags: Sequence[str], folder: pathlib.Path
) -> list[str]:
  # As in launch/run.sh, PYTHON names the interpreter.
  python = os.environ.get('PYTHON', sys.executable)
  words = [python, '-m', 'stppo_jax', name, *flags]
  return [*words, f'--workdir={folder}']


def _carry_out(
  plan: plan_lib.Plan, runs: list[results.Run], *, trains: bool
) -> int:
  """Makes the runs that are missing and compares all; returns the exit code.

  Args:
    plan: what is to be done.
    runs: the runs of the table; new ones are added.
    trains: whether runs are made.
  """
  damaged: dict[str, str] = {}  # the name of a run -> what is wrong with it
  made: set[str] = set()

  def gather(*_) -> None:
    """Adds the runs that have finished to the table."""
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

  # Runs may have finished while no `ablate` watched: by hand, or as orphans of
  # a command that was killed. They count, but were not made now.
  gather()
  made.clear()
  exit_code, start = 0, time.monotonic()
  # The runs are listed only after the starts, from whose policies they train;
  # if a start failed, they are not begun.
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
    plan: what was to be done.
    runs: the finished runs.
    draws: whether to make figures and a page, too; after Ctrl-C nobody wants
      to wait for them.
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
    # Runs of other tables have no folder here.
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
