"""Answers are recorded once, and replayed without the server."""

import asyncio
import json
import os
import resource

import pytest

from stppo_jax import types
from stppo_jax.retrieval import protocol
from stppo_jax.retrieval import recording
from stppo_jax.retrieval import server
from tests.commands import serving
from tests.retrieval import fake_servers

_PASSAGES = [
  types.Passage('p0', 'Paris', 'Capital of France.\n\u00e9'),
  types.Passage('p1', 'Rome', 'Capital of Italy.'),
]


def _world(world):
  return [types.Passage(f'w{world}', 'Town', f'The capital of {world}.')]


async def _ask(url, questions, **options):
  retriever = fake_servers.retriever(url, **options)
  try:
    return await asyncio.gather(
      *(retriever.retrieve(q, corpus=c) for c, q in questions),
      return_exceptions=True,
    )
  finally:
    await retriever.close()


_QUESTIONS = [
  ('', 'capital'),
  ('worlds/3', 'capital'),
  ('', 'nothing'),
  ('', 'half a pair \ud800 paris'),
]


def _record(path, questions=_QUESTIONS, **options):
  recorder = recording.Recorder(path, topk=2)
  try:
    with server.embedded(_PASSAGES, world_passages=_world) as embedded:
      asking = _ask(embedded.url, questions, recorder=recorder, **options)
      return asyncio.run(asking)
  finally:
    recorder.close()


def _replay(path, questions=_QUESTIONS, **options):
  replayed = recording.Recording(path)
  with server.embedded(recording=replayed) as embedded:
    return asyncio.run(_ask(embedded.url, questions, **options))


def test_replayed_answers_are_those_that_were_recorded(tmp_path):
  path = tmp_path / 'new' / 'answers.jsonl'
  recorded = _record(path)
  assert [len(passages) for passages in recorded] == [2, 1, 0, 1]
  assert _replay(path) == recorded
  assert _record(path) == recorded  # again: nothing is written twice
  assert len(path.read_text().splitlines()) == 4


def test_what_fails_is_not_recorded(tmp_path):
  path = tmp_path / 'answers.jsonl'
  questions = [('', 'capital'), ('worlds/x', 'capital')]
  found, error = _record(path, questions)
  assert len(found) == 2
  assert isinstance(error, protocol.RetrieverMisconfigured)
  assert len(path.read_text().splitlines()) == 1


def test_a_full_disk_ends_the_run_with_one_line(tmp_path):
  path = tmp_path / 'answers.jsonl'
  recorder = recording.Recorder(path, topk=2)
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  with server.embedded(_PASSAGES) as embedded:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
      asking = _ask(embedded.url, [('', 'capital')], recorder=recorder)
      (error,) = asyncio.run(asking)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert isinstance(error, recording.RecordingFailed) and error.exit_code == 75
  assert str(error) == f'retrieval.record={path}: File too large'
  recorder.close()
  recorded = _record(path)  # with more room; the torn line is removed
  assert _replay(path) == recorded


def test_a_torn_line_is_recorded_again(tmp_path):
  path = tmp_path / 'answers.jsonl'
  recorded = _record(path)
  path.write_bytes(path.read_bytes()[:-9])
  with pytest.raises(ValueError, match=r'answers\.jsonl:4: '):
    recording.Recording(path)
  assert _record(path) == recorded and _replay(path) == recorded


@pytest.mark.parametrize(
  ('question', 'options', 'message'),
  [
    (('', 'other'), {}, "has no answer to 'other'"),
    (('worlds/4', 'capital'), {}, "has no answer to 'capital'"),
    (('', 'capital'), {'topk': 3}, 'was recorded with topk 2, not 3'),
  ],
)
def test_what_was_not_recorded_ends_the_run(
  tmp_path, question, options, message
):
  path = tmp_path / 'answers.jsonl'
  _record(path)
  (error,) = _replay(path, [question], **options)
  assert isinstance(error, protocol.RetrieverMisconfigured)
  assert message in str(error) and '\n' not in str(error)


def test_an_unknown_query_does_not_fail_those_of_its_request(tmp_path):
  path = tmp_path / 'answers.jsonl'
  recorded = _record(path)
  questions = [('', 'capital'), ('', 'other'), ('', 'nothing')]
  found, error, nothing = _replay(path, questions)
  assert (found, nothing) == (recorded[0], recorded[2])
  assert isinstance(error, protocol.RetrieverMisconfigured)
  assert "has no answer to 'other'" in str(error)
  replayed = recording.Recording(path)
  with server.embedded(recording=replayed) as embedded:
    for route, topk, name in (
      ('retrieve', 'topk', 'result'),
      ('queries', 'k', 'answers'),
    ):
      body = {'queries': ['capital', 'other'], topk: 2}
      reply = serving.post(f'{embedded.url}/{route}', body)
      known, unknown = reply[name]
      assert len(known) == 2 and unknown is None
      assert reply['detail'] == (
        f"{path} has no answer to 'other': it was recorded in another run"
      )


def test_fewer_passages_can_be_replayed(tmp_path):
  path = tmp_path / 'answers.jsonl'
  recorded = _record(path)
  assert _replay(path, topk=1) == [passages[:1] for passages in recorded]


def test_a_recording_with_another_topk_is_not_continued(tmp_path):
  path = tmp_path / 'answers.jsonl'
  _record(path)
  with pytest.raises(ValueError, match='recorded with topk 2, not 3'):
    recording.Recorder(path, topk=3)


_GOOD = {'corpus': '', 'query': 'q', 'topk': 1, 'passages': []}


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('{', 'Expecting property name'),
    ('[]', 'expected an object'),
    (json.dumps(_GOOD | {'query': 3}), '"query": expected a value of type str'),
    (json.dumps(_GOOD | {'passages': None}), '"passages": expected'),
    (json.dumps(_GOOD | {'passages': [{}]}), 'expected "contents"'),
    (
      json.dumps(_GOOD | {'passages': [{'contents': 'a', 'score': 'x'}]}),
      '"score": expected a number',
    ),
  ],
)
def test_a_line_that_is_no_answer_is_named(tmp_path, line, message):
  path = tmp_path / 'answers.jsonl'
  path.write_text(json.dumps(_GOOD) + '\n' + line + '\n')
  with pytest.raises(ValueError) as error:
    recording.Recording(path)
  assert str(error.value).startswith(f'{path}:2: ')
  assert message in str(error.value)


def test_a_line_that_is_too_long_is_named(tmp_path):
  path = tmp_path / 'answers.jsonl'
  path.write_text(json.dumps(_GOOD) + '\n')
  os.truncate(path, 33 << 20)
  with pytest.raises(ValueError) as error:
    recording.Recording(path)
  assert str(error.value).startswith(f'{path}:2: longer than 33554432 char')


@pytest.mark.parametrize('text', ['{"a": 1}', '{"a": 1}\n{"b', '\n', 'a\n{'])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, text):
  path = tmp_path / 'config.json'
  path.write_text(text)
  with pytest.raises(ValueError, match=r'config\.json'):
    recording.Recorder(path, topk=2)
  assert path.read_text() == text
