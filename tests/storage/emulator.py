"""A stand-in for Google Cloud Storage, with faults, for tests.

It answers the JSON API as gcsfs, google-cloud-storage and TensorStore speak it:
objects with generations and preconditions, ranges, listings in pages, and
uploads in one request or in pieces. Everything is kept in memory.

https://cloud.google.com/storage/docs/json_api/v1
"""

import asyncio
import base64
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import datetime
import email.utils
import hashlib
import json
import random
import re
import threading
import time
from typing import NamedTuple
import urllib.parse

from aiohttp import web

BUCKET = 'mine'
_OBJECT = re.compile(r'/(?:download/)?storage/v1/b/([^/]+)/o/([^/]+)')
_OBJECTS = re.compile(r'/storage/v1/b/([^/]+)/o')
_BUCKET = re.compile(r'/storage/v1/b/([^/]+)')
_UPLOAD = re.compile(r'/(?:resumable/)?upload/storage/v1/b/([^/]+)/o')
_SESSION = re.compile(r'/session/(\d+)')
_MOVE = re.compile(r'/storage/v1/b/([^/]+)/o/([^/]+)/moveTo/o/([^/]+)')
_RANGE = re.compile(r'bytes=(\d*)-(\d*)')
_CONTENT_RANGE = re.compile(r'bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)')
_MOST_LISTED = 1000


class Object(NamedTuple):
  """An object of a bucket.

  Attributes:
    data: its content.
    generation: a number that grows with each change of any object.
    updated: when it was written, in seconds since 1970.
  """

  data: bytes
  generation: int
  updated: float


class Fault(NamedTuple):
  """A fault that a request meets in place of its answer.

  Attributes:
    kind: a status of HTTP as text, such as '503'; 'slow': it is answered late;
      'reset': the connection is closed; 'lost': it is done and the connection
      is closed, so the client cannot know.
    seconds: how late a slow request is answered.
  """

  kind: str
  seconds: float = 0.0


