"""Verifies a checkpoint: every fingerprint is computed again from its files.

No model is needed: the manifest names the leaves with their shapes. Nothing is
written or renamed, so the run may be going on.
"""

from collections.abc import Iterator
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from stppo_jax.records.checkpoints import fingerprint
from stppo_jax.records.checkpoints import manifest as manifest_lib
from stppo_jax.records.checkpoints import orbax_errors
from stppo_jax.records.checkpoints import saved_steps
from stppo_jax.workdir import run_folder

# Leaves that are read at once. More take more memory, and fewer take more time:
# the fingerprints of each group are a program to compile.
_GROUP_BYTES = 1 << 28


def problems(
  path: pathlib.Path, step: int, run: run_folder.Run | None
) -> list[str]:
  """Returns a line for everything that is wrong with a checkpoint.

  Args:
    path: the folder of the checkpoint.
    step: its step.
    run: the run that the checkpoint must be of; None if it has no id.

  Returns:
    Lines that name a file or a leaf, and the cause; [] for a sound checkpoint.
  """
  orbax_errors.hide_repeated()
  try:
    manifest = saved_steps.read_manifest(path, step)
  except ValueError as error:
    return [f'{manifest_lib.FILE}: {error}']
  other = manifest_lib.other_run(manifest, run)
  if other:
    assert run is not None  # a run without an id has no other
    return [
      f'{manifest_lib.FILE}: of the run {other}, but the run of this workdir '
      f'is {run.run_id}'
    ]
  leaves = manifest['leaves']
  unreadable: dict[str, str] = {}
  changed: dict[str, str] = {}
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    for names in _groups(leaves):
      arrays = _read_all(reader, path, leaves, names, unreadable)
      numbers = (
        fingerprint.fingerprints(list(arrays.values())) if arrays else []
      )
      for name, number in zip(arrays, numbers):
        expected = leaves[name]['fingerprint']
        if number != expected:
          changed[name] = f'fingerprint {number}, saved as {expected}'
  return [_shortened(each) for each in (unreadable, changed) if each]


def _groups(leaves: dict[str, Any]) -> Iterator[list[str]]:
  """Yields the names of leaves in groups that are read together."""
  group, size = [], 0
  for name in sorted(leaves):
    kind = leaves[name]
    count = math.prod(kind['shape']) * jnp.dtype(kind['dtype']).itemsize
    if group and size + count > _GROUP_BYTES:
      yield group
      group, size = [], 0
    group.append(name)
    size += count
  if group:
    yield group


def _read_all(
  reader: ocp.Checkpointer,
  path: pathlib.Path,
  leaves: dict[str, Any],
  names: list[str],
  unreadable: dict[str, str],
) -> dict[str, jax.Array]:
  """Returns the leaves of a group that can be read; adds the others.

  Args:
    reader: reads the files.
    path: the folder of the checkpoint.
    leaves: name to shape and dtype.
    names: the leaves of the group.
    unreadable: name to cause; leaves that cannot be read are added.
  """
  try:
    return _read(reader, path, leaves, names)
  except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
    raise  # no evidence of damage
  except Exception as error:  # a damaged file can raise anything
    if len(names) == 1:
      unreadable[names[0]] = _cause(error)
      return {}
  arrays = {}
  for name in names:  # one by one, to find those that cannot be read
    arrays |= _read_all(reader, path, leaves, [name], unreadable)
  return arrays


def _read(
  reader: ocp.Checkpointer,
  path: pathlib.Path,
  leaves: dict[str, Any],
  names: list[str],
) -> dict[str, jax.Array]:
  """Returns some leaves of a checkpoint by name."""
  sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  wanted = {
    name: jax.ShapeDtypeStruct(
      tuple(leaves[name]['shape']),
      jnp.dtype(leaves[name]['dtype']),
      sharding=sharding,
    )
    for name in names
  }
  restored = reader.restore(
    (path / 'state').resolve(),
    args=ocp.args.PyTreeRestore(
      wanted,
      restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
      partial_restore=True,
    ),
  )
  return {name: restored[name] for name in names}


def _cause(error: Exception) -> str:
  """Returns one line about an error of a read."""
  return f'cannot be read ({orbax_errors.cause(error)})'


def _shortened(causes: dict[str, str]) -> str:
  """Returns one line: the first leaf, how many others there are, and why."""
  name, cause = next(iter(causes.items()))
  rest = len(causes) - 1
  others = f' and {rest} other{"s" if rest > 1 else ""}' if rest else ''
  return f'{name}{others}: {cause}'
