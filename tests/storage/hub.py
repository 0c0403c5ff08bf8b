"""A stand-in for the Hugging Face Hub, with faults, for tests.

It answers the part of the Hub's API that the package needs: revisions, trees,
files with ranges, private and gated models, new repositories, large files and
commits. Everything is kept in memory.
"""

import base64
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import hashlib
import http.server
import json
import pathlib
import re
import threading
from typing import Any
import urllib.parse

TOKEN = 'hf_of_the_test'
_INFO = re.compile(r'/api/models/([^/]+/[^/]+?)(?:/revision/([^/]+))?')
_TREE = re.compile(r'/api/models/([^/]+/[^/]+)/tree/([^/]+)')
_FILE = re.compile(r'/([^/]+/[^/]+)/resolve/([^/]+)/(.+)')
_PREUPLOAD = re.compile(r'/api/models/([^/]+/[^/]+)/preupload/main')
_BATCH = re.compile(r'/([^/]+/[^/]+)\.git/info/lfs/objects/batch')
_COMMIT = re.compile(r'/api/models/([^/]+/[^/]+)/commit/main')
_UPLOAD = re.compile(r'/upload/(\w+)')


@dataclasses.dataclass
class Repository:
  """A model: its revisions, and who may read it.

  Attributes:
    commits: the files of each commit, by name.
    refs: the commit of each branch and tag.
    access: free | private | gated.
  """

  commits: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
  refs: dict[str, str] = dataclasses.field(default_factory=dict)
  access: str = 'free'

  def commit(self, files: dict[str, bytes], ref: str = 'main') -> str:
    """Adds a commit with these files and returns its id."""
    digest = hashlib.sha1(
      repr((sorted(files.items()), len(self.commits))).encode()
    )
    self.commits[digest.hexdigest()] = dict(files)
    self.refs[ref] = digest.hexdigest()
    return digest.hexdigest()


@dataclasses.dataclass
class Hub:
  """The models of the server, and its treatment of requests.

  Attributes:
    address: the address of the server, such as http://127.0.0.1:4000.
    models: the models by their names.
    requests: a line for each request, such as 'GET /o/m/resolve/main/a'.
    created: what new repositories were asked for.
    fault: returns the status that a request meets in place of its answer, or
      the bytes after which the connection breaks as a negative number; 0: it is
      answered. It gets the line of the request.
  """

  address: str = ''
  models: dict[str, Repository] = dataclasses.field(default_factory=dict)
  requests: list[str] = dataclasses.field(default_factory=list)
  created: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  uploads: dict[str, bytes] = dataclasses.field(default_factory=dict)
  fault: Callable[[str], int] = lambda line: 0

  def add(self, name: str, folder: pathlib.Path, **also: Any) -> str:
    """Adds a model with the files of a folder; returns its commit."""
    files = {x.name: x.read_bytes() for x in folder.iterdir() if x.is_file()}
    self.models[name] = Repository(**also)
    return self.models[name].commit(files)


class _Refused(Exception):
  """A request that is answered with a status, a code and perhaps content."""