@dataclasses.dataclass
class Storage:
  """The objects of the server, and its treatment of requests.

  Attributes:
    address: the address of the server, such as http://127.0.0.1:4000.
    objects: the objects of the bucket `BUCKET`, by name.
    requests: a line for each request, such as 'GET /storage/v1/b/mine/o/a'.
    fault: returns what happens to a request, of which it gets the line.
    clock: returns seconds since 1970.
  """

  address: str = ''
  objects: dict[str, Object] = dataclasses.field(default_factory=dict)
  requests: list[str] = dataclasses.field(default_factory=list)
  fault: Callable[[str], Fault | None] = lambda line: None
  clock: Callable[[], float] = time.time

  def __post_init__(self):
    self._generation = 1_000_000
    self._sessions: dict[str, tuple[str, dict[str, str], bytes]] = {}

  def reset(self) -> None:
    """Forgets all objects, requests and faults."""
    self.objects.clear()
    self.requests.clear()
    self.fault, self.clock = lambda line: None, time.time

  @property
  def environment(self) -> dict[str, str]:
    """The variables with which clients find this server."""
    return {
      'STORAGE_EMULATOR_HOST': self.address,
      # Otherwise gcsfs asks for the kind of a bucket by gRPC, for a minute.
      'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',
      'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'nobody',
      'TENSORSTORE_GCS_HTTP_URL': self.address,
    }

  def data(self, name: str) -> bytes:
    """Returns the content of an object."""
    return self.objects[name].data

  def put(self, name: str, data: bytes) -> Object:
    """Writes an object, as another client would."""
    self._generation += 1
    written = Object(data, self._generation, self.clock())
    self.objects[name] = written
    return written

  async def answer(self, request: web.Request) -> web.StreamResponse:
    """Answers a request, or does to it what `fault` says."""
    line = f'{request.method} {request.rel_url.raw_path_qs}'
    self.requests.append(line)
    body = await request.read()
    fault = self.fault(line)
    if fault is None:
      return self._dated(self._handle(request, body))
    if fault.kind == 'slow':
      await asyncio.sleep(fault.seconds)
      return self._dated(self._handle(request, body))
    if fault.kind.isdecimal():
      return _error(int(fault.kind))
    if fault.kind == 'lost':
      self._handle(request, body)
    if request.transport is not None:
      request.transport.abort()
    return web.Response()

  def _dated(self, answer: web.Response) -> web.Response:
    """Returns an answer with the time of this server."""
    answer.headers['Date'] = email.utils.formatdate(self.clock(), usegmt=True)
    return answer

  def _handle(self, request: web.Request, body: bytes) -> web.Response:
    """Answers a request, whose body was read."""
    path, method = request.rel_url.raw_path, request.method
    query = dict(request.query)
    if match := _SESSION.fullmatch(path):
      return self._continue(match[1], request, body)
    if (match := _UPLOAD.fullmatch(path)) and method == 'POST':
      return self._insert(match[1], query, request, body)
    if (match := _MOVE.fullmatch(path)) and method == 'POST':
      return self._move(*map(urllib.parse.unquote, match.groups()), query)
    if match := _OBJECT.fullmatch(path):
      bucket, name = map(urllib.parse.unquote, match.groups())
      if bucket != BUCKET:
        return _error(404)
      if method == 'DELETE':
        return self._delete(name, query)
      return self._get(name, query, request)
    if match := _OBJECTS.fullmatch(path):
      return self._list(query) if match[1] == BUCKET else _error(404)
    if match := _BUCKET.fullmatch(path):
      kind = {'kind': 'storage#bucket', 'id': match[1], 'name': match[1]}
      return _json(kind) if match[1] == BUCKET else _error(404)
    return _error(400, f'not emulated: {method} {path}')

  def _get(
    self, name: str, query: dict[str, str], request: web.Request
  ) -> web.Response:
    """Returns an object, a range of it, or what is known of it."""
    problem = self._problem(name, query, is_read=True)
    if problem is not None:
      return problem
    found = self.objects.get(name)
    if found is None:
      return _error(404)
    if query.get('alt') != 'media':
      return _json(_resource(name, found))
    headers = {
      'X-Goog-Generation': str(found.generation),
      'X-Goog-Metageneration': '1',
      'X-Goog-Hash': f'md5={_md5(found.data)}',
      'Last-Modified': email.utils.formatdate(found.updated, usegmt=True),
    }
    size = len(found.data)
    match = _RANGE.fullmatch(request.headers.get('Range', ''))
    if match is None:
      return web.Response(body=found.data, headers=headers)
    if match[1]:
      first = int(match[1])
      last = min(int(match[2] or size - 1), size - 1)
    else:
      first, last = max(size - int(match[2]), 0), size - 1
    if first >= size:
      return web.Response(
        status=416, headers={'Content-Range': f'bytes */{size}'}
      )
    headers['Content-Range'] = f'bytes {first}-{last}/{size}'
    data = found.data[first : last + 1]
    return web.Response(status=206, body=data, headers=headers)

  def _list(self, query: dict[str, str]) -> web.Response:
    """Returns a page of objects and of what looks like folders."""
    prefix, delimiter = query.get('prefix', ''), query.get('delimiter', '')
    start = max(query.get('startOffset', ''), query.get('pageToken', ''))
    end = query.get('endOffset', '')
    most = min(int(query.get('maxResults', _MOST_LISTED)), _MOST_LISTED)
    items, prefixes, token = [], [], ''
    for name in sorted(self.objects):
      if not name.startswith(prefix) or name < start or end and name >= end:
        continue
      folder = ''
      if delimiter and delimiter in name[len(prefix) :]:
        rest = name[len(prefix) :].partition(delimiter)[0]
        folder = prefix + rest + delimiter
        if folder in prefixes:
          continue
      if len(items) + len(prefixes) == most:
        token = name
        break
      if folder:
        prefixes.append(folder)
      else:
        items.append(_resource(name, self.objects[name]))
    page = {'kind': 'storage#objects', 'items': items, 'prefixes': prefixes}
    return _json(page | ({'nextPageToken': token} if token else {}))

  def _insert(
    self, bucket: str, query: dict[str, str], request: web.Request, body: bytes
  ) -> web.Response:
    """Writes an object, or begins to write it in pieces."""
    if bucket != BUCKET:
      return _error(404)
    kind = query.get('uploadType', 'media')
    if kind == 'media':
      return self._write(query['name'], query, body)
    if kind == 'multipart':
      boundary = request.headers['Content-Type'].partition('boundary=')[2]
      mark = b'--' + boundary.strip('"\'').encode()
      _, described, content, _ = body.split(mark, 3)
      name = json.loads(_part(described)).get('name') or query['name']
      return self._write(name, query, _part(content))
    described = json.loads(body) if body else {}
    number = str(len(self._sessions))
    name = query.get('name') or described['name']
    self._sessions[number] = name, query, b''
    return web.Response(
      headers={'Location': f'{self.address}/session/{number}'}
    )

  def _continue(
    self, number: str, request: web.Request, body: bytes
  ) -> web.Response:
    """Takes a piece of an object, or says how much of it is here."""
    if number not in self._sessions:
      return _error(404)
    name, query, known = self._sessions[number]
    if request.method == 'DELETE':
      del self._sessions[number]
      return web.Response(status=499)
    match = _CONTENT_RANGE.fullmatch(request.headers.get('Content-Range', ''))
    if match is None:
      return self._write(name, query, body)
    if match[1] is not None:
      first = int(match[1])
      if first > len(known):
        return _error(400, 'a piece is missing')
      known = known[:first] + body
      self._sessions[number] = name, query, known
    if match[3] != '*' and len(known) == int(match[3]):
      return self._write(name, query, known)
    range_ = {'Range': f'bytes=0-{len(known) - 1}'} if known else {}
    return web.Response(status=308, headers=range_)

  def _write(
    self, name: str, query: dict[str, str], data: bytes
  ) -> web.Response:
    problem = self._problem(name, query)
    return problem or _json(_resource(name, self.put(name, data)))

  def _delete(self, name: str, query: dict[str, str]) -> web.Response:
    problem = self._problem(name, query)
    if problem is not None:
      return problem
    if self.objects.pop(name, None) is None:
      return _error(404)
    return web.Response(status=204)

  def _move(
    self, bucket: str, name: str, target: str, query: dict[str, str]
  ) -> web.Response:
    """Gives an object another name."""
    if bucket != BUCKET or name not in self.objects:
      return _error(404)
    answer = self._write(target, query, self.data(name))
    if answer.status == 200:
      del self.objects[name]
    return answer

  def _problem(
    self, name: str, query: dict[str, str], *, is_read: bool = False
  ) -> web.Response | None:
    """Returns the answer to a request whose precondition does not hold."""
    found = self.objects.get(name)
    generation = 0 if found is None else found.generation
    if 'generation' in query and int(query['generation']) != generation:
      return _error(404)
    wanted = query.get('ifGenerationMatch')
    if wanted is not None and int(wanted) != generation:
      return _error(412)
    other = query.get('ifGenerationNotMatch')
    if other is not None and int(other) == generation:
      if found is None and is_read:
        return _error(404)
      return web.Response(status=304) if is_read else _error(412)
    return None


