"""The handler of the manifest, and the choice of steps that Orbax keeps.

A manifest is written while its fingerprints are computed: they take as long as
reading the whole state, and a run that waited for them would lose more time
with them than with all the rest of a save.
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

# Replicas share the writing of larger arrays only: each shape that is cut is a
# program to compile, which costs more than a small array takes to write.
_LEAST_BYTES_SHARED = 2**20


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
    """Is never called: `manifest.read` does it."""
    raise NotImplementedError


@ocp.args.register_with_handler(ManifestHandler, for_save=True)
@dataclasses.dataclass
class ManifestSave(ocp.args.CheckpointArgs):
  """A manifest whose fingerprints may still be computed.

  Attributes:
    manifest: all of it but fingerprints and digest.
    fingerprints: an array of a number for each leaf, in the same order.
    flush: called first, on every process.
  """

  manifest: dict[str, Any]
  fingerprints: jax.Array
  flush: Callable[[], None]


async def _write(directory: pathlib.Path, save: ManifestSave) -> None:
  """Writes the file, on the first process."""
  # First of all: what was written before the checkpoint must reach the bucket
  # before it.
  save.flush()
  if jax.process_index() != 0:
    return
  numbers = np.asarray(save.fingerprints)  # waits for them
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


# Without this class, Orbax takes the handler for one of an old kind.
@ocp.args.register_with_handler(ManifestHandler, for_restore=True)
class ManifestRestore(ocp.args.CheckpointArgs):
  """The argument of `restore`, which is never called."""


def checked(
  folder: epath.Path, check: Callable[[], None]
) -> type[ocp.path.atomicity_types.TemporaryPath]:
  """Returns a class of temporary folders that are committed after a check.

  Args:
    folder: the folder of the checkpoints, which decides how they are committed.
    check: raises an error if they must not be.
  """
  kinds = ocp.path.atomicity_defaults
  base: Any = kinds.get_default_temporary_path_class(folder)

  class Checked(base):
    async def finalize(self):
      # The items of a step are committed before it, in the same way.
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
    folder: the folder, which is made unless `read_only`.
    preservation: chooses the steps that are kept.
    read_only: whether nothing may be changed.
    check: see `checked`.
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
      cleanup_tmp_directories=not read_only,  # of a save that was killed
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
  """A policy of Orbax, which asks at every save what is kept.

  Args:
    folder: the folder of the checkpoints.
    keep: the number of the newest steps that are kept; None: all steps are.
    keep_every: the multiples of this number are kept too; 0: none.
  """

  def __init__(self, folder: epath.Path, *, keep: int | None, keep_every: int):
    self._folder = folder
    self._keep, self._keep_every = keep, keep_every
    self._scores: dict[int, float | None] = {}

  def note(self, step: int, score: float | None) -> None:
    """Notes how good a step is that is about to be saved."""
    self._scores[step] = score

  def best(self, steps: Sequence[int]) -> int | None:
    """Returns the step with the best score; None if no step has one.

    Of several with the same score it is the newest.
    """
    # Each manifest is read once. Orbax asks at every save, and in a bucket each
    # of them would be a request.
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
    """Returns for each step whether it is kept; Orbax calls it."""
    del context
    steps = [checkpoint.step for checkpoint in checkpoints]
    if self._keep is None:
      return [True] * len(steps)
    every = self._keep_every
    kept = {*sorted(steps)[-self._keep :], self.best(steps)}
    return [step in kept or (every > 0 and step % every == 0) for step in steps]
