"""The manifest of a checkpoint, which says what its arrays must be.

    workdir/checkpoints/<step>/manifest/metadata    JSON

It names version, step and run, the shape, dtype and fingerprint of every leaf,
values of the host, and a digest of all that. Nothing here imports jax, so that
checkpoints can be listed at once.

A version of this program that writes other manifests has a greater `VERSION`,
and the same digest: so it is known that they are newer and not damaged.
"""

from collections.abc import Mapping
import hashlib
import json
import pathlib
from typing import Any

from etils import epath

from stppo_jax import exits
from stppo_jax.workdir import run_folder

VERSION = 1
FILE = pathlib.Path(run_folder.MANIFEST)


class NewerSchema(ValueError):
  """A newer version of this program has saved the checkpoint."""

  exit_code = exits.USAGE


def digest(manifest: Mapping[str, Any]) -> str:
  """Returns the checksum that a manifest carries of its other fields."""
  text = json.dumps(manifest, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def read(path: epath.Path | pathlib.Path, step: int) -> dict[str, Any]:
  """Returns the manifest of a checkpoint, checked by its digest.

  Args:
    path: the folder of the checkpoint.
    step: its step.

  Raises:
    NewerSchema: a newer version of the program has saved the checkpoint.
    ValueError: it cannot be read, or is not that of the step; one line.
  """
  try:
    manifest = json.loads((path / FILE).read_text('utf-8'))
  except OSError as error:
    raise ValueError(error.strerror or 'no such file') from error
  except (ValueError, RecursionError) as error:
    raise ValueError(f'not JSON ({error})') from error
  if not isinstance(manifest, dict) or (
    manifest.pop('digest', None) != digest(manifest)
  ):
    raise ValueError('the manifest does not match its digest')
  # Checked after the digest, which all versions compute alike, so that a newer
  # manifest is not taken for a damaged one.
  version = manifest.get('version')
  if version != VERSION:
    is_newer = type(version) is int and version > VERSION
    raise (NewerSchema if is_newer else ValueError)(
      f'of schema {version}, and this version of the program reads schema '
      f'{VERSION}'
    )
  if manifest['step'] != step:
    raise ValueError(f'the manifest is of step {manifest["step"]}')
  return manifest


def other_run(manifest: Mapping[str, Any], run: run_folder.Run | None) -> str:
  """Returns which other run saved a step; '' if the step is this run's own.

  Args:
    manifest: the manifest of the step.
    run: the run of the workdir; None if a version without ids began it.
  """
  if run is None or ('run_id' not in manifest and run.has_older_checkpoints):
    return ''
  saved = manifest.get('run_id'), manifest.get('config_digest')
  if saved == (run.run_id, run.config_digest):
    return ''
  return f'of the run {saved[0]}, but the run of this workdir is {run.run_id}'


def best(scores: Mapping[int, float | None]) -> int | None:
  """Returns the step with the greatest score; None if no step has one.

  Of several with the same score it is the newest.

  Args:
    scores: the score of each step, or None.
  """
  scored = [
    (score, step) for step, score in scores.items() if score is not None
  ]
  return max(scored)[1] if scored else None
