"""`serve`: its ready line, answers, ends by signals, and refusals."""

import json
import os
import signal
import threading
import time
from urllib import request

import pytest

from stppo_jax import types
from stppo_jax.commands import serve
from stppo_jax.retrieval import address
from stppo_jax.retrieval import server


def _ask(url, query):
  body = json.dumps({'queries': [query], 'topk': 1}).encode()
  with request.urlopen(request.Request(url, body), timeout=60) as reply:
    return json.load(reply)['result'][0]


def _corpus(tmp_path):
  path = tmp_path / 'corpus.jsonl'
  path.write_text('{"pid": "7", "title": "Paris", "text": "In France."}\n')
  return path


def _serve(capsys, flags, ask, *, number=signal.SIGTERM, **options):
  """Serves until one question is answered, then sends a signal.

  Returns:
    (the printed URL, what `ask` returned for it).
  """
  found = []

  def use_and_end():
    url = ''
    while not url.endswith('\n'):  # printed once it is ready
      time.sleep(0.01)
      url += capsys.readouterr().out
    try:
      found.append((url, ask(url.strip())))
    finally:
      os.kill(os.getpid(), number)

  user = threading.Thread(target=use_and_end, daemon=True)
  user.start()
  assert serve.main([*flags, '--port=0'], **options) == 0
  user.join()
  assert capsys.readouterr() == ('', '')
  return found[0]


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_serves_a_corpus_until_a_signal_ends_it(tmp_path, capsys, number):
  ask = lambda url: _ask(f'{url}/retrieve', 'france')
  flags = [f'--corpus={_corpus(tmp_path)}']
  url, passages = _serve(capsys, flags, ask, number=number)
  assert url.startswith('http://127.0.0.1:')
  assert passages == [{'id': '7', 'contents': '"Paris"\nIn France.'}]


def test_serves_worlds(capsys):
  asked = []

  def make_passages(seed, world, **options):
    asked.append((seed, world, options))
    return [types.Passage(f'{seed}/{world}', 'Town', 'x')]

  ask = lambda url: _ask(f'{url}/worlds/5/retrieve', 'town')
  flags = ['--synthetic_seed=3', '--distractors=9']
  _, passages = _serve(capsys, flags, ask, make_passages=make_passages)
  assert passages == [{'id': '3/5', 'contents': '"Town"\nx'}]
  options = {'entities_per_type': 42, 'name_pieces': 2, 'distractors': 9}
  assert asked == [(3, 0, options), (3, 5, options)]


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    ([], 'one of the arguments --corpus --synthetic_seed is required'),
    (['--corpus=/absent'], '/absent: no such file'),
    (['--corpus=/absent', '--synthetic_seed=1'], 'not allowed with'),
    (['--synthetic_seed=x'], "invalid int value: 'x'"),
    (['--synthetic_seed=1', '--port=70000'], '--port: 70000'),
    (['--synthetic_seed=1', '--host=0.0.0.0'], 'STPPO_RETRIEVAL_TOKEN'),
    (['--synthetic_seed=1', '--unknown'], '--unknown'),
    (['--synthetic_seed=1', '--host=192.0.2.1', '--token'], '--token'),
  ],
)
def test_a_bad_value_is_one_line_and_2(capsys, monkeypatch, flags, message):
  monkeypatch.delenv(address.TOKEN_VARIABLE, raising=False)
  assert serve.main(flags) == 2
  output, errors = capsys.readouterr()
  assert output == ''
  assert message in errors and errors.count('\n') == 1


def test_a_taken_port_is_one_line_and_2(tmp_path, capsys):
  with server.embedded([types.Passage('1', 'a', 'b')]) as embedded:
    port = embedded.url.rpartition(':')[2]
    flags = [f'--corpus={_corpus(tmp_path)}', f'--port={port}']
    assert serve.main(flags) == 2
  assert capsys.readouterr().err.count('\n') == 1


def test_options_that_make_no_world_are_refused_at_the_start(capsys):
  def make_passages(seed, world, **options):
    raise ValueError(f'cannot make {options["entities_per_type"]} entities')

  flags = ['--synthetic_seed=1', '--entities_per_type=-1', '--port=0']
  assert serve.main(flags, make_passages=make_passages) == 2
  assert capsys.readouterr().err == 'serve: cannot make -1 entities\n'
