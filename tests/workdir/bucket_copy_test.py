"""The folder of a run and its copy in a bucket."""

import contextlib
import json
import os
import shutil
import threading
import time

import fsspec
import pytest

from stppo_jax import buckets
from stppo_jax import streams
from stppo_jax.workdir import bucket_copy
from stppo_jax.workdir import run_folder

_ADDRESS = 'memory://bucket/run'


@pytest.fixture(autouse=True)
def _emptied():
  yield
  files = fsspec.filesystem('memory')
  if files.exists('/bucket'):
    files.rm('/bucket', recursive=True)


def _write(folder, files):
  for name, text in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _run(folder, *, steps, run_id='r1', **files):
  """Makes the folder of a run with checkpoints of some steps."""
  files = {f'{name}.json': text for name, text in files.items()}
  for step in steps:
    files[f'checkpoints/{step}/state/d'] = f'arrays of {step}'
    files[f'checkpoints/{step}/manifest/metadata'] = '{}'
  config = '{"algorithm": {}, "model": {}, "rollout": {}}'  # of train
  _write(folder, {'config.json': config, 'metrics.jsonl': 'lines', **files})
  run_folder.write(folder, run_folder.Run('train', run_id, 'digest'))


def _content(folder):
  return {
    str(path.relative_to(folder)): path.read_text()
    for path in folder.rglob('*')
    if path.is_file()
  }


def _copy(folder):
  """Copies a run once, as one that ends at once does; returns what is said."""
  lines = []
  with streams.logged(lines.append), bucket_copy.copying(_ADDRESS, folder):
    pass
  return lines


def test_a_run_goes_to_a_bucket_and_back(tmp_path, said):
  first, second = tmp_path / 'first', tmp_path / 'second'
  _run(first, steps=(2, 4), heartbeat='{}')
  ours = _content(first)
  _write(
    first,
    {
      'lock': 'pid',
      'compiled/program': 'x',
      'aside-1/metrics.jsonl': 'x',
      'metrics.jsonl.new': 'x',
      'checkpoints/6.orbax-checkpoint-tmp/state/d': 'x',
      'checkpoints/2.corrupt/state/d': 'x',
    },
  )
  assert _copy(first) == []
  bucket = buckets.Bucket(_ADDRESS)
  assert bucket.sizes().keys() == ours.keys() | {'copied.json'}
  second.mkdir()
  bucket_copy.fetch(_ADDRESS, second)
  assert _content(second) == ours
  assert said == [f'{second}: brought here from {_ADDRESS}, step 4']


def test_only_what_has_changed_is_copied_again(tmp_path, monkeypatch, said):
  folder = tmp_path / 'run'
  _run(folder, steps=(2,))
  uploaded = []
  upload = buckets.Bucket.upload

  def recorded(self, path, name):
    uploaded.append(name)
    upload(self, path, name)

  monkeypatch.setattr(buckets.Bucket, 'upload', recorded)
  monkeypatch.setattr(bucket_copy, '_EVERY', 0.05)
  rounds = threading.Semaphore(0)
  write = buckets.Bucket.write

  def counted(self, name, data):
    write(self, name, data)
    rounds.release()

  monkeypatch.setattr(buckets.Bucket, 'write', counted)
  with bucket_copy.copying(_ADDRESS, folder):
    assert rounds.acquire(timeout=20)
    first, uploaded[:] = list(uploaded), []
    # Metrics before the checkpoint, all before the record of what is complete.
    assert first.index('metrics.jsonl') < first.index('checkpoints/2/state/d')
    _run(folder, steps=(4,))
    shutil.rmtree(folder / 'checkpoints' / '2')
    with open(folder / 'metrics.jsonl', 'a') as file:
      file.write('more')
    assert rounds.acquire(timeout=20) and rounds.acquire(timeout=20)
  assert said == []
  names = set(buckets.Bucket(_ADDRESS).sizes())
  assert 'checkpoints/4/state/d' in names
  assert not any(name.startswith('checkpoints/2/') for name in names)
  assert 'checkpoints/2/state/d' not in uploaded
  # A checkpoint that an earlier start has copied is not copied again.
  uploaded.clear()
  _copy(folder)
  assert not any(name.startswith('checkpoints/') for name in uploaded)
  assert 'metrics.jsonl' in uploaded


