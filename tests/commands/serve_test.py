"""`serve`: its ready line, answers, ends by signals, and refusals."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from stppo_jax import __main__
from stppo_jax import buckets
from stppo_jax import types
from stppo_jax.commands import index
from stppo_jax.data import synthetic_wiki
from stppo_jax.retrieval import server
from tests.commands import serving
from tests.storage import emulator


def _ask(url, query):
  return serving.post(url, {'queries': [query], 'topk': 1})['result'][0]


def _corpus(tmp_path):
  path = tmp_path / 'corpus.jsonl'
  path.write_text('{"pid": "7", "title": "Paris", "text": "In France."}\n')
  return path


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_serves_a_corpus_until_a_signal_ends_it(tmp_path, capsys, number):
  ask = lambda url: _ask(f'{url}/retrieve', 'france')
  flags = [f'--corpus={_corpus(tmp_path)}']
  url, passages = serving.run(capsys, flags, ask, number=number)
  assert url.startswith('http://127.0.0.1:')
  assert passages == [{'id': '7', 'contents': '"Paris"\nIn France.'}]


def test_serves_worlds(capsys, monkeypatch):
  asked = []

  def make_passages(seed, world, **options):
    asked.append((seed, world, options))
    return [types.Passage(f'{seed}/{world}', 'Town', 'x')]

  ask = lambda url: _ask(f'{url}/worlds/5/retrieve', 'town')
  flags = ['--synthetic_seed=3', '--distractors=9']
  monkeypatch.setattr(synthetic_wiki, 'make_passages', make_passages)
  _, passages = serving.run(capsys, flags, ask)
  assert passages == [{'id': '3/5', 'contents': '"Town"\nx'}]
  options = {'entities_per_type': 42, 'name_pieces': 2, 'distractors': 9}
  assert asked == [(3, 0, options), (3, 5, options)]


def test_an_index_in_a_bucket_is_read_once_per_host(
  google, tmp_path, capsys, monkeypatch
):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  out = tmp_path / 'index'
  assert index.main([f'--corpus={_corpus(tmp_path)}', f'--out={out}']) == 0
  capsys.readouterr()
  for path in out.rglob('*'):
    if path.is_file():
      google.put(f'wiki/{path.relative_to(out)}', path.read_bytes())
  ask = lambda url: _ask(f'{url}/retrieve', 'france')
  for place in ('gs://mine/wiki', 'gs://mine/wiki/'):
    buckets.local_folder.cache_clear()  # as in another process
    _, found = serving.run(capsys, [f'--index={place}'], ask)
    assert [passage['id'] for passage in found] == ['7']
  downloads = [x for x in google.requests if 'passages.jsonl?' in x]
  assert len(downloads) == 1
  google.fault = lambda line: emulator.Fault('403', 1.0)
  buckets.local_folder.cache_clear()
  assert __main__.main(['serve', '--index=gs://mine/wiki']) == 75
  err = capsys.readouterr().err
  assert err.startswith('gs://mine/wiki: ') and err.count('\n') == 1


@pytest.mark.slow
def test_several_processes_serve_one_index(tmp_path):
  """They are replaced, and end with their parent."""
  out = tmp_path / 'index'
  assert index.main([f'--corpus={_corpus(tmp_path)}', f'--out={out}']) == 0
  words = [sys.executable, '-m', 'stppo_jax', 'serve', f'--index={out}']
  with subprocess.Popen(
    [*words, '--workers=2', '--port=0'],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  ) as parent:
    try:
      assert parent.stdout is not None and parent.stderr is not None
      url = parent.stdout.readline().strip()
      for _ in range(4):
        assert _ask(f'{url}/retrieve', 'france')[0]['id'] == '7'
      worker = int(_children(parent.pid)[0])
      os.kill(worker, signal.SIGKILL)
      assert f'worker {worker} ended with exit code -9' in (
        parent.stderr.readline()
      )
      assert _ask(f'{url}/retrieve', 'france')[0]['id'] == '7'
    finally:
      parent.send_signal(signal.SIGTERM)
    assert parent.wait(60) == 0
  with pytest.raises(OSError):
    _ask(f'{url}/retrieve', 'france')


def _children(pid):
  path = pathlib.Path(f'/proc/{pid}/task/{pid}/children')
  return path.read_text().split()


def test_one_dialect_is_served(tmp_path, capsys):
  body = {'query': 'france', 'top_k': 1}

  def ask(url):
    with pytest.raises(OSError, match='422'):
      serving.post(f'{url}/retrieve', {'queries': ['france']})
    return [x['text'] for x in serving.post(f'{url}/retrieve', body)]

  flags = [f'--corpus={_corpus(tmp_path)}', '--dialect=zerosearch']
  _, texts = serving.run(capsys, flags, ask)
  assert texts == ['"Paris"\nIn France.']


def test_a_taken_port_is_one_line_and_2(tmp_path, refused):
  with server.embedded([types.Passage('1', 'a', 'b')]) as embedded:
    port = embedded.url.rpartition(':')[2]
    refused('serve', f'--corpus={_corpus(tmp_path)}', f'--port={port}')
