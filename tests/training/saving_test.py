"""A run that a signal ends begins no save for which there is no time."""

import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import pytest

from stppo_jax.learner import state as state_lib
from stppo_jax.training import claim
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


# Another program fills the disk of a run while its third step is written.
_FILLED = """
import os
import shutil
import sys
import time

from stppo_jax import __main__
from tests.training import faults
from tests.training import runs

changes = {'num_steps': 4, 'checkpoint__every': 2, 'evaluate__every': 0}
disk = sys.argv[1]
workdir, other = f'{disk}/run', f'{disk}/other'

def act(moment):
  if moment == ('updated', 3):
    # Nothing is told of the disk while the threads still write step 2.
    end = time.monotonic() + 60
    while not os.path.isdir(f'{workdir}/checkpoints/2'):
      assert time.monotonic() < end
      time.sleep(0.1)
    time.sleep(1)
    with open(other, 'wb') as file:
      file.write(bytes(shutil.disk_usage(disk).free - 50_000))

def train():
  with faults.at(runs.config(**changes), act):
    flags = [*runs.flags(**changes), f'--workdir={workdir}']
    return __main__.main(['train', *flags])

print('train:', train(), flush=True)
saved = [x for x in os.listdir(f'{workdir}/checkpoints') if x.isdigit()]
print('left:', saved, flush=True)
verified = __main__.main(['checkpoint', 'verify', f'--workdir={workdir}'])
print('verify:', verified, flush=True)
os.remove(other)
act = lambda moment: None
print('again:', train(), flush=True)
"""


def _run_on_small_disk(folder, *command):
  """Runs a command that alone sees a disk of 64 MiB at a folder."""
  mount = 'mount -t tmpfs -o size=64m none "$0" && exec "$@"'
  return subprocess.run(
    ['unshare', '--user', '--map-root-user', '--mount', 'sh', '-c', mount]
    + [str(folder), *command],
    capture_output=True,
    text=True,
    cwd=runs.REPO,
  )


@pytest.mark.slow
def test_a_full_disk_is_told_before_the_save_that_fails(tmp_path):
  if _run_on_small_disk(tmp_path, 'true').returncode:
    pytest.skip('this user cannot mount a disk of their own')
  done = _run_on_small_disk(
    tmp_path, sys.executable, '-c', _FILLED, str(tmp_path)
  )
  place = f'{tmp_path}/run'
  warning = f'warning: {place}: a checkpoint takes about '
  lines = done.stdout.splitlines()
  (warned,) = [n for n, line in enumerate(lines) if warning in line]
  assert lines[warned].endswith('; the run ends with its next checkpoint')
  assert lines.index('train: 75') > warned
  assert f'step 4 could not be saved in {place}/checkpoints' in done.stderr
  assert 'Traceback' not in done.stderr
  assert "left: ['2']" in lines and 'verify: 0' in lines
  assert lines[-1] == 'again: 0', done.stderr


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
