"""The folder of a run in a bucket, and the one that stands for it here."""

import threading

import pytest

from stppo_jax import buckets
from stppo_jax.workdir import bucket_files
from stppo_jax.workdir import bucket_folder
from stppo_jax.workdir import run_folder
from tests.storage import emulator
from tests.training import runs

_ADDRESS = 'gs://mine/run'
_ZERO = '000000-000000000000'


def _open(folder, **options):
  folder.mkdir()
  options = {'retry': 0.0} | options
  return bucket_folder.BucketFolder(_ADDRESS, folder, **options)


def _write(folder, name, text, *, adds=False):
  path = folder / name
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(path, 'a' if adds else 'w') as file:
    file.write(text)


def _content(google):
  return {
    name.removeprefix('run/'): found.data.decode()
    for name, found in google.objects.items()
  }


def _files(folder):
  return {
    str(path.relative_to(folder)): path.read_text()
    for path in folder.rglob('*')
    if path.is_file() and path.name != run_folder.ADDRESS
  }


def _commit(google, step, *, is_committed=True):
  """Writes a checkpoint, as Orbax does."""
  folder = f'run/checkpoints/{step}'
  google.put(f'{folder}/state/d/x', b'arrays')
  google.put(f'{folder}/manifest/metadata', b'{}')
  if is_committed:
    google.put(f'{folder}/commit_success.txt', b'')


def test_what_is_written_here_is_in_the_bucket_and_comes_back(google, tmp_path):
  first = _open(tmp_path / 'first')
  first.pull()
  said = 'trajectories-000001.jsonl'
  kept = {x: x for x in ('run.json', 'config.json', 'start/policy/a', said)}
  pushed = kept | {'stacks/host0': 'stacks/host0'}
  only_here = 'lock', 'probe-1', 'a.new', 'policy.partial/b', 'checkpoints/1/x'
  for name in (*pushed, *only_here):
    _write(tmp_path / 'first', name, name)
  first.push()
  assert _content(google) == pushed
  second = _open(tmp_path / 'second')
  second.pull()
  assert _files(tmp_path / 'second') == kept
  # Nothing is written twice, and what is removed here is removed there.
  count = len(google.requests)
  second.push()
  assert len(google.requests) == count
  (tmp_path / 'second' / said).unlink()
  second.push()
  assert said not in _content(google)


def test_lines_come_as_numbered_parts(google, tmp_path):
  here = _open(tmp_path / 'here')
  for line in ('one\n', 'two\n', 'three\n'):
    _write(tmp_path / 'here', 'metrics.jsonl', line, adds=True)
    here.push()
  assert _content(google) == {
    f'metrics.jsonl/{_ZERO}': 'one\n',
    'metrics.jsonl/000000-000000000004': 'two\n',
    'metrics.jsonl/000000-000000000008': 'three\n',
  }
  google.put('run/run.json', b'{}')
  there = _open(tmp_path / 'there')
  there.pull()
  path = tmp_path / 'there' / 'metrics.jsonl'
  assert path.read_text() == 'one\ntwo\nthree\n'
  # Lines that were dropped are in no part any more.
  path.write_text('one\nTWO\n')
  there.push()
  _write(tmp_path / 'there', 'metrics.jsonl', '3\n', adds=True)
  there.push()
  assert {n: x for n, x in _content(google).items() if 'metrics' in n} == {
    'metrics.jsonl/000001-000000000000': 'one\nTWO\n',
    'metrics.jsonl/000001-000000000008': '3\n',
  }
  # Nor do they count if a kill has left them.
  google.put('run/metrics.jsonl/000000-000000000008', b'left\n')
  last = _open(tmp_path / 'last')
  last.pull()
  assert (tmp_path / 'last' / 'metrics.jsonl').read_text() == 'one\nTWO\n3\n'