class RandomFaults:
  """Faults of some of the requests, by chance, as long as they are `on`.

  Args:
    seed: the beginning of chance.
    rate: the share of requests that fail.
    kinds: the faults, all of which are as likely.
    most: the most faults in a row, so that clients which try again succeed.
  """

  def __init__(
    self,
    seed: int,
    *,
    rate: float,
    kinds: tuple[Fault, ...],
    most: int = 3,
  ):
    self._chance = random.Random(seed)
    self._rate, self._kinds, self._most = rate, kinds, most
    self._row = 0
    self.on = True
    self.count = 0

  def __call__(self, line: str) -> Fault | None:
    del line
    is_hit = self.on and self._chance.random() < self._rate
    if not is_hit or self._row == self._most:
      self._row = 0
      return None
    self._row += 1
    self.count += 1
    return self._chance.choice(self._kinds)


@contextlib.contextmanager
def served() -> Iterator[Storage]:
  """Yields an empty storage, which a thread serves during the body."""
  storage, loop = Storage(), asyncio.new_event_loop()

  async def start() -> web.AppRunner:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route('*', '/{path:.*}', storage.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, '127.0.0.1', 0).start()
    host, port = runner.addresses[0][:2]
    storage.address = f'http://{host}:{port}'
    return runner

  runner = loop.run_until_complete(start())
  thread = threading.Thread(target=loop.run_forever, daemon=True)
  thread.start()
  try:
    yield storage
  finally:
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def _part(part: bytes) -> bytes:
  """Returns the body of a part of a request, whose headers are cut off."""
  separator = b'\r\n\r\n' if b'\r\n\r\n' in part[:512] else b'\n\n'
  body = part.partition(separator)[2]
  return body.removesuffix(b'\n').removesuffix(b'\r')


def _resource(name: str, found: Object) -> dict[str, str]:
  """Returns what the API says of an object."""
  moment = datetime.datetime.fromtimestamp(found.updated, datetime.UTC)
  updated = moment.strftime('%Y-%m-%dT%H:%M:%S.%fZ')
  return {
    'kind': 'storage#object',
    'bucket': BUCKET,
    'name': name,
    'size': str(len(found.data)),
    'generation': str(found.generation),
    'metageneration': '1',
    'timeCreated': updated,
    'updated': updated,
    'md5Hash': _md5(found.data),
    'etag': str(found.generation),
  }


def _md5(data: bytes) -> str:
  return base64.b64encode(hashlib.md5(data).digest()).decode()


def _json(content: dict) -> web.Response:
  return web.json_response(content)


def _error(status: int, text: str = 'emulated') -> web.Response:
  error = {'code': status, 'message': f'{status}: {text}'}
  return web.json_response({'error': error}, status=status)
