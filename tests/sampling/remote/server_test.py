"""The small inference server: its refusals and their messages."""

import http.client
import json
from urllib import parse

import jax
import pytest

from stppo_jax.http import server as http_server
from stppo_jax.models.hf import export
from stppo_jax.sampling.remote import server as model_server
from tests.models import tiny
from tests.sampling.remote import fake_servers

_ASKED = {'model': 'tiny', 'prompt': [0], 'max_tokens': 2}


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  return tmp_path_factory.mktemp('weights')


def _model(root):
  return model_server.ModelServer(
    'tiny',
    fake_servers.MODEL,
    fake_servers.PARAMS,
    token_bytes=fake_servers.TOKENS,
    max_length=fake_servers.MAX_LENGTH,
    weights_root=root,
  )


@pytest.fixture(scope='module')
def url(root):
  model = _model(root)
  with http_server.EmbeddedServer(model.app) as server:
    yield server.url


def _post(url, path, body, method='POST', headers=None):
  host = parse.urlsplit(url).netloc
  connection = http.client.HTTPConnection(host, timeout=20)
  try:
    if not isinstance(body, bytes):
      body = json.dumps(body).encode()
    headers = {'Content-Type': 'application/json'} | (headers or {})
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())
  finally:
    connection.close()


def test_it_listens_on_the_loopback_only(url):
  assert parse.urlsplit(url).hostname == '127.0.0.1'
  assert _post(url, '/health', b'', 'GET') == (200, {'status': 'ok'})


def test_a_completion(url):
  status, reply = _post(url, '/v1/completions', _ASKED | {'top_k': 1})
  (choice,) = reply['choices']
  assert status == 200 and choice['finish_reason'] == 'length'
  assert len(choice['token_ids']) == 2 and choice['prompt_token_ids'] == [0]
  assert len(choice['logprobs']['token_logprobs']) == 2
  again = _post(url, '/v1/completions', _ASKED | {'top_k': 1, 'seed': 5})
  assert again[1]['choices'] == [choice]  # no seed matters


@pytest.mark.parametrize(
  ('changes', 'status', 'line'),
  [
    ({'model': 'large'}, 404, "no model 'large'"),
    ({'model': 3}, 422, 'model: expected str'),
    ({'prompt': 'abc'}, 422, 'prompt: expected list'),
    ({'prompt': [99]}, 422, 'expected ids in [0, 16)'),
    ({'prompt': [True]}, 422, 'expected ids in [0, 16)'),
    ({'prompt': []}, 422, 'at least one token'),
    ({'max_tokens': 0}, 422, 'at least one token'),
    ({'max_tokens': 40}, 422, '41 tokens, 40 fit'),
    ({'temperature': 'hot'}, 422, 'temperature: expected float'),
    ({'temperature': 0}, 422, 'expected a number above 0'),
    ({'top_p': 0}, 422, 'expected fractions'),
    ({'stop': [1]}, 422, 'up to 16 strings'),
    ({'stop': ['']}, 422, 'up to 16 strings'),
    ({'n': 2}, 422, 'n: only 1 is served'),
    ({'echo': True}, 422, 'echo: only false is served'),
    ({'best_of': 3}, 422, "unknown field 'best_of'"),
  ],
)
def test_a_bad_completion_is_one_line(url, changes, status, line):
  found, reply = _post(url, '/v1/completions', _ASKED | changes)
  assert found == status and line in reply['detail']
  assert '\n' not in reply['detail']


@pytest.mark.parametrize('body', [b'{', b'[]', b'\xff'])
def test_a_body_that_is_no_object(url, body):
  status, reply = _post(url, '/v1/completions', body)
  assert status == 422 and reply['detail'].startswith('body: expected')


def test_weights_are_read_from_below_the_root_only(url, root, tmp_path):
  for folder in (root / 'new', tmp_path):
    export.export(folder, fake_servers.MODEL.config, fake_servers.PARAMS)
  wide = tiny.model(vocab_size=20)
  export.export(root / 'wide', wide.config, tiny.params(wide))
  info = '/model_info'
  assert _post(url, info, b'', 'GET')[1] == {'weight_version': 'default'}

  def update(folder):
    body = {'model_path': str(folder), 'weight_version': 'v1'}
    return _post(url, '/update_weights_from_disk', body)

  for folder, line in (
    (tmp_path, 'not below weights_root'),
    (root / '..' / tmp_path.name, 'not below weights_root'),
    (root / 'none', 'no model.safetensors'),
    (root / 'wide', 'expected (16, 16)'),
  ):
    status, reply = update(folder)
    assert status == 400 and line in reply['detail']
    assert _post(url, info, b'', 'GET')[1] == {'weight_version': 'default'}
  assert update(root / 'new')[0] == 200
  assert _post(url, info, b'', 'GET')[1] == {'weight_version': 'v1'}
  status, reply = _post(url, '/update_weights_from_disk', {'model_path': 1})
  assert status == 422 and 'expected strings' in reply['detail']


def test_a_link_out_of_the_root_is_not_followed(url, root, tmp_path):
  (tmp_path / 'model.safetensors').write_bytes(b'secret')
  (root / 'linked').mkdir()
  (root / 'linked' / 'model.safetensors').symlink_to(
    tmp_path / 'model.safetensors'
  )
  (root / 'folder').symlink_to(tmp_path)
  for name, line in (
    ('linked', 'model.safetensors: a link out of weights_root'),
    ('folder', 'model_path: not below weights_root'),
  ):
    body = {'model_path': str(root / name), 'weight_version': 'v2'}
    status, reply = _post(url, '/update_weights_from_disk', body)
    assert status == 400 and reply['detail'] == line


@pytest.mark.slow
def test_clients_cannot_fill_the_memory(root):
  model = _model(root)
  compiled = []

  def listen(event, seconds, **details):
    del seconds, details
    if event == '/jax/core/compile/backend_compile_duration':
      compiled.append(event)

  def programs(url, count):
    """Returns how many programs are compiled for so many temperatures."""
    compiled.clear()
    for number in range(1, count + 1):
      asked = _ASKED | {'max_tokens': 1, 'temperature': number / 16}
      assert _post(url, '/v1/completions', asked)[0] == 200
    return len(compiled)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    with http_server.EmbeddedServer(model.app) as server:
      assert programs(server.url, 16) >= 16
      assert programs(server.url, 16) == 0  # all are kept
      programs(server.url, 17)
      assert programs(server.url, 1) == 1  # one more was too many
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def test_posts_need_the_content_type_of_json(url):
  """A page in a browser cannot send it to this machine unasked."""
  for kind in ('text/plain', 'application/x-www-form-urlencoded'):
    headers = {'Content-Type': kind}
    status, reply = _post(url, '/v1/completions', _ASKED, headers=headers)
    assert status == 415 and 'application/json' in reply['detail']


def test_a_token_can_be_asked_for(root):
  model = model_server.ModelServer(
    'tiny',
    fake_servers.MODEL,
    fake_servers.PARAMS,
    token_bytes=fake_servers.TOKENS,
    max_length=fake_servers.MAX_LENGTH,
    weights_root=root,
    token='s3cret',
  )
  with http_server.EmbeddedServer(model.app) as server:
    for path in ('/v1/models', '/model_info'):
      assert _post(server.url, path, b'', 'GET')[0] == 401
      headers = {'Authorization': 'Bearer s3cret'}
      assert _post(server.url, path, b'', 'GET', headers)[0] == 200
    assert _post(server.url, '/v1/completions', _ASKED)[0] == 401
    assert _post(server.url, '/health', b'', 'GET')[0] == 200
