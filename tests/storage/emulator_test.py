"""The stand-in for Google Cloud Storage keeps the promises of the real one."""

import json
import urllib.error
import urllib.request

import pytest

from tests.storage import emulator


@pytest.fixture
def storage():
  with emulator.served() as storage:
    yield storage


def _ask(storage, method, path, body=b'', **headers):
  """Returns status, headers and body of an answer."""
  url = storage.address + path
  names = {name.replace('_', '-'): text for name, text in headers.items()}
  request = urllib.request.Request(url, body, names, method=method)
  try:
    with urllib.request.urlopen(request) as answer:
      return answer.status, answer.headers, answer.read()
  except urllib.error.HTTPError as error:
    with error:
      return error.code, error.headers, error.read()


def _put(storage, name, body, query=''):
  path = f'/upload/storage/v1/b/mine/o?uploadType=media&name={name}{query}'
  return _ask(storage, 'POST', path, body)[0]


def test_a_precondition_is_kept(storage):
  create = '&ifGenerationMatch=0'
  assert _put(storage, 'a', b'1', create) == 200
  assert _put(storage, 'a', b'2', create) == 412
  known = storage.objects['a'].generation
  assert _put(storage, 'a', b'3', f'&ifGenerationMatch={known}') == 200
  assert _put(storage, 'a', b'4', f'&ifGenerationMatch={known}') == 412
  assert storage.data('a') == b'3' and storage.objects['a'].generation > known
  path = '/storage/v1/b/mine/o/a'
  stale = f'{path}?ifGenerationMatch={known}'
  assert _ask(storage, 'DELETE', stale)[0] == 412
  now = storage.objects['a'].generation
  unchanged = f'{path}?alt=media&ifGenerationNotMatch={now}'
  assert _ask(storage, 'GET', unchanged)[0] == 304
  assert _ask(storage, 'DELETE', path)[0] == 204
  assert _ask(storage, 'GET', path)[0] == 404


def test_a_range_is_a_part(storage):
  storage.put('deep/a b', b'0123456789')
  path = '/storage/v1/b/mine/o/deep%2Fa%20b?alt=media'
  status, headers, body = _ask(storage, 'GET', path, Range='bytes=2-4')
  assert (status, body) == (206, b'234')
  assert headers['Content-Range'] == 'bytes 2-4/10'
  assert _ask(storage, 'GET', path, Range='bytes=-3')[2] == b'789'
  assert _ask(storage, 'GET', path, Range='bytes=10-')[0] == 416


def test_a_listing_has_folders_and_pages(storage):
  for name in ('r/a', 'r/b/1', 'r/b/2', 'r/c', 's'):
    storage.put(name, b'')
  path = '/storage/v1/b/mine/o?prefix=r/&delimiter=/&maxResults=2'
  token, items, prefixes = '', [], []
  while True:
    page = _json(_ask(storage, 'GET', f'{path}&pageToken={token}')[2])
    items += [item['name'] for item in page['items']]
    prefixes += page['prefixes']
    token = page.get('nextPageToken', '')
    if not token:
      break
  assert (items, prefixes) == (['r/a', 'r/c'], ['r/b/'])


def _json(body):
  return json.loads(body)


def test_an_upload_in_pieces_goes_on_after_a_loss(storage):
  begin = '/upload/storage/v1/b/mine/o?uploadType=resumable&name=a'
  place = _ask(storage, 'POST', begin, b'{}')[1]['Location']
  place = place.removeprefix(storage.address)
  send = lambda data, range_: _ask(
    storage, 'PUT', place, data, Content_Range=f'bytes {range_}'
  )
  assert send(b'', '*/6')[0] == 308
  status, headers, _ = send(b'abc', '0-2/6')
  assert (status, headers['Range']) == (308, 'bytes=0-2')
  assert 'a' not in storage.objects
  assert send(b'def', '3-5/6')[0] == 200
  assert storage.data('a') == b'abcdef'


def test_faults_are_what_clients_meet(storage):
  kinds = iter(['503', 'reset', 'lost', None])
  storage.fault = lambda line: (
    emulator.Fault(kind) if (kind := next(kinds)) else None
  )
  assert _put(storage, 'a', b'1') == 503
  for is_there in (False, True):
    with pytest.raises(OSError):
      _put(storage, 'a', b'1')
    assert ('a' in storage.objects) == is_there
  assert _put(storage, 'a', b'2') == 200
