"""Turns the flags of `ablate` into the plan of a study."""

from collections.abc import Sequence
import dataclasses
import os
import pathlib
from typing import Any

from stppo_jax import exits
from stppo_jax import settings
from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import config_file
from stppo_jax.commands.flags import configuration
from stppo_jax.tools.ablation import plan as plan_lib
from stppo_jax.tools.ablation import study as study_lib
from stppo_jax.workdir import run_folder


def parse(
  argv: Sequence[str], *, ignored: Sequence[Any] = ()
) -> tuple[plan_lib.Plan, bool]:
  """Returns the plan of a command line, and whether it asks for a dry run.

  Args:
    argv: the arguments without the program's and the command's name.
    ignored: the checks of configs that are left out, see `schema.check`.

  Raises:
    Misconfigured: if the flags, the study or the configs have errors; the
      message has a line for each error.
  """
  flags = command_line.flags(
    dry_run=False,
    config='',
    workdir='',
    seeds='',
    table='',
    groups=[],
    reuse=[],
    jobs=command_line.integer(len(os.sched_getaffinity(0)), lower_bound=1),
  )
  given = command_line.parse(
    flags, argv, required=('config', 'workdir'), overrides=True
  )
  command_line.refuse(given.errors)
  file, _, name = flags.config.partition(':')
  try:
    whole = _study(config_file.call(file, 'studies'), name)
    study = whole.of_groups(flags.groups) if flags.groups else whole
  except ValueError as error:
    line = f'--config={flags["config"].value}: {error}'
    raise exits.Misconfigured(line) from error
  folder, errors = pathlib.Path(flags.workdir), []
  plan = plan_lib.Plan(
    study=study,
    whole=whole,
    folder=folder,
    table=pathlib.Path(flags.table or folder / f'{study.name}.csv'),
    reuse=[pathlib.Path(name) for name in flags.reuse],
    seeds=_seeds(flags.seeds or str(study.seeds), errors),
    jobs=flags.jobs,
    flags=[f'--config.{key}={x}' for key, x in given.overrides.items()],
    file=file,
    digests={},
  )
  errors += [
    f'--reuse={path}: no such file' for path in plan.reuse if not path.is_file()
  ]
  if whole.starts and 'model.path' in given.overrides:
    errors.append(
      f'--config.model.path={given.overrides["model.path"]}: not allowed, '
      f'because study {whole.name} names the starts of its runs; edit the study'
    )
  # The folder may hold these runs although `ablate` has not written to it: the
  # user may have run the commands of a dry run by hand.
  runs = [arm.run_name(seed) for arm in whole.arms for seed in plan.seeds]
  runs += [plan.start_folder(start).name for start in whole.starts]
  errors += run_folder.problems(
    folder, flag='--workdir', command='ablate', reads={}, expected=runs
  )
  # `broken` maps each error line to the labels of the arms with this error.
  digests, broken = {}, {}
  for arm in whole.arms:
    try:
      # The flags lack the path of the run's start, because the start may not
      # have been made yet.
      config = configuration.parse(plan.train_flags(arm), ignored=ignored)
    except exits.Misconfigured as error:
      label = ' '.join(part for part in arm.key if part)
      for line in str(error).splitlines():
        broken.setdefault(line, []).append(label)
    else:
      digests[arm.key] = plan_lib.digest(plan, arm, config)
  for line, arms in broken.items():
    # An error that all arms have comes from the flags or the file, so it is
    # reported without the names of the arms.
    of_all = len(arms) == len(whole.arms)
    errors.append(line if of_all else f'{", ".join(arms)}: {line}')
  plan = dataclasses.replace(plan, digests=digests)
  command_line.refuse(errors or plan_lib.other_study(plan))
  return plan, flags.dry_run


def _study(studies: Any, name: str) -> study_lib.Study:
  """Returns a study of a config file, by default its first.

  Raises:
    ValueError: if there is no study of that name, or no study at all; the
      message is one line.
  """
  if not isinstance(studies, dict) or not studies:
    raise ValueError('studies() must return a dict of studies')
  name = name or next(iter(studies))
  if name not in studies:
    choices = settings.closest(name, list(studies))
    raise ValueError(f'unknown study {name!r}{choices}')
  return study_lib.parse(name, studies[name])


def _seeds(text: str, errors: list[str]) -> list[int]:
  """Returns the seeds of --seeds; appends to `errors` if --seeds is wrong."""
  words = text.rstrip(',').split(',')
  is_none = text.isdecimal() and not int(text)
  if is_none or not all(word.isdecimal() for word in words):
    errors.append(
      f'--seeds={text}: must be the number of seeds, such as 3, or the seeds, '
      'such as 0,1,2'
    )
    return []
  if ',' not in text:
    return list(range(int(text)))
  return list(dict.fromkeys(map(int, words)))