@contextlib.contextmanager
def served() -> Iterator[Hub]:
  """Yields a server that runs in a thread."""
  hub = Hub()

  class Handler(_Handler):
    state = hub

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  server.daemon_threads = True
  thread = threading.Thread(target=server.serve_forever, args=(0.01,))
  thread.start()
  hub.address = f'http://127.0.0.1:{server.server_port}'
  try:
    yield hub
  finally:
    server.shutdown()
    server.server_close()
    thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
  """Answers the requests of one connection."""

  state: Hub
  protocol_version = 'HTTP/1.1'

  def log_message(self, *args: Any) -> None:
    """Prints nothing."""

  def _handle(self) -> None:
    size = int(self.headers.get('Content-Length') or 0)
    body = self.rfile.read(size) if size else b''
    url = urllib.parse.urlsplit(self.path)
    line = f'{self.command} {urllib.parse.unquote(url.path)}'
    self.state.requests.append(line)
    fault = self.state.fault(line)
    if fault > 0:
      self._answer(fault, b'', {'Retry-After': '0'})
      return
    try:
      headers, content = self._content(url.path, body)
    except _Refused as error:
      status, code, *content = error.args
      content = content[0] if content else b''
      self._answer(status, content, {'X-Error-Code': code})
      return
    status = 200
    if match := re.fullmatch(r'bytes=(\d+)-', self.headers.get('Range') or ''):
      begin, status = int(match[1]), 206
      end = f'bytes {begin}-{len(content) - 1}/{len(content)}'
      headers, content = headers | {'Content-Range': end}, content[begin:]
    self._answer(status, content, headers, broken=-fault)

  do_GET = do_HEAD = do_POST = do_PUT = _handle

  def _answer(
    self, status: int, content: bytes, headers: dict[str, str], broken: int = 0
  ) -> None:
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name, value)
    self.send_header('Content-Length', str(len(content)))
    self.end_headers()
    if self.command != 'HEAD':
      self.wfile.write(content[:broken] if broken else content)
    if broken:
      self.close_connection = True

  def _content(self, path: str, body: bytes) -> tuple[dict[str, str], bytes]:
    """Returns headers and content of the answer to a request."""
    path = urllib.parse.unquote(path)
    if path == '/api/repos/create':
      return {}, self._create(json.loads(body))
    if path == '/api/validate-yaml':  # the head of a card
      return {}, _json({'errors': [], 'warnings': []})
    if match := _UPLOAD.fullmatch(path):
      assert hashlib.sha256(body).hexdigest() == match[1]
      self.state.uploads[match[1]] = body
      return {}, b''
    for pattern, answer in (
      (_TREE, self._tree),
      (_FILE, self._file),
      (_PREUPLOAD, self._preupload),
      (_BATCH, self._batch),
      (_COMMIT, self._commit),
      (_INFO, self._info),
    ):
      if match := pattern.fullmatch(path):
        name, *rest = match.groups()
        return answer(self._open(name), name, *rest, body)
    raise _Refused(404, 'NotFound')

  def _open(self, name: str) -> Repository:
    allowed = self.headers.get('Authorization') == f'Bearer {TOKEN}'
    model = self.state.models.get(name)
    if model is None or (model.access == 'private' and not allowed):
      raise _Refused(404 if allowed else 401, 'RepoNotFound')
    if model.access == 'gated' and not allowed:
      raise _Refused(401, 'GatedRepo')
    return model

  def _resolved(self, model: Repository, revision: str | None) -> str:
    commit = model.refs.get(revision or 'main', revision)
    if commit not in model.commits:
      raise _Refused(404, 'RevisionNotFound')
    return commit

  def _info(self, model, name, revision, body):
    del body
    return {}, _json({'id': name, 'sha': self._resolved(model, revision)})

  def _tree(self, model, name, revision, body):
    del name, body
    files = model.commits[self._resolved(model, revision)]
    return {}, _json(
      [
        {'type': 'file', 'path': path, 'size': len(data), 'oid': _oid(data)}
        for path, data in files.items()
      ]
    )

  def _file(self, model, name, revision, path, body):
    del name, body
    commit = self._resolved(model, revision)
    if path not in model.commits[commit]:
      raise _Refused(404, 'EntryNotFound')
    data = model.commits[commit][path]
    return {'X-Repo-Commit': commit, 'ETag': f'"{_oid(data)}"'}, data

  def _create(self, wanted: dict[str, Any]) -> bytes:
    if self.headers.get('Authorization') != f'Bearer {TOKEN}':
      raise _Refused(401, '')
    name = '/'.join(
      x for x in (wanted.get('organization'), wanted['name']) if x
    )
    answer = _json({'url': f'{self.state.address}/{name}', 'id': name})
    if name in self.state.models:
      raise _Refused(409, '', answer)
    self.state.created.append(wanted)
    model = self.state.models[name] = Repository()
    model.commit({'.gitattributes': b''})
    return answer

  def _preupload(self, model, name, body):
    del model, name
    return {}, _json(
      {
        'files': [
          {
            'path': file['path'],
            'uploadMode': 'lfs' if 'safetensors' in file['path'] else 'regular',
            'shouldIgnore': False,
          }
          for file in json.loads(body)['files']
        ]
      }
    )

  def _batch(self, model, name, body):
    del model, name
    upload = lambda x: {'href': f'{self.state.address}/upload/{x["oid"]}'}
    objects = [
      {**x, 'actions': {'upload': upload(x)}}
      for x in json.loads(body)['objects']
    ]
    return {}, _json({'transfer': 'basic', 'objects': objects})

  def _commit(self, model, name, body):
    files = dict(model.commits[model.refs['main']])
    for text in body.splitlines():
      line = json.loads(text)
      if line['key'] == 'file':
        data = base64.b64decode(line['value']['content'])
        files[line['value']['path']] = data
      elif line['key'] == 'deletedFile':
        del files[line['value']['path']]
      elif line['key'] == 'lfsFile':
        files[line['value']['path']] = self.state.uploads[line['value']['oid']]
    commit = model.commit(files)
    url = f'{self.state.address}/{name}/commit/{commit}'
    return {}, _json({'success': True, 'commitUrl': url, 'commitOid': commit})


def _json(value: Any) -> bytes:
  return json.dumps(value).encode()


def _oid(data: bytes) -> str:
  return hashlib.sha1(data).hexdigest()
