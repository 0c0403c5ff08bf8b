"""`doctor`: what it finds, in plain words, and its exit codes."""

import functools
import re
import socket

from aiohttp import web
import pytest

from stppo_jax import types
from stppo_jax.commands import doctor
from stppo_jax.http import server as http_server
from stppo_jax.retrieval import address
from stppo_jax.retrieval import server
from stppo_jax.retrieval.indexes import bm25
from stppo_jax.training import components
from stppo_jax.workdir import lock
from tests.training import runs

_PASSAGES = [types.Passage('p0', 'Paris', 'Capital of France.')]


@pytest.fixture(autouse=True)
def _no_token(monkeypatch):
  monkeypatch.delenv(address.TOKEN_VARIABLE, raising=False)


def _serve(**options):
  index = bm25.Bm25Index(_PASSAGES)
  return http_server.EmbeddedServer(
    functools.partial(server.make_app, index, **options)
  )


def _examine(capsys, url, *flags):
  """Returns the exit code and the lines."""
  code = doctor.main(['retriever', f'--url={url}', '--timeout=5', *flags])
  out, err = capsys.readouterr()
  assert not err
  return code, out.splitlines()


def test_a_good_server(capsys):
  with _serve() as embedded:
    url = f'{embedded.url}/retrieve'
    code, lines = _examine(capsys, url, '--expect=France')
  assert code == 0
  subjects = ('address', 'dialect', 'time', 'answer')
  assert [x.split(':')[0] for x in lines] == [f'ok     {x}' for x in subjects]
  assert 'search_r1, skyrl, rllm, r1_searcher; ' in lines[1]
  assert '1 passages' in lines[3] and 'Paris' in lines[3]


def test_the_dialect_that_is_not_spoken(capsys):
  with _serve(dialect='rllm') as embedded:
    code, lines = _examine(capsys, embedded.url, '--dialect=search_r1')
    assert code == 2
    assert lines[-1].startswith(
      'WRONG  dialect: search_r1 is not answered (status 422'
    )
    assert lines[-1].endswith('but rllm is; set retrieval.dialect=rllm')
    assert _examine(capsys, embedded.url)[0] == 0


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--query=xyzzy'], "nothing is found for 'xyzzy'. Does the server have"),
    (['--expect=Rome'], "'Rome' is in none of the 1 passages for"),
    (['--corpus=worlds/1'], 'dialect: no known dialect is answered. search_r1'),
  ],
)
def test_answers_that_are_not_as_expected(capsys, flags, message):
  with _serve() as embedded:
    code, lines = _examine(capsys, embedded.url, *flags)
  assert code == 2 and lines[-1].startswith('WRONG') and message in lines[-1]


def test_a_token_that_is_missing(capsys, monkeypatch):
  with _serve(token='s3cret') as embedded:
    code, lines = _examine(capsys, embedded.url)
    assert code == 2 and lines[-1].startswith('WRONG  token: ')
    assert 'STPPO_RETRIEVAL_TOKEN' in lines[-1] and 's3cret' not in lines[-1]
    monkeypatch.setenv(address.TOKEN_VARIABLE, 's3cret')
    assert _examine(capsys, embedded.url)[0] == 0


@pytest.mark.parametrize(
  ('listens', 'problem'),
  [(False, 'nothing answers at'), (True, 'accepts connections, but sends no')],
)
def test_a_server_that_does_not_answer(capsys, listens, problem):
  with socket.socket() as bound:
    bound.bind(('127.0.0.1', 0))
    if listens:
      bound.listen()
    url = f'http://127.0.0.1:{bound.getsockname()[1]}'
    code, (line,) = _examine(capsys, url, '--timeout=0.1')
  assert code == 75 and line.startswith('WRONG  address: ') and problem in line


@pytest.mark.parametrize(
  ('response', 'message'),
  [
    ((302, {'Location': 'http://elsewhere'}), 'address: .* redirects'),
    ((403, {}), 'token: the server refuses'),
    ((500, {}), 'dialect: no known dialect is answered'),
    ((404, {}), 'dialect: no known dialect is answered'),
    ((200, {}), 'dialect: no known dialect is answered'),
  ],
)
def test_another_server(capsys, response, message):
  status, headers = response

  async def respond(request):
    return web.Response(status=status, headers=headers)

  def make_app():
    app = web.Application()
    app.router.add_route('*', '/{path:.*}', respond)
    return app

  with http_server.EmbeddedServer(make_app) as embedded:
    code, lines = _examine(capsys, embedded.url)
  assert code == 2
  assert re.match(f'WRONG  {message}', lines[-1])


def _examine_machine(capsys, *flags):
  """Returns the exit code, and grade and text of each line by its subject."""
  code = doctor.main(flags)
  out, err = capsys.readouterr()
  assert not err
  found = {}
  for line in out.splitlines():
    grade, subject, text = re.fullmatch(
      r'(\w+) +([\w-]+): ?(.*)', line
    ).groups()
    found.setdefault(subject, []).append((grade, text))
  return code, found


def test_this_machine_is_examined_without_a_config(capsys, tmp_path):
  workdir = tmp_path / 'new' / 'run'
  code, found = _examine_machine(capsys, f'--workdir={workdir}')
  assert code == 0 and not workdir.parent.exists()
  assert list(found) == ('python packages devices memory cache workdir'.split())
  assert {grade for lines in found.values() for grade, _ in lines} == {'ok'}
  assert found['devices'][0][1].startswith('8 cpu')
  for package in ('jax', 'flax', 'orbax-checkpoint', 'transformers'):
    assert f'{package} ' in found['packages'][0][1]


def test_a_config_is_examined_with_its_data_model_and_retriever(capsys):
  questions = components.build_questions(runs.config())
  with server.embedded(
    questions.passages(), world_passages=questions.world_passages
  ) as served:
    flags = runs.flags(retrieval__url=served.url)
    code, found = _examine_machine(capsys, *flags)
  assert code == 0
  (question,) = questions.train(0, 1, resample_round=0)
  assert question.text in found['data'][0][1]
  assert 'made from the data' in found['tokenizer'][0][1]
  assert 'new weights' in found['model'][0][1]
  assert [line.split(':')[0] for _, line in found['retriever']] == [
    'address',
    'dialect',
    'time',
    'answer',
  ]
  # That server has ended. And eight devices cannot share twelve dialogues.
  code, found = _examine_machine(capsys, *flags)
  ((grade, line),) = found['retriever']
  assert code == 2 and grade == 'WRONG'
  assert line.startswith(f'address: nothing answers at {served.url}')
  flags = runs.flags(sft__before_training=True, sft__batch_size=12)
  code, found = _examine_machine(capsys, *flags)
  assert code == 2 and 'model' not in found
  assert found['config'][0][0] == 'WRONG'
  assert 'sft.batch_size=12: must be a multiple of' in found['config'][0][1]


def test_a_folder_of_something_else_is_wrong(capsys, tmp_path):
  (tmp_path / 'thesis.tex').touch()
  code, found = _examine_machine(capsys, f'--workdir={tmp_path}')
  ((grade, line),) = found['workdir']
  assert code == 2 and grade == 'WRONG'
  assert 'is not empty and was not written by train' in line
  with lock.held(tmp_path / 'run'):
    code, found = _examine_machine(capsys, f'--workdir={tmp_path / "run"}')
  assert code == 0 and found['lock'][0][0] == 'note'
