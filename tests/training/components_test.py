"""The retriever that a config describes: recorded, replayed, with faults."""

import asyncio
import json

import pytest

from stppo_jax import exits
from stppo_jax.retrieval import protocol
from stppo_jax.training import components
from tests.training import runs

_QUERIES = ['capital', 'river of the north', 'nothing at all xyzzy']


def _ask(**changes):
  """Returns the answers to questions about worlds, and the statistics."""
  config = runs.config(**changes)
  questions = components.build_questions(config)
  with components.build_services(config, questions) as services:
    retriever = services.retriever
    assert retriever is not None

    async def ask():
      return await asyncio.gather(
        *(
          retriever.retrieve(query, corpus=f'worlds/{world}')
          for query in _QUERIES
          for world in (0, 1)
        ),
        return_exceptions=True,
      )

    return services.loop.run(ask()), retriever.statistics()


def test_recorded_answers_are_replayed(tmp_path):
  path = tmp_path / 'answers.jsonl'
  recorded, _ = _ask(retrieval__record=path)
  assert len(path.read_text().splitlines()) == len(recorded)
  assert any(recorded) and recorded == _ask()[0]
  assert _ask(retrieval__replay=path)[0] == recorded
  # The answers come from the file and not from the worlds.
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  for line in lines:
    line['passages'] = line['passages'][:1]
  path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  replayed, _ = _ask(retrieval__replay=path)
  assert replayed == [passages[:1] for passages in recorded]
  path.write_text(json.dumps(lines[0]) + '\n')
  replayed, _ = _ask(retrieval__replay=path)
  assert isinstance(replayed[-1], protocol.RetrieverMisconfigured)
  assert 'no answer to' in str(replayed[-1])


def test_faults_are_injected_by_the_seed():
  answers, statistics = _ask(retrieval__faults__rate=1.0, retrieval__retries=0)
  assert all(isinstance(a, protocol.RetrievalError) for a in answers)
  assert statistics['retrieval/failures'] == len(answers)
  failed = []
  for seed in (1, 1, 2):
    answers, _ = _ask(
      retrieval__faults__rate=0.5,
      retrieval__faults__seed=seed,
      retrieval__retries=0,
    )
    failed.append([isinstance(answer, Exception) for answer in answers])
  assert failed[0] == failed[1] != failed[2]


def test_a_damaged_recording_is_one_line(tmp_path):
  path = tmp_path / 'answers.jsonl'
  path.write_text('[]\n')
  for key in ('retrieval__replay', 'retrieval__record'):
    with pytest.raises(exits.Misconfigured) as error:
      _ask(**{key: path})
    assert str(error.value) == f'{path}:1: expected an object'
