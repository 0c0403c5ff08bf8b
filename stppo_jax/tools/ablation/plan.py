"""Plans the runs of a study: their settings, flags and folders."""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from stppo_jax import settings
from stppo_jax.configs import base
from stppo_jax.tools.ablation import study as study_lib

# Config keys that the digest of an arm leaves out: they change nothing that a
# run computes, or they differ between seeds or machines.
_NOT_COMPARED = (
  'seed',
  'title',
  'writer',
  'checkpoint',
  'alarms',
  'profile',
  'updates.max_skipped',
)
# Config keys that decide which trajectories share a microbatch. They change the
# results only if the scope of the clipping-bias correction is a microbatch.
_OF_MICROBATCHES = ('mesh', 'updates.row_length')
_SCOPE = 'algorithm.correction.clipping_bias.scope'
# Config keys whose value is a path. Only the last component of the path is the
# same on another machine.
_PATHS = ('model.path', 'init_from', 'env.prompt_template')
_RECORD = 'study.json'


@dataclasses.dataclass(frozen=True)
class Plan:
  """The runs of a study that the user asks for, and how to make them.

  Attributes:
    study: the study with only the chosen groups.
    whole: the study with all its groups.
    folder: the folder of the study.
    table: the path of the table of all runs, a CSV file.
    reuse: the paths of the tables of other studies. If one of these tables has
      a run that equals a missing run, the run is copied and not made.
    seeds: the seeds that the user asks for.
    jobs: the number of runs that are made at once.
    flags: the overrides from the command line, which all runs get.
    file: the path of the config file.
    digests: maps the key of an arm to the digest of the arm's config.
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
    """Returns the flags of `train` for an arm, without seed and workdir.

    Args:
      arm: the arm.
      path: the path of the policy that the arm trains from. It is used only if
        the arm names a supervised start.
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
    """Returns the flags of `sft` for a supervised start, without workdir."""
    # The algorithm does not matter to `sft`, but the config file needs a valid
    # one. So the algorithm of an arm with this start is used.
    algorithm = next(x.algorithm for x in self.whole.arms if x.start == start)
    flags = self._flags(
      algorithm, {'model.path': '', **self.whole.starts[start]}
    )
    # `num_steps` is the length of the runs of `train`, and `sft` refuses it.
    return [x for x in flags if not x.startswith('--config.num_steps=')]

  def _flags(self, algorithm: str, changes: Mapping[str, Any]) -> list[str]:
    """Returns the flags that set a config; the user's overrides come last."""
    own = [f'--config.{key}={value}' for key, value in changes.items()]
    return [f'--config={self.file}:{algorithm}', *own, *self.flags]

  def record(self) -> None:
    """Writes the study's name and digests to a file in the study's folder."""
    content = {'study': self.study.name, 'settings': _labelled(self.digests)}
    text = json.dumps(content, indent=2) + '\n'
    (self.folder / _RECORD).write_text(text, encoding='utf-8')


def digest(plan: Plan, arm: study_lib.Arm, config: Any) -> str:
  """Returns a digest of the settings that decide the results of an arm's runs.

  Only values that differ from the defaults in `configs/base.py` are part of the
  digest. So if a key is later added to that file, no digest changes. If a
  default is changed in that file, the digests of the arms that use the default
  do not change either. But the finished runs of these arms used the earlier
  default, so the user must make these runs again.

  Args:
    plan: the plan, which has the config changes of each supervised start.
    arm: an arm of the plan's study.
    config: the config of the arm, without the path of its start.
  """
  usual, own = base.values(), settings.flatten(config)
  left_out = _NOT_COMPARED
  if own[_SCOPE] != 'microbatch':
    left_out += _OF_MICROBATCHES
  # Keys are compared with a dot at their end. So `writer` covers
  # `writer.keep_files`, but would not cover a key `writers`.
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
  """Returns messages about differences between the folder's study and `plan`.

  The list is empty if the folder is new or contains runs of this study with the
  same settings.
  """
  start = f'--workdir={plan.folder}: '
  try:
    record = json.loads((plan.folder / _RECORD).read_text('utf-8'))
    name, digests = record['study'], record['settings']
  except (OSError, ValueError, KeyError, TypeError, RecursionError):
    return []  # a new folder has no record
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