def test_a_checkpoint_that_is_not_complete_in_the_bucket_is_left_there(
  tmp_path,
):
  first, second = tmp_path / 'first', tmp_path / 'second'
  _run(first, steps=(2,))
  _copy(first)
  # As if this machine had been lost while it copied the next one.
  buckets.Bucket(_ADDRESS).write('checkpoints/4/state/d', b'arr')
  second.mkdir()
  bucket_copy.fetch(_ADDRESS, second)
  assert os.listdir(second / 'checkpoints') == ['2']


def test_the_side_that_is_ahead_wins(tmp_path, said):
  first, second = tmp_path / 'first', tmp_path / 'second'
  _run(first, steps=(2, 4))
  _copy(first)
  _run(second, steps=(2, 6))
  before = _content(second)
  bucket_copy.fetch(_ADDRESS, second)
  assert _content(second) == before and said == []
  third = tmp_path / 'third'
  _run(third, steps=(2,))
  bucket_copy.fetch(_ADDRESS, third)
  assert said == [
    f'{third}: brought here from {_ADDRESS}, step 4; what the folder held is '
    f'in {third}/aside-1'
  ]
  assert sorted(os.listdir(third / 'checkpoints')) == ['2', '4']


def test_the_copy_of_another_run_is_refused(tmp_path):
  first, second = tmp_path / 'first', tmp_path / 'second'
  _run(first, steps=(2,))
  _copy(first)
  _run(second, steps=(), run_id='r2')
  before = _content(second)
  with pytest.raises(bucket_copy.OtherRun) as error:
    bucket_copy.fetch(_ADDRESS, second)
  assert str(error.value).startswith(
    f'writer.copy_to={_ADDRESS}: holds a different run from {second}; '
  )
  assert error.value.exit_code == 2 and _content(second) == before


@pytest.mark.parametrize('moved', [0, 1, 2, 3])
def test_a_fetch_that_was_killed_is_made_again(tmp_path, monkeypatch, moved):
  first, second = tmp_path / 'first', tmp_path / 'second'
  _run(first, steps=(2,))
  _copy(first)
  second.mkdir()
  rename, count = type(second).rename, iter(range(9))

  def killed(path, target):
    if next(count) == moved:
      raise KeyboardInterrupt
    return rename(path, target)

  with monkeypatch.context() as patch:
    patch.setattr(type(second), 'rename', killed)
    with pytest.raises(KeyboardInterrupt):
      bucket_copy.fetch(_ADDRESS, second)
  assert not (second / 'run.json').exists()
  # The checks of the command let such a folder pass.
  found = run_folder.problems(second, flag='-', command='train', reads={})
  assert found == []
  bucket_copy.fetch(_ADDRESS, second)
  kept = {n: x for n, x in _content(second).items() if 'aside-' not in n}
  assert kept == _content(first)


def test_only_what_a_copy_has_is_brought(tmp_path):
  first, second = tmp_path / 'first', tmp_path / 'second'
  _run(first, steps=(2,))
  _copy(first)
  files = fsspec.filesystem('memory')
  strange = ('lock', 'compiled/x', 'aside-1/x', 'checkpoints/x/y', '../evil')
  # Neither the start of this version nor that of 0.2 is complete.
  starts = ('start/policy/config.json', 'start/config.json')
  for name in (*strange, *starts):
    files.store[f'/bucket/run/{name}'] = files.store['/bucket/run/run.json']
  second.mkdir()
  bucket_copy.fetch(_ADDRESS, second)
  assert _content(second) == _content(first)
  assert sorted(os.listdir(tmp_path)) == ['first', 'second']


