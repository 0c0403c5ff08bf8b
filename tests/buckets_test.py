"""Buckets, whose requests a file system of fsspec answers here."""

from concurrent import futures
import pathlib
import sys
import threading
import time

import fsspec
from fsspec.implementations import memory
import pytest

from stppo_jax import buckets
from stppo_jax import streams


@pytest.fixture
def address():
  """The address of an empty folder that lives in memory."""
  yield 'memory://bucket/data'
  fsspec.filesystem('memory').rm('/bucket', recursive=True)


@pytest.mark.parametrize('place', ['gs://bucket/run', 'memory://a'])
def test_an_address_has_a_protocol(place):
  assert buckets.is_address(place)


@pytest.mark.parametrize(
  'place',
  [
    *('runs/7', '/runs/7', '', 'C://', 'gs:/bucket'),
    *('s3://key:secret@bucket', 'gs://bucket/run?token=x'),
  ],
)
def test_other_places_are_no_addresses(place):
  assert not buckets.is_address(place)


def test_objects_are_files(address, tmp_path):
  bucket = buckets.Bucket(address)
  bucket.write('a.json', b'{}')
  source = tmp_path / 'here' / 'deep' / 'er' / 'b'
  source.parent.mkdir(parents=True)
  source.write_bytes(b'abc')
  bucket.upload(['deep/er/b'], tmp_path / 'here')
  entries = bucket.entries()
  sizes = {name: entry.size for name, entry in entries.items()}
  assert sizes == {'a.json': 2, 'deep/er/b': 3}
  assert bucket.read('a.json') == b'{}' and bucket.read('none') == b''
  bucket.download(['deep/er/b', 'a.json'], tmp_path / 'new')
  assert (tmp_path / 'new/deep/er/b').read_bytes() == b'abc'
  assert (tmp_path / 'new/a.json').read_bytes() == b'{}'
  assert all(time.time() - x.time < 60 for x in entries.values())
  bucket.remove('a.json')
  bucket.remove('a.json')
  assert {*bucket.entries()} == {'deep/er/b'}
  with pytest.raises(buckets.BucketError, match=f'^{address}: ') as error:
    bucket.download(['missing'], tmp_path)
  assert error.value.exit_code == 75


@pytest.mark.parametrize(
  ('address', 'said'),
  [('nowhere://a/b', 'not known: nowhere'), ('s3://a/b', "install '.[s3]'")],
)
def test_a_bucket_that_cannot_be_used_is_one_line(monkeypatch, address, said):
  monkeypatch.setitem(sys.modules, 's3fs', None)
  with pytest.raises(buckets.BucketError) as error:
    buckets.Bucket(address)
  line = str(error.value)
  assert line.startswith(f'{address}: ') and said in line
  assert error.value.exit_code == 2


def test_a_folder_of_a_bucket_is_downloaded_once(
  address, tmp_path, monkeypatch
):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  bucket = buckets.Bucket(address)
  bucket.write('nq/test.jsonl', b'one\n')
  bucket.write('nq/train.jsonl', b'two\n')
  files = fsspec.filesystem('memory')
  files.store['/bucket/data/../evil'] = files.store[
    '/bucket/data/nq/test.jsonl'
  ]
  folder = buckets.local_folder(address)
  assert sorted(path.name for path in tmp_path.rglob('*.jsonl')) == [
    *('test.jsonl', 'test.jsonl', 'train.jsonl', 'train.jsonl')
  ]  # and their versions
  assert not list(tmp_path.rglob('evil'))
  kept = folder / 'nq' / 'train.jsonl'
  assert kept.read_bytes() == b'two\n'
  before = kept.stat().st_mtime_ns
  bucket.write('nq/test.jsonl', b'two\n')  # of the same size
  (folder / 'old.jsonl').write_text('the bucket had it once')
  assert buckets.local_folder(address) == folder
  buckets.local_folder.cache_clear()  # as in another process
  assert buckets.local_folder(address) == folder
  assert (folder / 'nq' / 'test.jsonl').read_bytes() == b'two\n'
  assert not (folder / 'old.jsonl').exists()
  assert kept.stat().st_mtime_ns == before
  assert buckets.local_folder('some/folder') == pathlib.Path('some/folder')
  with pytest.raises(buckets.BucketError, match='nothing is stored'):
    buckets.local_folder(f'{address}/none')


def test_one_of_several_processes_downloads(address, tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  buckets.Bucket(address).write('a', b'one\n')
  download, calls = buckets.Bucket.download, []

  def slow(self, names, folder):
    calls.append(names)
    time.sleep(0.1)
    download(self, names, folder)

  monkeypatch.setattr(buckets.Bucket, 'download', slow)
  buckets.local_folder.cache_clear()
  with futures.ThreadPoolExecutor() as pool:
    # Without the cache of this process, threads are as processes.
    found = pool.map(buckets.local_folder.__wrapped__, [address] * 3)
    assert [(x / 'a').read_text() for x in found] == ['one\n'] * 3
  assert len(calls) == 1


class _Slow(memory.MemoryFileSystem):
  """A bucket that answers once a line has been printed."""

  protocol = 'slow'
  printed = threading.Event()

  def find(self, *args, **options):
    assert self.printed.wait(20)
    return super().find(*args, **options)


def test_a_bucket_that_does_not_answer_is_announced(monkeypatch):
  lines, timer = [], threading.Timer
  monkeypatch.setattr(threading, 'Timer', lambda _, *call: timer(0.05, *call))

  def say(line):
    lines.append(line)
    _Slow.printed.set()

  monkeypatch.setattr(streams, 'say', say)
  fsspec.register_implementation('slow', _Slow, clobber=True)
  assert not buckets.Bucket('slow://a/b').entries()
  assert lines == ['slow://a/b: the bucket has not answered yet; retrying']
