"""Writes the manifest of a checkpoint while the fingerprints are computed.

Fingerprints take as long as reading the whole state. A run that waited for them
would lose more time with them than with all the rest of a save.
"""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import future

from stppo_jax.records.checkpoints import manifest as manifest_lib


class ManifestHandler(ocp.AsyncCheckpointHandler):
  """A handler of Orbax that writes a `ManifestSave`, and reads nothing."""

  # The name of the argument is Orbax's.
  async def async_save(
    self, directory: pathlib.Path, args: 'ManifestSave'
  ) -> list[future.Future]:
    """Returns futures of what is left to do; Orbax calls it."""
    return [
      future.CommitFutureAwaitingContractedSignals(
        _write(directory, args), name='manifest'
      )
    ]

  def save(self, directory: pathlib.Path, args: 'ManifestSave') -> None:
    """Is never called: all saves are asynchronous."""
    raise NotImplementedError

  def restore(self, directory: pathlib.Path, args: Any = None) -> Any:
    """Is never called: `saved_steps` reads manifests."""
    raise NotImplementedError


@ocp.args.register_with_handler(ManifestHandler, for_save=True)
@dataclasses.dataclass
class ManifestSave(ocp.args.CheckpointArgs):
  """A manifest whose fingerprints may still be computed.

  Attributes:
    manifest: all of it but fingerprints and digest.
    names: the leaves, in the order of the fingerprints.
    fingerprints: an array of a number for each leaf.
  """

  manifest: dict[str, Any]
  names: Sequence[str]
  fingerprints: jax.Array


async def _write(directory: pathlib.Path, save: ManifestSave) -> None:
  """Writes the file, on the first process."""
  if jax.process_index() != 0:
    return
  numbers = np.asarray(save.fingerprints)  # waits for them
  leaves = {
    name: {**save.manifest['leaves'][name], 'fingerprint': int(number)}
    for name, number in zip(save.names, numbers, strict=True)
  }
  manifest = {**save.manifest, 'leaves': leaves}
  manifest['digest'] = manifest_lib.digest(manifest)
  text = json.dumps(manifest, allow_nan=False)
  (directory / manifest_lib.FILE.name).write_text(text)


# Orbax takes a handler for one of an old kind if it has no such class.
@ocp.args.register_with_handler(ManifestHandler, for_restore=True)
class ManifestRestore(ocp.args.CheckpointArgs):
  """The argument of `restore`, which is never called."""