def test_a_checkpoint_without_its_marker_is_none(google, tmp_path):
  google.put('run/run.json', b'{}')
  for step in (2, 4):
    _commit(google, step)
  _commit(google, 6, is_committed=False)
  here = _open(tmp_path / 'here')
  here.pull()
  assert run_folder.newest_step(tmp_path / 'here') == 4
  assert run_folder.address(tmp_path / 'here') == _ADDRESS
  assert run_folder.address(tmp_path / 'here' / 'start') == f'{_ADDRESS}/start'
  assert run_folder.address(tmp_path) == ''
  with bucket_files.downloaded(_ADDRESS) as folder:
    arrays = folder / 'checkpoints' / '4' / 'state' / 'd' / 'x'
    assert arrays.read_bytes() == bytes(6)  # its size alone
    assert not (folder / 'checkpoints' / '6').exists()
    written = google.objects['run/checkpoints/4/state/d/x'].updated
    assert arrays.stat().st_mtime == pytest.approx(written, abs=0.01)
  with bucket_files.downloaded(_ADDRESS, arrays=True) as folder:
    arrays = folder / 'checkpoints' / '4' / 'state' / 'd' / 'x'
    assert arrays.read_bytes() == b'arrays'


def test_a_start_gets_the_dialogues_that_it_may_drop(google, tmp_path):
  google.put('run/run.json', b'{}')
  for step in (2, 4, 6):
    _commit(google, step)
  for step in range(1, 8):
    google.put(f'run/trajectories-{step:06d}.jsonl', b'said')
  here = _open(tmp_path / 'here')
  here.pull()
  sizes = [
    (tmp_path / 'here' / f'trajectories-{step:06d}.jsonl').stat().st_size
    for step in range(1, 8)
  ]
  assert sizes == [0, 0, 0, 0, 4, 4, 4]
  here.push()
  assert google.data('run/trajectories-000001.jsonl') == b'said'
  google.put('run/aside-1/metrics.jsonl', b'')
  other = _open(tmp_path / 'other')
  other.pull()
  assert run_folder.make_aside(tmp_path / 'other').name == 'aside-2'


def test_files_of_others_are_left_alone(google, tmp_path):
  google.put('run/lease', b'{}')
  google.put('run/compiled/program', b'x')
  _open(tmp_path / 'one').pull()
  google.put('run/thesis.txt', b'mine')
  with pytest.raises(bucket_folder.OtherFiles) as error:
    _open(tmp_path / 'two').pull()
  assert 'thesis.txt' in str(error.value) and error.value.exit_code == 2


def test_a_model_is_not_seen_before_it_is_complete(google, tmp_path):
  here = _open(tmp_path / 'here')
  for name in ('config.json', 'model.safetensors', 'tokenizer.json'):
    _write(tmp_path / 'here', f'policy/{name}', 'x')
  here.push()
  (*others, last) = google.objects
  assert len(others) == 2 and last == 'run/policy/config.json'


@pytest.fixture
def impatient(monkeypatch):
  """Lets each request to the bucket be tried once, and rounds come soon."""
  import gcsfs.retry

  async def sleep(seconds):
    del seconds

  monkeypatch.setattr(gcsfs.retry.asyncio, 'sleep', sleep)
  monkeypatch.setattr(bucket_folder, '_EVERY', 0.05)
  monkeypatch.setattr(bucket_folder, '_PAUSE', 0.05)


def _outage(_):
  return emulator.Fault('503')


@pytest.mark.usefixtures('impatient')
def test_files_wait_here_while_the_bucket_is_out_of_reach(
  google, tmp_path, said
):
  here = _open(tmp_path / 'here', retry=30)
  with here.pushed():
    google.fault = _outage
    _write(tmp_path / 'here', 'run.json', 'x')
    runs.wait(lambda: said)
    assert not google.objects
    google.fault = lambda line: None
    runs.wait(lambda: google.objects)
    runs.wait(lambda: len(said) == 2)
    google.fault = _outage
    _write(tmp_path / 'here', 'b', 'x')
    threading.Timer(0.5, setattr, (google, 'fault', lambda line: None)).start()
  assert _content(google) == {'run.json': 'x', 'b': 'x'}
  assert 'the run goes on' in said[0] and 'in reach again' in said[1]


@pytest.mark.usefixtures('impatient')
def test_the_end_of_a_run_does_not_wait_for_ever(google, tmp_path):
  here = _open(tmp_path / 'here', retry=0.2)
  google.fault = _outage
  with pytest.raises(buckets.BucketError) as error, here.pushed():
    _write(tmp_path / 'here', 'run.json', 'x')
  assert error.value.exit_code == 75
  # An error of the run is told, not that of the bucket.
  with pytest.raises(KeyError), here.pushed():
    raise KeyError
