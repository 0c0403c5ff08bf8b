"""A save counts as saved once it is on disk, whoever asks for it."""

import time

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from stppo_jax.records.checkpoints import orbax_errors
from stppo_jax.records.checkpoints import pending_save


def test_a_save_that_is_being_begun_is_not_saved(tmp_path):
  pending = pending_save.PendingSave()
  answers = []

  class Manager(ocp.CheckpointManager):
    """Asks how the save goes before it begins, as a forced exit may do."""

    def save(self, step, *args, **kwargs):
      with pytest.raises(pending_save.SaveFailed, match='beginning a save'):
        pending.wait()
      answers.append((pending.saved, pending.check()))
      return super().save(step, *args, **kwargs)

  with Manager(tmp_path / 'checkpoints') as manager:
    items = ocp.args.PyTreeSave({'x': jnp.arange(8)})
    pending.begin(manager, 1, items)
    assert answers == [(0, False)] and pending.step
    assert pending.wait() and pending.saved == 1
    assert manager.all_steps() == [1]


class _Saves:
  """A manager that saves for as long as it is told."""

  directory = 'checkpoints'

  def __init__(self):
    self.ends = 0.0

  def save(self, step, *, args, force):
    pass

  def is_saving_in_progress(self):
    return time.monotonic() < self.ends

  def wait_until_finished(self):
    time.sleep(max(self.ends - time.monotonic(), 0.0))

  def reload(self):
    pass


def test_a_save_that_goes_on_takes_as_long_as_the_one_before():
  pending, manager = pending_save.PendingSave(), _Saves()
  manager.ends = time.monotonic() + 0.1
  pending.begin(manager, 1, None)
  assert pending.seconds_left == 0.0  # nothing is known of the first one
  assert pending.wait() and pending.seconds >= 0.1
  pending.seconds = 1000.0  # as if it had taken so long
  manager.ends = time.monotonic() + 1000
  pending.begin(manager, 2, None)
  assert not pending.check() and 900 < pending.seconds_left <= 1000
  pending.note_end()  # its files are written
  assert pending.seconds_left == 0.0


def test_one_of_several_hosts_learns_of_its_own_error_at_once():
  """Orbax goes on to wait for the parts of the other hosts."""
  for ask in (pending_save.PendingSave.check, pending_save.PendingSave.wait):
    pending, manager = pending_save.PendingSave(num_hosts=2), _Saves()
    manager.ends = time.monotonic() + 1200
    pending.begin(manager, 3, None)
    assert not pending.check() and not pending.cannot_end
    orbax_errors.logged.append(OSError('no space'))
    with pytest.raises(pending_save.SaveFailed, match='step 3 could not be'):
      ask(pending)
    assert pending.cannot_end and not pending.step
