"""Plans which runs of a study are made, with which settings and folders."""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from stppo_jax import settings
from stppo_jax.configs import base
from stppo_jax.tools.ablation import study as study_lib

# Keys that change nothing that a run computes, or that differ between seeds or
# machines.
_NOT_COMPARED = (
  'seed',
  'title',
  'writer',
  'checkpoint',
  'alarms',
  'profile',
  'updates.max_skipped',
)
# Keys that decide which trajectories share a microbatch, over which a
# correction may be computed.
_OF_MICROBATCHES = ('mesh', 'updates.row_length')
_SCOPE = 'algorithm.correction.clipping_bias.scope'
# Keys of paths, of which only the last name is the same on another machine.
_PATHS = ('model.path', 'init_from', 'env.prompt_template')
_RECORD = 'study.json'


@dataclasses.dataclass(frozen=True)
class Plan:
  """The runs of a study that the user asks for, and how they are made.

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
    flags = self._flags(
      algorithm, {'model.path': '', **self.whole.starts[start]}
    )
    # The steps of the runs are not those of a start, and `sft` refuses them.
    return [x for x in flags if not x.startswith('--config.num_steps=')]

  def _flags(self, algorithm: str, changes: Mapping[str, Any]) -> list[str]:
    """Returns flags of a config; those of the command line come last."""
    own = [f'--config.{key}={value}' for key, value in changes.items()]
    return [f'--config={self.file}:{algorithm}', *own, *self.flags]

  def record(self) -> None:
    """Records in the folder which study it holds."""
    content = {'study': self.study.name, 'settings': _labelled(self.digests)}
    text = json.dumps(content, indent=2) + '\n'
    (self.folder / _RECORD).write_text(text, encoding='utf-8')


def digest(plan: Plan, arm: study_lib.Arm, config: Any) -> str:
  """Returns the digest of what the runs of an arm compute, for all seeds.

  It is made of the values that are not those of `configs/base.py`, so that a
  key which is added there later changes no digest. A default that is changed
  there changes none either, so earlier rows must then be made again.

  Args:
    plan: knows what the starts change.
    arm: an arm of its study.
    config: the config of the arm, without the path of its start.
  """
  usual, own = settings.flatten(base.get_config()), settings.flatten(config)
  left_out = _NOT_COMPARED
  if own[_SCOPE] != 'microbatch':
    left_out += _OF_MICROBATCHES
  # Names are compared with a dot at their end, so that `writer` covers
  # `writer.keep_files` but would not cover a key `writers`.
  values = {
    key: value
    for key, value in own.items()
    if not f'{key}.'.startswith(tuple(f'{name}.' for name in left_out))
    and (key not in usual or usual[key] != value)
  }
  start = dict(plan.whole.starts[arm.start]) if arm.start else {}
  for found in (values, start):
    found |= {x: pathlib.Path(found[x]).name for x in _PATHS if x in found}
  if start:
    values['start'] = start
  text = json.dumps(values, sort_keys=True, default=str)
  return hashlib.sha256(text.encode()).hexdigest()[:8]


def other_study(plan: Plan) -> list[str]:
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
