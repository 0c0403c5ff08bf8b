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

from stppo_jax.workdir import run_folder

VERSION = 1
FILE = pathlib.Path(run_folder.MANIFEST)


def digest(manifest: Mapping[str, Any]) -> str:
  """Returns the checksum that a manifest carries of its other fields."""
  text = json.dumps(manifest, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def problem(manifest: Any, step: int) -> str:
  """Returns why this is not the manifest of a step; '' if it is."""
  if not isinstance(manifest, dict) or 'version' not in manifest:
    return 'not a manifest of this program'
  fields = {name: x for name, x in manifest.items() if name != 'digest'}
  if manifest.get('digest') != digest(fields):
    return 'the manifest does not match its digest'
  if manifest['version'] != VERSION:
    return (
      f'of schema {manifest["version"]}, and this version of the program reads '
      f'schema {VERSION}'
    )
  if manifest['step'] != step:
    return f'the manifest is of step {manifest["step"]}'
  return ''


def is_newer(manifest: Any) -> bool:
  """Returns whether a newer version of the program wrote a manifest."""
  if not isinstance(manifest, dict):
    return False
  version = manifest.get('version')
  fields = {name: x for name, x in manifest.items() if name != 'digest'}
  is_whole = manifest.get('digest') == digest(fields)
  return type(version) is int and version > VERSION and is_whole


def other_run(manifest: Mapping[str, Any], run: run_folder.Run | None) -> str:
  """Returns the id of the run that saved a step, if it is not this one.

  Args:
    manifest: a manifest without a problem.
    run: the run of the workdir; None if a version without ids began it.

  Returns:
    '' if the step is this run's own.
  """
  if run is None or ('run_id' not in manifest and run.has_older_checkpoints):
    return ''
  saved = manifest.get('run_id'), manifest.get('config_digest')
  return '' if saved == (run.run_id, run.config_digest) else str(saved[0])


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
