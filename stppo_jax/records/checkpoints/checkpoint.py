"""Checkpoints that are verified when read, and set aside when damaged.

    workdir/checkpoints/<step>/state      the arrays, as Orbax writes them
                              /manifest   JSON: host state, shapes, fingerprints
                       /<step>.corrupt    a damaged step, kept for inspection

Orbax commits a step by one rename, or in a bucket by one object that it writes
last. So a killed save leaves no step. But Orbax does not verify the arrays that
it reads: it loads a flipped bit silently, and casts an array of another dtype.
Therefore the manifest has the shape, dtype and fingerprint of every leaf.

A save first copies the arrays to the host. Threads then write the copy while
the caller goes on. On a CPU nothing is copied: the threads write from a view of
the array's buffer. An update cannot reuse that buffer while the view exists, so
jax gives the update another buffer.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import json
import logging
import pathlib
from typing import Any

from etils import epath
import jax
from jax.experimental import multihost_utils
import numpy as np
import orbax.checkpoint as ocp

from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax.records.checkpoints import fingerprint as fingerprint_lib
from stppo_jax.records.checkpoints import manifest as manifest_lib
from stppo_jax.records.checkpoints import orbax_buckets
from stppo_jax.records.checkpoints import orbax_errors
from stppo_jax.records.checkpoints import orbax_parts
from stppo_jax.records.checkpoints import pending_save
from stppo_jax.workdir import run_folder

_log = logging.getLogger(__name__)


class CorruptCheckpoints(RuntimeError):
  """There are checkpoints, but none of them is valid."""

  exit_code = exits.DAMAGED


class OtherState(RuntimeError):
  """A sound checkpoint belongs to another run or to another model."""

  exit_code = exits.USAGE


class _Damaged(Exception):
  """A step is damaged and must not be loaded; the message names the damage."""


class Checkpointer:
  """Saves and restores a pytree of arrays together with a JSON record.

  If there are several processes, all processes must call every method.

  Attributes:
    pending: the save that threads are writing. It also has the step and the
      duration of the last completed save.
  """

  def __init__(
    self,
    workdir: str | pathlib.Path,
    *,
    keep: int | None = None,
    keep_every: int = 0,
    read_only: bool = False,
    flush: Callable[[], None] = lambda: None,
    check: Callable[[], None] = lambda: None,
    retry: float = 0.0,
  ):
    """Opens `workdir/checkpoints`, and makes the folder if not `read_only`.

    Args:
      workdir: the run's folder. If the run's folder is in a bucket, this is the
        folder on this machine that stands for the bucket's folder.
      keep: the number of newest steps to keep, in addition to the step with the
        best score. None keeps all steps.
      keep_every: steps that are multiples of this number are kept too. 0 keeps
        no additional steps.
      read_only: whether nothing may be changed or made. This must be true if
        another process may still be making the run: files that look like the
        remains of a killed save may belong to a save in progress.
      flush: uploads files of the run. A thread of every process calls it before
        a step is committed.
      check: raises an error to stop a commit; called only on the first process.
      retry: the seconds for which a failed request to a bucket is repeated.
    """
    self._workdir = pathlib.Path(workdir)
    self._address = run_folder.address(self._workdir)
    place = self._address or self._workdir.resolve()
    self._folder = epath.Path(place) / 'checkpoints'
    if self._address:
      orbax_buckets.prepare(retry)
    self._read_only = read_only
    self.pending = pending_save.PendingSave(jax.process_count())
    self._preservation = orbax_parts.Preservation(
      self._folder, keep=keep, keep_every=keep_every
    )
    self._flush = flush
    self._run = run_folder.read(self._workdir)
    orbax_errors.hide_repeated()
    with orbax_buckets.reaching(self._address):
      self._manager = orbax_parts.manager(
        self._folder,
        self._preservation,
        read_only=read_only,
        check=check,
        on_end=self.pending.note_end,
      )

  def save(
    self, step: int, state: Any, host: dict[str, Any], *, waits: bool = True
  ) -> None:
    """Saves a step after the previous save has ended.

    A step that already exists is not written again, because the state is a
    function of the step.

    Args:
      step: the number of steps that are done.
      state: a pytree of arrays with any sharding.
      host: further values of the state that JSON can represent. The value
        'score', if present, rates the step: greater is better.
      waits: whether to wait until the step is on disk. Otherwise threads write
        the step, and the caller may go on and donate the arrays.

    Raises:
      SaveFailed: this save or the previous save has failed. Nothing is left of
        the step that failed. Older steps are intact.
    """
    self.wait()
    steps = self._manager.all_steps()
    if step in steps:
      return
    leaves = fingerprint_lib.named(state)
    manifest = {
      'version': manifest_lib.VERSION,
      'step': step,
      'leaves': {
        name: fingerprint_lib.kind(leaf) for name, leaf in leaves.items()
      },
      # The values get the form in which a restore returns them. A value that
      # JSON cannot represent raises an error here, and not later in a thread.
      'host': json.loads(json.dumps(host, allow_nan=False)),
    }
    if self._run is not None:
      manifest['run_id'] = self._run.run_id
      manifest['config_digest'] = self._run.config_digest
    # Orbax asks which steps to keep before it writes this step's manifest, so
    # the score is noted first.
    self._preservation.note(step, manifest['host'].get('score'))
    numbers = fingerprint_lib.begin(list(leaves.values()))
    items = ocp.args.Composite(
      state=ocp.args.PyTreeSave(leaves),
      manifest=orbax_parts.ManifestSave(manifest, numbers, self._flush),
    )
    self.pending.begin(self._manager, step, items)
    if waits:
      self.wait()

  def check(self) -> None:
    """Raises `SaveFailed` if the last save has failed; does not wait."""
    if self.pending.check():
      self._note_saved()

  def wait(self) -> None:
    """Waits until the last save is on disk.

    Raises:
      SaveFailed: nothing is left of the failed step; older steps are intact.
    """
    if self.pending.wait():
      self._note_saved()

  def steps(self) -> list[int]:
    """Returns all saved steps in order, valid or damaged."""
    return sorted(self._manager.all_steps())

  def best(self) -> int | None:
    """Returns the step with the best score, or None if no step has a score.

    Of several steps with the best score, the newest is returned.
    """
    with orbax_buckets.reaching(self._address):
      return self._preservation.best(self._manager.all_steps())

  def restore_latest(
    self, abstract_state: Any, *, subtree: str = '', step: int | None = None
  ) -> tuple[int, Any, dict[str, Any]] | None:
    """Restores the newest valid step, or only the step `step`.

    A damaged step is renamed to `<step>.corrupt` with a warning, and the next
    older step is tried. The damaged step is kept for inspection. It is renamed
    because the run will save a step with the same number again. A read-only
    checkpointer skips damaged steps.

    Args:
      abstract_state: a pytree of `jax.ShapeDtypeStruct` with shardings, or of
        arrays, with the structure of the state and the sharding of each leaf.
      subtree: the dotted path of a subtree of the state, such as
        'policy.params'. Only this subtree is read; '' reads the whole state.
        Subtrees need a read-only checkpointer that reads nothing but subtrees.
      step: the step to restore. None restores the newest valid step.

    Returns:
      (step, state, host). The leaves have the shardings of `abstract_state`.
      None if there is no step to restore, and no damaged step was found.

    Raises:
      CorruptCheckpoints: damaged steps were found, but no step to restore.
      OtherState: the step that this call would restore is of another run, or
        has another structure, or leaves of other shapes or dtypes. Nothing is
        renamed, because the user may have given the wrong folder.
      NewerSchema: a newer version of this program has saved the step that this
        call would restore. Nothing is renamed.
    """
    self.wait()
    skipped = []
    for saved in reversed(self.steps()):
      if step not in (None, saved):
        continue
      try:
        state, host = self._restore(saved, abstract_state, subtree)
      except _Damaged as error:
        if self._read_only:
          skipped.append(str(saved))
          action = 'passed over'
        else:
          action = f'set aside as {self._set_aside(saved)}'
        _log.warning(
          'checkpoint %d is not valid (%s); %s', saved, error, action
        )
      else:
        return saved, state, host
    # Steps that earlier starts have set aside count too. Otherwise the run
    # would begin again from step 0, and nobody would notice the loss.
    corrupt = [*sorted(self._set_aside_before()), *skipped]
    if corrupt:
      advice = '' if self._read_only else '; --restart begins the run anew'
      raise CorruptCheckpoints(
        f'{self._folder}: only corrupt checkpoints left: '
        f'{", ".join(corrupt)}{advice}'
      )
    return None

  def close(self) -> None:
    """Releases the files after the last save has succeeded or failed."""
    if self.pending.cannot_end:
      return
    try:
      self.wait()
    except pending_save.SaveFailed as error:
      _log.warning('%s', error)
    if not self.pending.cannot_end:
      self._manager.close()

  def _note_saved(self) -> None:
    """Records in the run's folder that a save has succeeded."""
    if self._run is None or self._run.has_saved:
      return
    # If the folder has this record but no checkpoint, later starts know that
    # its checkpoints were lost. If the disk is full, the next save writes the
    # record.
    run = dataclasses.replace(self._run, has_saved=True)
    with contextlib.suppress(OSError):
      if jax.process_index() == 0:
        run_folder.write(self._workdir, run)
      self._run = run

  def _restore(self, step: int, abstract_state: Any, subtree: str):
    """Returns the state and the JSON record of a step.

    Raises:
      _Damaged, OtherState: the step must not be loaded.
    """
    prefix = f'{subtree}.' if subtree else ''
    wanted = {
      f'{prefix}{k}': jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=x.sharding
      )
      for k, x in fingerprint_lib.named(abstract_state).items()
    }
    manifest = self._attempt(lambda: self._read_manifest(step))
    other = manifest_lib.other_run(manifest, self._run)
    if other:
      raise OtherState(
        f'{self._folder}: step {step} is {other}; nothing was loaded'
      )
    # The dtypes are compared before any array is read, because Orbax would cast
    # an array of another dtype silently.
    leaves = manifest['leaves'].items()
    saved = {name: leaf for name, leaf in leaves if name.startswith(prefix)}
    difference = fingerprint_lib.difference(saved, wanted)
    if difference:
      raise OtherState(
        f'{self._folder}: step {step} does not fit this config: {difference}'
      )
    restore = ocp.args.PyTreeRestore(
      wanted,
      restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
      partial_restore=bool(subtree),
    )
    restored = self._attempt(
      lambda: self._manager.restore(
        step, args=ocp.args.Composite(state=restore)
      )['state']
    )
    leaves = [restored[name] for name in wanted]
    for name, number in zip(wanted, fingerprint_lib.fingerprints(leaves)):
      expected = manifest['leaves'][name]['fingerprint']
      if number != expected:
        raise _Damaged(
          f'{name}: fingerprint {number}, but {expected} in the manifest'
        )
    treedef = jax.tree.structure(abstract_state)
    return jax.tree.unflatten(treedef, leaves), manifest['host']

  def _read_manifest(self, step: int) -> dict[str, Any]:
    """Returns the manifest of a step after a check of its digest."""
    try:
      return manifest_lib.read(self._folder / str(step), step)
    except manifest_lib.NewerSchema as error:
      raise manifest_lib.NewerSchema(
        f'{self._folder}: step {step} is {error}; nothing was changed: resume '
        'with the version that saved the step, or with a later version'
      ) from error
    except ValueError as error:
      if isinstance(error.__cause__, PermissionError):
        raise error.__cause__ from None
      raise _Damaged(f'{manifest_lib.FILE}: {error}') from error

  def _attempt(self, read: Callable[[], Any]) -> Any:
    """Returns `read()`; raises `_Damaged` on all processes if one finds damage.

    All processes must set the same step aside and restore the same older step,
    or they would wait in different collectives. So all learn of any damage.
    """
    # A damaged file can make its readers raise any error. An error that is no
    # evidence of damage (no memory, no permission) is raised unchanged.
    result: Any = None
    problem: str | None = None
    try:
      with orbax_buckets.reaching(self._address):
        result = read()
    except (
      MemoryError,
      buckets.BucketError,
      PermissionError,
      manifest_lib.NewerSchema,
      jax.errors.JaxRuntimeError,
    ):
      raise
    except Exception as error:
      text = ' '.join(str(error).split())[:300]
      problem = text if isinstance(error, _Damaged) else repr(text)
    if jax.process_count() > 1:
      failed = multihost_utils.process_allgather(np.bool_(problem is not None))
      if failed.any() and problem is None:
        problem = f'unreadable on process {np.flatnonzero(failed).tolist()}'
    if problem is not None:
      raise _Damaged(problem)
    return result

  def _set_aside_before(self) -> list[str]:
    """Returns the folder names of all steps that were ever set aside."""
    with orbax_buckets.reaching(self._address):
      there = self._folder.iterdir() if self._folder.exists() else ()
      return [path.name for path in there if '.corrupt' in path.name]

  def _set_aside(self, step: int) -> str:
    """Renames the folder of a damaged step, and returns the new name.

    Every process chooses the name, and the first process renames the folder.
    All processes wait for each other before and after the rename, so that no
    process chooses while the new folder already exists.
    """
    source = self._folder / str(step)
    target, count = source.with_suffix('.corrupt'), 1
    while target.exists():
      count += 1
      target = source.with_suffix(f'.corrupt{count}')
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices('checkpoint.set_aside.before')
    if jax.process_index() == 0:
      source.rename(target)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices('checkpoint.set_aside.after')
    self._manager.reload()
    return target.name