def test_only_the_policy_of_a_start_that_is_a_run_is_copied(tmp_path):
  first, second = tmp_path / 'first', tmp_path / 'second'
  _run(first, steps=(2,))
  _run(first / 'start', steps=(1,))
  _write(first / 'start', {'policy/config.json': '{}', 'policy/m': 'arrays'})
  _copy(first)
  second.mkdir()
  bucket_copy.fetch(_ADDRESS, second)
  shutil.rmtree(first / 'start' / 'checkpoints')
  for name in ('config.json', 'metrics.jsonl', 'run.json'):
    (first / 'start' / name).unlink()
  assert _content(second) == _content(first)
  # The start of 0.2, or of another run, is no run and is copied as a whole.
  third, fourth = tmp_path / 'third', tmp_path / 'fourth'
  _run(third, steps=(4,))
  run_folder.write(third, run_folder.read(first))
  _write(third, {'start/config.json': '{}', 'start/m': 'arrays'})
  _copy(third)
  fourth.mkdir()
  bucket_copy.fetch(_ADDRESS, fourth)
  kept = {n: x for n, x in _content(fourth).items() if 'start/policy' not in n}
  assert kept == _content(third)


def test_files_that_are_no_run_are_left_alone(tmp_path):
  folder, bucket = tmp_path / 'run', buckets.Bucket(_ADDRESS)
  _run(folder, steps=(2,))
  bucket.write('checkpoints/900/state/d', b'precious')
  with pytest.raises(bucket_copy.OtherRun) as error:
    bucket_copy.fetch(_ADDRESS, folder)
  assert str(error.value) == (
    f'writer.copy_to={_ADDRESS}: holds files that are no run, such as '
    'checkpoints/900/state/d; name another address'
  )
  assert bucket.sizes().keys() == {'checkpoints/900/state/d'}


def test_a_run_without_a_checkpoint_gives_way(tmp_path, said):
  first, second, third = (tmp_path / name for name in ('a', 'b', 'c'))
  _run(first, steps=())
  _copy(first)
  second.mkdir()
  bucket_copy.fetch(_ADDRESS, second)
  assert os.listdir(second) == [] and 'without a checkpoint' in said[0]
  _run(second, steps=(2,), run_id='r2')  # begins anew there
  assert _copy(second) == []
  third.mkdir()
  bucket_copy.fetch(_ADDRESS, third)
  assert _content(third) == _content(second)
  # The first one is not mixed with it when it comes back.
  lines = _copy(first)
  assert lines[-1].startswith(f'some files of {first} are not in {_ADDRESS} (')
  assert 'holds another run' in lines[-1]


def test_a_restart_needs_another_address(tmp_path):
  folder = tmp_path / 'run'
  bucket_copy.check_restart(_ADDRESS, True)
  _run(folder, steps=())
  _copy(folder)
  bucket_copy.check_restart(_ADDRESS, False)
  bucket_copy.check_restart('', True)
  with pytest.raises(bucket_copy.OtherRun, match='holds a run already'):
    bucket_copy.check_restart(_ADDRESS, True)


def test_damage_here_removes_nothing_there(tmp_path):
  folder, other = tmp_path / 'run', tmp_path / 'other'
  _run(folder, steps=(2, 4))
  _copy(folder)
  whole = _content(folder)
  checkpoints = folder / 'checkpoints'
  (checkpoints / '2').rename(checkpoints / '2.corrupt')
  (checkpoints / '4' / 'state' / 'd').write_text('damaged')
  _copy(folder)
  (checkpoints / '4').rename(checkpoints / '4.corrupt')
  _copy(folder)
  other.mkdir()
  bucket_copy.fetch(_ADDRESS, other)
  assert _content(other) == whole


