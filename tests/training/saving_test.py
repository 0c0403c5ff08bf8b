"""A run that a signal ends begins no save for which there is no time."""

import signal
import time

import jax.numpy as jnp
import pytest

from stppo_jax.learner import state as state_lib
from stppo_jax.parallel import hosts
from stppo_jax.training import saving
from tests.training import faults
from tests.training import runs

# Orbax reads the leaves concurrently; see checkpoint_test.py.
pytestmark = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)


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
    with faults.at(
      runs.config(**changes), faults.send_at(moment, signal.SIGTERM)
    ):
      assert runs.train(tmp_path, **changes) == code
    output = capsys.readouterr()
    assert said in output.out
    assert 'Traceback' not in output.err
    saved = [path.name for path in (tmp_path / 'checkpoints').iterdir()]
    assert saved == ['2']


class _Checkpoints:
  """Saves one array of a state."""

  def restore(self, checkpointer, start):
    return None

  def save(self, checkpointer, step, state, host, *, waits):
    checkpointer.save(step, state.policy.params, host, waits=waits)


def test_the_time_since_the_signal_counts(tmp_path):
  grace = 10_000.0
  config = runs.config(preemption__grace=grace)
  saver = saving.Saver(config, tmp_path, hosts.ALONE, None)
  policy = state_lib.ModelState({'x': jnp.arange(8)}, None, jnp.zeros(()))
  state = state_lib.TrainState(policy=policy, value=None)
  saver.restore(state, _Checkpoints())

  def save(step, *, left):
    """Saves with so many seconds left, as far as the last save is known."""
    since = time.monotonic() - (grace - left)
    saver.save_in_time(step, state, saving.Extra(), since)

  save(1, left=100.0)
  takes = saver.checkpointer.save_seconds
  assert takes > 0
  with pytest.raises(saving.NoTime, match='are left of preemption.grace=10000'):
    save(2, left=takes / 2)
  save(2, left=takes + 1000)
  assert saver.saved == 2
  save(2, left=0.0)  # there is nothing to do
  saver.save_in_time(3, state, saving.Extra(), None)  # no signal, no limit
  saver.checkpointer.close()
  assert saver.checkpointer.saved == 3
