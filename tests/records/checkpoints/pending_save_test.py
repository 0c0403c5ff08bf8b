"""A save counts as saved once it is on disk, whoever asks for it."""

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from stppo_jax.records.checkpoints import pending_save


def test_a_save_that_is_being_begun_is_not_saved(tmp_path):
  pending = pending_save.PendingSave()
  answers = []

  class Manager(ocp.CheckpointManager):
    """Asks how the save goes before it begins, as a rescue may do."""

    def save(self, step, *args, **kwargs):
      with pytest.raises(pending_save.SaveFailed, match='beginning a save'):
        pending.wait()
      answers.append((pending.saved, pending.check()))
      return super().save(step, *args, **kwargs)

  with Manager(tmp_path / 'checkpoints') as manager:
    items = ocp.args.PyTreeSave({'x': jnp.arange(8)})
    pending.begin(manager, 1, items)
    assert answers == [(0, False)] and pending.is_going_on
    assert pending.wait() and pending.saved == 1
    assert manager.all_steps() == [1]
