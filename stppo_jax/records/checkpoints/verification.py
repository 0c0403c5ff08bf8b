"""Verifies a checkpoint by computing all fingerprints again from its files.

No model is needed, because the manifest has the names and shapes of the leaves.
Nothing is written or renamed, so a run in progress is not disturbed.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from stppo_jax.records.checkpoints import fingerprint
from stppo_jax.records.checkpoints import manifest as manifest_lib
from stppo_jax.records.checkpoints import orbax_errors
from stppo_jax.workdir import run_folder


def problems(
  path: pathlib.Path, step: int, run: run_folder.Run | None
) -> list[str]:
  """Returns messages about what is wrong with a checkpoint.

  Args:
    path: the folder of the checkpoint.
    step: the step of the checkpoint.
    run: the run that must have saved the checkpoint. None if the run has no id.

  Returns:
    One line if the manifest cannot be read, or if another run has saved it.
    Otherwise up to two lines: one for the leaves that cannot be read, and one
    for the leaves that have changed. [] for a sound checkpoint.
  """
  orbax_errors.hide_repeated()
  try:
    manifest = manifest_lib.read(path, step)
  except ValueError as error:
    return [f'{manifest_lib.FILE}: {error}']
  other = manifest_lib.other_run(manifest, run)
  if other:
    return [f'{manifest_lib.FILE}: {other}']
  unreadable: dict[str, str] = {}
  changed: dict[str, str] = {}
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    # Leaves are read one by one, so memory for the largest leaf is enough.
    for name, kind in sorted(manifest['leaves'].items()):
      try:
        array = _read(reader, path, name, kind)
      except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
        raise  # no evidence of damage
      except Exception as error:  # a damaged file can raise anything
        cause = orbax_errors.cause(error)
        unreadable[name] = f'cannot be read ({cause})'
        continue
      (number,), expected = (
        fingerprint.fingerprints([array]),
        kind['fingerprint'],
      )
      if number != expected:
        changed[name] = f'fingerprint {number}, but {expected} in the manifest'
  return [_shortened(each) for each in (unreadable, changed) if each]


def _read(
  reader: ocp.Checkpointer,
  path: pathlib.Path,
  name: str,
  kind: dict[str, Any],
) -> jax.Array:
  """Returns a leaf of a checkpoint.

  Args:
    reader: the checkpointer of Orbax that reads the files.
    path: the folder of the checkpoint.
    name: the name of the leaf.
    kind: the shape and dtype of the leaf, as in the manifest.
  """
  # The leaf is read onto one device. The mesh of the run is not needed, because
  # a fingerprint does not depend on the mesh.
  sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  shape, dtype = tuple(kind['shape']), jnp.dtype(kind['dtype'])
  wanted = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)}
  restored = reader.restore(
    (path / 'state').resolve(),
    args=ocp.args.PyTreeRestore(
      wanted,
      restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
      partial_restore=True,
    ),
  )
  return restored[name]


def _shortened(causes: dict[str, str]) -> str:
  """Returns a line with the first leaf, its cause, and the number of others.

  Args:
    causes: a dict from the name of each damaged leaf to the cause.
  """
  name, cause = next(iter(causes.items()))
  rest = len(causes) - 1
  others = f' and {rest} other{"s" if rest > 1 else ""}' if rest else ''
  return f'{name}{others}: {cause}'
