"""A run that a signal ends begins no save for which there is no time."""

import shutil
import signal
import time

import jax.numpy as jnp
import pytest

from stppo_jax.learner import state as state_lib
from stppo_jax.training import claim
from stppo_jax.training import saving
from tests.training import faults
from tests.training import runs


@pytest.mark.slow
def test_no_save_is_begun_after_the_grace_seconds(tmp_path, capsys):
  alarm = {'finish_ratio': 2.0, 'stop': ('finish_ratio',), 'stop_after': 1}
  alarm = {f'alarms__{key}': value for key, value in alarm.items()}
  for moment, changes, code, said in (
    # Its save has begun, and is waited for.
    (('collect', 3), {}, 75, 'interrupted after step 2, saved'),
    (('collect', 2), {}, 75, 'interrupted after step 3, not saved: the last'),
    # An alarm ends the run before it knows of the signal.
    (('updated', 1), alarm, 76, 'step 3 is not saved: the last save took'),
  ):
    changes |= {
      'num_steps': 4,
      'checkpoint__every': 2,
      'evaluate__every': 0,
      'preemption__grace': 1e-6,
    }
    send = faults.send_at(moment, signal.SIGTERM)
    assert runs.train(tmp_path, send, **changes) == code
    assert said in capsys.readouterr().out
    saved = [path.name for path in (tmp_path / 'checkpoints').iterdir()]
    assert saved == ['2']


@pytest.mark.slow
def test_a_full_disk_is_told_before_the_save_that_fails(
  tmp_path, monkeypatch, capsys
):
  """Another program fills the disk while the third step is written."""
  usage = shutil.disk_usage(tmp_path)
  changes = {'num_steps': 4, 'checkpoint__every': 2, 'evaluate__every': 0}
  saved = tmp_path / 'checkpoints' / '2'

  def act(moment):
    if moment == ('updated', 3):
      # Nothing is told of the disk while threads still write step 2.
      runs.wait(saved.is_dir)
      time.sleep(1)
      full = usage._replace(free=1000)
      monkeypatch.setattr(shutil, 'disk_usage', lambda _: full)
    if moment == ('updated', 4):
      faults.fill_disk()

  with faults.room_in_the_end():
    assert runs.train(tmp_path, act, **changes) == 75
  out, err = capsys.readouterr()
  assert out.count(f'warning: {tmp_path}: a checkpoint takes about ') == 1
  assert f'step 4 could not be saved in {tmp_path}/checkpoints' in err
  left = {path.name for path in saved.parent.iterdir()}
  assert '2' in left and '4' not in left
  monkeypatch.undo()
  assert runs.train(tmp_path, **changes) == 0


class _Checkpoints:
  """Saves one array of a state."""

  def restore(self, checkpointer, start):
    return None

  def content(self, step, state):
    return state.policy.params, {}


def test_the_time_since_the_signal_counts(tmp_path):
  grace = 10_000.0
  config = runs.config(preemption__grace=grace)
  policy = state_lib.ModelState({'x': jnp.arange(8)}, None, jnp.zeros(()))
  state = state_lib.TrainState(policy=policy, value=None)

  def last(step):
    return saving.LastStep(saver, 'step', step, state, saving.Extra())

  def save(step, *, left):
    """Saves with so many seconds left, as far as the last save is known."""
    since = time.monotonic() - (grace - left)
    saver.save_in_time(last(step), since)

  with claim.claimed(config, tmp_path) as folder:
    saver = saving.Saver(config, folder, _Checkpoints(), state)
    assert saver.restore('step').done == 0
    save(1, left=100.0)
    takes = saver.checkpointer.pending.seconds
    assert takes > 0
    with pytest.raises(
      saving.NoTime, match='are left of preemption.grace=10000'
    ):
      save(2, left=takes / 2)
    save(2, left=takes + 1000)
    assert saver.saved == 2
    save(2, left=0.0)  # there is nothing to do
    saver.save_in_time(last(3), None)  # no signal, no limit
    saver.checkpointer.close()
  assert saver.checkpointer.pending.saved == 3
