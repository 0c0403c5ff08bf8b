"""The flags of `ablate`: a study of a config file, and what is made of it."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

from stppo_jax import settings
from stppo_jax.commands.flags import config_file
from stppo_jax.commands.flags import configuration
from stppo_jax.configs import base
from stppo_jax.tools.ablation import study as study_lib
from stppo_jax.workdir import run_folder

_FLAGS = ('config', 'workdir', 'seeds', 'groups', 'jobs', 'table', 'reuse')
# They change nothing that a run computes, or differ between seeds or machines.
_NOT_COMPARED = (
  'seed',
  'title',
  'writer',
  'checkpoint',
  'alarms',
  'profile',
  'mesh',
  'updates.max_skipped',
  'updates.core_lengths',
)
# Of a path, only the name is the same on another machine.
_PATHS = ('model.path', 'env.prompt_template')
_RECORD = 'study.json'


@dataclasses.dataclass(frozen=True)
class Plan:
  """The work that a command line asks for.

  Attributes:
    study: the study, with the chosen groups.
    whole: the study with all groups.
    folder: the folder of the study.
    table: the table of all runs.
    reuse: tables of other studies, from which runs are taken.
    seeds: the seeds that are wanted.
    jobs: the number of runs at once.
    flags: the flags of all runs: overrides of the command line.
    file: the config file.
    digests: the key of each arm to the digest of its config.
    is_dry: whether nothing is to be run.
  """

  study: study_lib.Study
  whole: study_lib.Study
  folder: pathlib.Path
  table: pathlib.Path
  reuse: Sequence[pathlib.Path]
  seeds: Sequence[int]
  jobs: int
  flags: Sequence[str]
  file: str
  digests: Mapping[tuple[str, str], str]
  is_dry: bool

  def train_flags(self, arm: study_lib.Arm, path: str = '') -> list[str]:
    """Returns the flags of the runs of an arm, but seed and workdir.

    Args:
      arm: the arm.
      path: the policy that it trains from, if it has a start.
    """
    changes = dict(arm.changes)
    if arm.start:
      changes['model.path'] = path
    return self._flags(arm.algorithm, changes)

  def run_folder(self, arm: study_lib.Arm, seed: int) -> pathlib.Path:
    """Returns the folder of a run."""
    return self.folder / arm.run_name(seed)

  def start_folder(self, start: str) -> pathlib.Path:
    """Returns the folder of a supervised start."""
    return self.folder / f'start-{study_lib.file_name(start)}'

  def start_flags(self, start: str) -> list[str]:
    """Returns the flags of `sft` for a supervised start, but the workdir."""
    # The algorithm decides nothing there, but must be one of the config.
    algorithm = next(x.algorithm for x in self.whole.arms if x.start == start)
    return self._flags(
      algorithm, {'model.path': '', **self.whole.starts[start]}
    )

  def _flags(self, algorithm: str, changes: Mapping[str, Any]) -> list[str]:
    """Returns flags of a config; those of the command line come last."""
    own = [f'--config.{key}={value}' for key, value in changes.items()]
    return [f'--config={self.file}:{algorithm}', *own, *self.flags]

  def record(self) -> None:
    """Records in the folder which study it holds."""
    content = {'study': self.study.name, 'settings': _labelled(self.digests)}
    text = json.dumps(content, indent=2) + '\n'
    (self.folder / _RECORD).write_text(text, encoding='utf-8')


def parse(argv: Sequence[str]) -> Plan:
  """Returns the work that a command line asks for.

  Raises:
    ConfigurationError: every error of flags, study and configs.
  """
  given = configuration.split(
    argv, _FLAGS, switches=('dry_run',), overrides=True
  )
  values, errors = given.values, list(given.errors)
  errors += [
    f'--{name}: missing'
    for name in ('config', 'workdir')
    if not values.get(name) and name not in given.meant
  ]
  if errors:
    raise configuration.ConfigurationError(errors)
  file, _, name = values['config'].partition(':')
  try:
    whole = _study(config_file.load_studies(file), name)
    study = whole
    if 'groups' in values:
      study = whole.of_groups(values['groups'].split(','))
  except ValueError as error:
    raise configuration.ConfigurationError(
      [f'--config={values["config"]}: {error}']
    ) from error
  folder = pathlib.Path(values['workdir'])
  plan = Plan(
    study=study,
    whole=whole,
    folder=folder,
    table=pathlib.Path(values.get('table', folder / f'{study.name}.csv')),
    reuse=_tables(values.get('reuse', ''), errors),
    seeds=_seeds(values.get('seeds', str(study.seeds)), errors),
    jobs=_jobs(values.get('jobs', ''), errors),
    flags=_flags_of(given.overrides),
    file=file,
    digests={},
    is_dry='dry_run' in given.switches,
  )
  errors += run_folder.problems(
    folder, flag='--workdir', command='ablate', reads={}
  )
  digests = {}
  for arm in whole.arms:
    try:
      digests[arm.key] = _digest(plan, arm)
    except configuration.ConfigurationError as error:
      label = ' '.join(part for part in arm.key if part)
      errors += [f'{label}: {line}' for line in error.lines]
  plan = dataclasses.replace(plan, digests=digests)
  errors = errors or _other_study(plan)
  if errors:
    raise configuration.ConfigurationError(errors)
  return plan


def _study(studies: Any, name: str) -> study_lib.Study:
  """Returns a study of a config file, by default its first.

  Raises:
    ValueError: there is none of that name, or none at all; one line.
  """
  if not isinstance(studies, dict) or not studies:
    raise ValueError('studies() must return a dict of studies')
  name = name or next(iter(studies))
  if name not in studies:
    choices = settings.closest(name, list(studies))
    raise ValueError(f'unknown study {name!r}{choices}')
  return study_lib.parse(name, studies[name])


def _tables(text: str, errors: list[str]) -> list[pathlib.Path]:
  """Returns the files that --reuse names; adds what is wrong to `errors`."""
  paths = [pathlib.Path(name) for name in text.split(',') if name]
  errors += [
    f'--reuse={path}: no such file' for path in paths if not path.is_file()
  ]
  return paths


def _seeds(text: str, errors: list[str]) -> list[int]:
  """Returns the seeds that --seeds names; adds what is wrong to `errors`."""
  words = text.rstrip(',').split(',')
  if not all(word.isdecimal() for word in words) or text == '0':
    errors.append(
      f'--seeds={text}: must be how many, such as 3, or which, such as 0,1,2'
    )
    return []
  if ',' not in text:
    return list(range(int(text)))
  return list(dict.fromkeys(map(int, words)))


def _jobs(text: str, errors: list[str]) -> int:
  """Returns the number that --jobs names; adds what is wrong to `errors`."""
  if not text:
    return len(os.sched_getaffinity(0))
  if not text.isdecimal() or text == '0':
    errors.append(f'--jobs={text}: must be a whole number, at least 1')
    return 1
  return int(text)


def _flags_of(overrides: Mapping[str, str | bool]) -> list[str]:
  """Returns the flags of overrides, as they were given."""
  return [f'--config.{key}={value}' for key, value in overrides.items()]


def _digest(plan: Plan, arm: study_lib.Arm) -> str:
  """Returns the digest of what the runs of an arm compute, for all seeds.

  It is made of the values that are not those of `configs/base.py`, so that a
  key which is added there later changes no digest. A default that is changed
  there changes none either, so earlier rows must then be made again.

  Raises:
    ConfigurationError: the config of the arm is wrong.
  """
  # Without the path of a start, which may not have been made yet.
  config = configuration.parse(plan.train_flags(arm), workdir=False).config
  usual = settings.flatten(base.get_config())
  values = {
    key: value
    for key, value in settings.flatten(config).items()
    if not f'{key}.'.startswith(tuple(f'{name}.' for name in _NOT_COMPARED))
    and (key not in usual or usual[key] != value)
  }
  start = dict(plan.whole.starts[arm.start]) if arm.start else {}
  for found in (values, start):
    found |= {x: pathlib.Path(found[x]).name for x in _PATHS if x in found}
  if start:
    values['start'] = start
  text = json.dumps(values, sort_keys=True, default=str)
  return hashlib.sha256(text.encode()).hexdigest()[:8]


def _other_study(plan: Plan) -> list[str]:
  """Returns why the folder is not that of this study; [] if it is."""
  start = f'--workdir={plan.folder}: '
  try:
    record = json.loads((plan.folder / _RECORD).read_text('utf-8'))
    name, digests = record['study'], record['settings']
  except (OSError, ValueError, KeyError, TypeError, RecursionError):
    return []  # a new folder
  if name != plan.study.name:
    return [f'{start}holds the study {name!r}, not {plan.study.name!r}']
  return [
    f'{start}its runs of {label!r} had other settings; use another --workdir'
    for label, digest in _labelled(plan.digests).items()
    if digests.get(label, digest) != digest
  ]


def _labelled(digests: Mapping[tuple[str, str], str]) -> dict[str, str]:
  return {
    ' '.join(part for part in key if part): x for key, x in digests.items()
  }
