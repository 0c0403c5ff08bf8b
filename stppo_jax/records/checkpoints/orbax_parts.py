"""Extends Orbax: a handler of manifests, and the choice of steps to keep.

The devices compute the fingerprints of a manifest while threads write the save.
To compute them takes as long as reading the whole state. A run that waited for
the fingerprints would lose more time by this wait than by the rest of a save.
"""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import json
import pathlib
from typing import Any

from etils import epath
import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import future

from stppo_jax.records.checkpoints import manifest as manifest_lib

# Replicas share the writing of an array only if the array has at least this
# many bytes. Each array shape that is split needs a compiled program, and
# compiling takes longer than writing a small array.
_LEAST_BYTES_SHARED = 2**20


class ManifestHandler(ocp.AsyncCheckpointHandler):
  """A handler of Orbax that writes a `ManifestSave`, and reads nothing."""

  # Orbax decides the names of the arguments.
  async def async_save(
    self, directory: pathlib.Path, args: 'ManifestSave'
  ) -> list[future.Future]:
    """Returns the future of writing the manifest; Orbax calls this method."""
    return [
      future.CommitFutureAwaitingContractedSignals(
        _write(directory, args), name='manifest'
      )
    ]

  def save(self, directory: pathlib.Path, args: 'ManifestSave') -> None:
    """Is never called, because all saves are asynchronous."""
    raise NotImplementedError

  def restore(self, directory: pathlib.Path, args: Any = None) -> Any:
    """Is never called, because `manifest.read` reads manifests."""
    raise NotImplementedError


@ocp.args.register_with_handler(ManifestHandler, for_save=True)
@dataclasses.dataclass
class ManifestSave(ocp.args.CheckpointArgs):
  """A manifest to write; the devices may not have its fingerprints yet.

  Attributes:
    manifest: the manifest without fingerprints and without digest.
    fingerprints: an array with one fingerprint for each leaf, in the order of
      the leaves in the manifest.
    flush: called on every process before the manifest is written, to upload
      older files of the run.
  """

  manifest: dict[str, Any]
  fingerprints: jax.Array
  flush: Callable[[], None]


async def _write(directory: pathlib.Path, save: ManifestSave) -> None:
  """Calls `flush`, then writes the manifest on the first process."""
  # Files that were written before the checkpoint must reach the bucket before
  # the checkpoint does.
  save.flush()
  if jax.process_index() != 0:
    return
  numbers = np.asarray(save.fingerprints)  # waits for the devices
  leaves = {
    name: {**kind, 'fingerprint': int(number)}
    for (name, kind), number in zip(
      save.manifest['leaves'].items(), numbers, strict=True
    )
  }
  manifest = {**save.manifest, 'leaves': leaves}
  manifest['digest'] = manifest_lib.digest(manifest)
  text = json.dumps(manifest, allow_nan=False)
  (directory / manifest_lib.FILE.name).write_text(text)


# If `ManifestRestore` did not exist, Orbax would expect the handler to have the
# interface of older versions of Orbax.
@ocp.args.register_with_handler(ManifestHandler, for_restore=True)
class ManifestRestore(ocp.args.CheckpointArgs):
  """The argument of `restore`, which is never called."""


def checked(
  folder: epath.Path, check: Callable[[], None]
) -> type[ocp.path.atomicity_types.TemporaryPath]:
  """Returns a class of temporary folders, each committed only after `check`.

  Args:
    folder: the folder of the checkpoints. Whether it is on a disk or in a
      bucket decides how a temporary folder is committed.
    check: raises an error if a step must not be committed.
  """
  kinds = ocp.path.atomicity_defaults
  base: Any = kinds.get_default_temporary_path_class(folder)

  class Checked(base):
    async def finalize(self):
      # The items of a step (state and manifest) are committed in the same way,
      # before the step. Only the commit of the step itself is checked.
      if self.get_final().parent == folder:
        check()
      await super().finalize()

  return Checked


def manager(
  folder: epath.Path,
  preservation: 'Preservation',
  *,
  read_only: bool,
  check: Callable[[], None],
  on_end: Callable[[], None],
) -> ocp.CheckpointManager:
  """Returns Orbax's manager of a folder of checkpoints.

  Args:
    folder: the folder. If `read_only` is false, the folder is made.
    preservation: chooses the steps to keep.
    read_only: whether nothing in the folder may be changed.
    check: called before a step is committed, see `checked`.
    on_end: called by a thread at the end of a save.
  """
  handler = ocp.type_handlers.ArrayHandler(
    min_slice_bytes_for_replica_parallel=_LEAST_BYTES_SHARED
  )
  return ocp.CheckpointManager(
    folder,
    options=ocp.CheckpointManagerOptions(
      preservation_policy=preservation,
      create=not read_only,
      cleanup_tmp_directories=not read_only,  # the remains of killed saves
      read_only=read_only,
      temporary_path_class=checked(folder, check),
      async_options=ocp.AsyncOptions(post_finalization_callback=on_end),
    ),
    item_handlers={
      'state': ocp.PyTreeCheckpointHandler(
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
          (jax.Array, handler)
        )
      ),
      'manifest': ManifestHandler(),
    },
  )


class Preservation:
  """Chooses the steps to keep, as a preservation policy of Orbax.

  Args:
    folder: the folder of the checkpoints.
    keep: the number of newest steps to keep, in addition to the step with the
      best score. None keeps all steps.
    keep_every: steps that are multiples of this number are kept too. 0 keeps no
      additional steps.
  """

  def __init__(self, folder: epath.Path, *, keep: int | None, keep_every: int):
    self._folder = folder
    self._keep, self._keep_every = keep, keep_every
    self._scores: dict[int, float | None] = {}

  def note(self, step: int, score: float | None) -> None:
    """Notes the score of a step that is about to be saved."""
    self._scores[step] = score

  def best(self, steps: Sequence[int]) -> int | None:
    """Returns the step with the best score, or None if no step has a score.

    Of several steps with the best score, the newest is returned.
    """
    # Each manifest is read only once: Orbax asks at every save which steps to
    # keep, and in a bucket each read is a request.
    for step in steps:
      if step not in self._scores:
        self._scores[step] = None
        with contextlib.suppress(ValueError):  # the step is damaged
          manifest = manifest_lib.read(self._folder / str(step), step)
          self._scores[step] = manifest['host'].get('score')
    return manifest_lib.best({step: self._scores[step] for step in steps})

  def should_preserve(
    self, checkpoints: Sequence[Any], *, context: Any
  ) -> Sequence[bool]:
    """Returns for each checkpoint whether to keep it; Orbax calls this."""
    del context
    steps = [checkpoint.step for checkpoint in checkpoints]
    if self._keep is None:
      return [True] * len(steps)
    every = self._keep_every
    kept = {*sorted(steps)[-self._keep :], self.best(steps)}
    return [step in kept or (every > 0 and step % every == 0) for step in steps]
