"""Records a run in its workdir before the first step.

    WORKDIR/config.json    the config that the run was started with
           /start          the policy that it starts from, without model.path

A run is a function of its config. A run that is resumed with another config
would be a mixture that no config describes, so it is refused, with a line for
each key that differs.
"""

from collections.abc import Mapping
import json
import os
import pathlib
from typing import Any

from stppo_jax import settings
from stppo_jax.training import assembly

# Keys that may change between two starts: the length of a run, what is
# evaluated, written and kept, the devices and the servers. None of them changes
# what a step computes.
_FREE = (
  'num_steps',
  'evaluate',
  'checkpoint',
  'writer',
  'retrieval',
  'mesh',
  'model.reference_memory',
  'rollout.mismatch_limit',
)
# A run has begun when it has left one of these. Before that, a config that was
# wrong (its weights did not fit, say) may be corrected.
_PRODUCTS = ('start', 'metrics.jsonl', 'checkpoints/*')
_ABSENT = '(absent)'
# Keys that are younger than some runs, with the value that those runs had.
_LATER_KEYS = {
  'env.name': 'search',
  'env.rewards.overlong': 0.0,
  'env.overlong_fraction': 0.2,  # read by nothing where overlong is 0
  'algorithm.advantage.critic_tokens': 'policy',
  'algorithm.advantage.outcome_counts': 'per_trajectory',
}


class OtherRun(Exception):
  """The folder belongs to the run of another config; one line per key."""

  exit_code = 2


def record_config(
  config: Mapping[str, Any], workdir: str | pathlib.Path
) -> None:
  """Records the config of a run that starts or resumes in `workdir`.

  Makes the folder. Keys that may change between two starts are rewritten.

  Args:
    config: the nested config, without references; its values must be those that
      Python's JSON can write, which infinity is.
    workdir: the run's folder.

  Raises:
    OtherRun: a run of another config has begun here; nothing is changed.
  """
  workdir = pathlib.Path(workdir)
  path = workdir / 'config.json'
  text = json.dumps(config, indent=2, sort_keys=True) + '\n'
  if path.is_file() and any(any(workdir.glob(p)) for p in _PRODUCTS):
    # Parsed again, because JSON turns tuples into lists.
    lines = _differences(json.loads(text), _read(path), workdir)
    if lines:
      raise OtherRun('\n'.join(lines))
  workdir.mkdir(parents=True, exist_ok=True)
  # By a rename, so that a process killed here leaves the old file or the new.
  new = path.with_suffix('.new')
  new.write_text(text, encoding='utf-8')
  os.replace(new, path)


def start_folder(config, workdir: pathlib.Path) -> pathlib.Path | None:
  """Returns the folder of the supervised start; None if the config has none."""
  wanted = config.sft.before_training and not config.model.path
  return workdir / 'start' if wanted else None


def with_start(config, workdir: pathlib.Path):
  """Returns the config with the supervised start as its model, if it has one.

  Raises:
    Misconfigured: the start has not been made yet.
  """
  start = start_folder(config, workdir)
  if start is None:
    return config
  if not start.is_dir():
    raise assembly.Misconfigured(f'{start}: missing, the run has not begun')
  config = config.copy_and_resolve_references()
  config.model.path = str(start)
  return config


def _read(path: pathlib.Path) -> dict[str, Any]:
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise OtherRun(f'{path}: not the record of a run ({error})') from error


def _differences(config, recorded, workdir) -> list[str]:
  ours = _LATER_KEYS | settings.flatten(config)
  theirs = _LATER_KEYS | settings.flatten(recorded)
  return [
    f'{key}={ours.get(key, _ABSENT)}: the run in {workdir} was started with '
    f'{theirs.get(key, _ABSENT)}'
    for key in sorted(ours.keys() | theirs.keys())
    if not f'{key}.'.startswith(tuple(f'{free}.' for free in _FREE))
    and (key not in ours or key not in theirs or ours[key] != theirs[key])
  ]
