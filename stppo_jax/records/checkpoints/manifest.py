"""Reads the manifest of a checkpoint, which describes its arrays.

    workdir/checkpoints/<step>/manifest/metadata    JSON

A manifest has the version, the step, the run, the shape, dtype and fingerprint
of every leaf, the values of the state that are no arrays, and a digest of all
these fields. This module does not import jax, so that checkpoints are listed
without delay.

A later version of this program that changes the fields also raises `VERSION`,
but computes the digest in the same way. So an older version can tell a newer
manifest from a damaged manifest.
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
  """Returns the digest of a manifest that has no field `digest`."""
  text = json.dumps(manifest, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def read(path: epath.Path | pathlib.Path, step: int) -> dict[str, Any]:
  """Returns the manifest of a checkpoint after checks of digest and step.

  Args:
    path: the folder of the checkpoint.
    step: the step of the checkpoint.

  Raises:
    NewerSchema: a newer version of the program has saved the checkpoint.
    ValueError: the manifest cannot be read, is damaged, or has another step.
      The message is one line.
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
  # The version is checked after the digest, which all versions compute alike,
  # so that a newer manifest is not taken for a damaged one.
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
  """Returns a text that names the run that saved a step, or ''.

  The result is '' if the run of the workdir saved the step, or if this cannot
  be known because there are no ids to compare.

  Args:
    manifest: the manifest of the step.
    run: the run of the workdir. None if a version of this program without run
      ids began the run.
  """
  if run is None or ('run_id' not in manifest and run.has_older_checkpoints):
    return ''
  saved = manifest.get('run_id'), manifest.get('config_digest')
  if saved == (run.run_id, run.config_digest):
    return ''
  return f'of the run {saved[0]}, but the run of this workdir is {run.run_id}'


def best(scores: Mapping[int, float | None]) -> int | None:
  """Returns the step with the greatest score, or None if no step has a score.

  Of several steps with the greatest score, the newest is returned.

  Args:
    scores: step to score, or to None if the step has no score.
  """
  scored = [
    (score, step) for step, score in scores.items() if score is not None
  ]
  return max(scored)[1] if scored else None