def test_a_checkpoint_that_goes_while_it_is_copied_is_not_complete(
  tmp_path, monkeypatch
):
  folder, other = tmp_path / 'run', tmp_path / 'other'
  _run(folder, steps=(2,))
  _copy(folder)
  _run(folder, steps=(4,))
  shutil.rmtree(folder / 'checkpoints' / '2')
  upload = buckets.Bucket.upload

  def slow(self, path, name):
    if name == 'checkpoints/4/state/d':  # the run has removed it
      shutil.rmtree(folder / 'checkpoints' / '4')
    upload(self, path, name)

  monkeypatch.setattr(buckets.Bucket, 'upload', slow)
  assert _copy(folder) == []
  other.mkdir()
  bucket_copy.fetch(_ADDRESS, other)
  assert os.listdir(other / 'checkpoints') == ['2']


def test_a_file_that_cannot_be_copied_holds_up_no_other(tmp_path, monkeypatch):
  folder = tmp_path / 'run'
  _run(folder, steps=(2,))
  upload = buckets.Bucket.upload

  def fail(self, path, name):
    if name == 'config.json':
      raise buckets.BucketError(f'{_ADDRESS}: too large')
    upload(self, path, name)

  monkeypatch.setattr(buckets.Bucket, 'upload', fail)
  lines = _copy(folder)
  assert lines[-1].startswith(f'some files of {folder} are not in {_ADDRESS} (')
  assert 'checkpoints/2/state/d' in buckets.Bucket(_ADDRESS).sizes()


def test_a_bucket_out_of_reach_stops_nothing(tmp_path, monkeypatch):
  folder = tmp_path / 'run'
  _run(folder, steps=(2,))
  failing = threading.Event()
  failing.set()
  upload = buckets.Bucket.upload

  def fail(self, path, name):
    if failing.is_set():
      raise buckets.BucketError(f'{_ADDRESS}: no network')
    upload(self, path, name)

  monkeypatch.setattr(buckets.Bucket, 'upload', fail)
  problem = f'{_ADDRESS}: no network'
  told = (
    f'writer.copy_to: cannot copy to {problem}; the run goes on, and tries '
  )
  assert _copy(folder) == [
    f'{told}again every 15 s',
    f'some files of {folder} are not in {_ADDRESS} ({problem}); run the same '
    'command on this machine again to copy them',
  ]
  assert buckets.Bucket(_ADDRESS).read('copied.json') == b''
  monkeypatch.setattr(bucket_copy, '_EVERY', 0.01)
  lines, again = [], threading.Event()

  def show(line):
    lines.append(line)
    failing.clear()
    if len(lines) == 2:
      again.set()

  with streams.logged(show), bucket_copy.copying(_ADDRESS, folder):
    assert again.wait(20)
  assert lines == [f'{told}again every 0 s', 'writer.copy_to: copied again']
  record = json.loads(buckets.Bucket(_ADDRESS).read('copied.json'))
  assert record == {'folders': ['checkpoints/2']}


@pytest.mark.parametrize('limit', ['grace', 'error'])
def test_a_slow_bucket_does_not_hold_up_the_end(
  tmp_path, monkeypatch, said, limit
):
  folder = tmp_path / 'run'
  _run(folder, steps=(2,))
  free = threading.Event()
  monkeypatch.setattr(bucket_copy, '_AFTER_ERROR', 0.2)
  monkeypatch.setattr(
    buckets.Bucket, 'upload', lambda self, path, name: free.wait(60)
  )
  end = time.monotonic() + {'grace': 2.5, 'error': 60.0}[limit]
  left = lambda: end - time.monotonic()
  with contextlib.suppress(KeyError):
    with bucket_copy.copying(_ADDRESS, folder, left):
      if limit == 'error':
        raise KeyError
  free.set()
  for thread in threading.enumerate():
    if thread.name == 'bucket':
      thread.join(20)
  assert 'no time is left' in said[-1]
  # What nobody waits for does not go on.
  assert buckets.Bucket(_ADDRESS).sizes() == {}
