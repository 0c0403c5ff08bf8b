"""Checkpoints in a bucket: committed last, damaged ones set aside."""

import contextlib
import functools

import jax
import numpy as np
import pytest

from stppo_jax import buckets
from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.records.checkpoints import pending_save
from stppo_jax.workdir import lock
from stppo_jax.workdir import run_folder
from tests.storage import emulator

_CHECKPOINTS = 'run/checkpoints'


@pytest.fixture
def workdir(google, tmp_path):
  """A folder that stands for one in a bucket."""
  del google
  (tmp_path / run_folder.ADDRESS).write_text('gs://mine/run')
  run_folder.mark(tmp_path, 'train')
  return tmp_path


@functools.cache
def _state():
  leaves = {'a': np.full((4, 2), 2, np.float32), 'b': np.arange(2)}
  return jax.device_put(leaves, jax.devices()[0])


def _save(workdir, *steps, **hooks):
  checkpoints = checkpoint.Checkpointer(workdir, **hooks)
  with contextlib.closing(checkpoints):
    for step in steps:
      checkpoints.save(step, _state(), {'step': step})


def _restore(workdir, **options):
  checkpoints = checkpoint.Checkpointer(workdir, **options)
  with contextlib.closing(checkpoints):
    return checkpoints.restore_latest(_state())


def _names(google):
  return {
    name.removeprefix(f'{_CHECKPOINTS}/').split('/')[0]
    for name in google.objects
  }


def test_a_damaged_step_is_set_aside_and_the_one_before_is_read(
  google, workdir, caplog
):
  assert _restore(workdir, read_only=True) is None
  _save(workdir, 1, 2)
  assert _names(google) == {'1', '2'} and not (workdir / 'checkpoints').exists()
  assert run_folder.read(workdir).has_saved
  step, state, host = _restore(workdir)
  assert (step, host) == (2, {'step': 2})
  assert jax.tree.all(jax.tree.map(np.array_equal, state, _state()))
  google.put(f'{_CHECKPOINTS}/2/manifest/metadata', b'{}')
  step, _, _ = _restore(workdir, read_only=True)
  assert step == 1 and _names(google) == {'1', '2'}
  step, _, _ = _restore(workdir)
  assert step == 1 and _names(google) == {'1', '2.corrupt'}
  assert 'checkpoint 2 is not valid' in caplog.text
  _save(workdir, 2)
  assert _restore(workdir)[0] == 2
  for name in ('1', '2'):
    google.put(f'{_CHECKPOINTS}/{name}/manifest/metadata', b'{}')
  with pytest.raises(checkpoint.CorruptCheckpoints, match='2.corrupt, 2.corr'):
    _restore(workdir)


def test_a_bucket_out_of_reach_is_no_damage(google, workdir, monkeypatch):
  import gcsfs.retry

  async def sleep(seconds):
    del seconds

  monkeypatch.setattr(gcsfs.retry.asyncio, 'sleep', sleep)
  _save(workdir, 1)
  google.fault = lambda line: (
    emulator.Fault('503') if 'manifest%2Fmetadata' in line else None
  )
  with pytest.raises(buckets.BucketError) as error:
    _restore(workdir)
  assert error.value.exit_code == 75 and _names(google) == {'1'}
  google.fault = lambda line: None
  assert _restore(workdir)[0] == 1


def test_a_step_is_committed_last_of_all_and_only_by_the_holder(
  google, workdir
):
  marker, calls = f'{_CHECKPOINTS}/1/commit_success.txt', []

  def flush():
    calls.append(('flush', marker in google.objects))

  def check():
    arrays = any('/1/state/d/' in name for name in google.objects)
    calls.append(('check', marker in google.objects, arrays))

  _save(workdir, 1, flush=flush, check=check)
  assert calls == [('flush', False), ('check', False, True)]
  assert list(google.objects)[-1] == marker

  def lose():
    raise lock.Lost('taken')

  with pytest.raises(pending_save.SaveFailed, match='taken'):
    _save(workdir, 2, check=lose)
  assert f'{_CHECKPOINTS}/2/commit_success.txt' not in google.objects
  assert _restore(workdir)[0] == 1  # and what is left of step 2 is removed
  assert _names(google) == {'1'}
