"""Turns that a server fails are repeated, or fail their row only."""

import logging
import time

import pytest

from stppo_jax.http import client as http_client
from tests.sampling.remote import fake_servers

_EOS, _TURN = fake_servers.EOS, fake_servers.TURN
_choice = fake_servers.change_choice


def _no_choices(reply):
  reply['choices'] = []


_FAULTS = {
  # These pass: the request is repeated.
  '500': ((500, {}), 2, 'status 500: so sorry'),
  '502': ((502, {}), 2, 'status 502'),
  '429': ((429, {'Retry-After': '0'}), 2, 'status 429'),
  '408': ((408, {}), 2, 'status 408'),
  'garbage': ('garbage', 2, 'not JSON'),
  'nothing': (_no_choices, 2, 'no one choice'),
  'aborted': (
    _choice(finish_reason='abort'),
    2,
    "finish_reason='abort'",
  ),
  'too short': (
    _choice(token_ids=[0], logprobs={'token_logprobs': [-1.0]}),
    2,
    'ended after 1 of 9 tokens',
  ),
  # These do not.
  '400': ((400, {}), 1, 'status 400'),
  '302': ((302, {'Location': '/health'}), 1, 'status 302'),
  'other prompt': (
    _choice(prompt_token_ids=[9]),
    1,
    'other token ids',
  ),
  'no prompt': (
    _choice(prompt_token_ids=None),
    1,
    'without its token ids',
  ),
  'no ids': (_choice(token_ids=None), 1, 'no token ids'),
  'text': (_choice(token_ids=['a']), 1, 'no token ids'),
  'no logprobs': (
    _choice(logprobs=None),
    1,
    'no log-probabilities',
  ),
  'fewer': (
    _choice(logprobs={'token_logprobs': []}),
    1,
    '0 log-prob',
  ),
  'null': (
    _choice(token_ids=[_EOS], logprobs={'token_logprobs': [None]}),
    1,
    'no number up to 0',
  ),
  'positive': (
    _choice(token_ids=[_EOS], logprobs={'token_logprobs': [0.5]}),
    1,
    'no number up to 0',
  ),
  'foreign': (
    _choice(
      token_ids=[99] * _TURN,
      logprobs={'token_logprobs': [-1.0] * _TURN},
    ),
    1,
    'id 99 is not of the model',
  ),
  'too long': (
    _choice(token_ids=[0] * 10, logprobs={'token_logprobs': [-1.0] * 10}),
    1,
    '10 tokens, 9 were asked for',
  ),
}


@pytest.mark.parametrize('name', _FAULTS)
def test_a_fault_costs_a_retry_or_the_turn(served, name, caplog):
  fault, attempts, line = _FAULTS[name]
  engine = served.engine(retries=1)
  fake_servers.begin(engine, [[0]])
  (healthy,) = fake_servers.turns(engine).values()
  engine.statistics()

  # A fault that passes leaves no trace; one that does not fails the row.
  served.faults.answers = [fault]
  fake_servers.begin(engine, [[0]])
  (turn,) = fake_servers.turns(engine).values()
  if attempts == 1:
    assert turn is None
  else:
    fake_servers.assert_same_turns({0: turn}, {0: healthy})
    assert engine.statistics()['engine/retries'] == 1
  # A fault in every attempt fails the row.
  served.faults.answers = [fault] * attempts
  engine.statistics()
  caplog.clear()
  fake_servers.begin(engine, [[0]])
  assert fake_servers.turns(engine) == {0: None}
  assert engine.statistics() == {
    'engine/ok': 0.0,
    'engine/failures': 1.0,
    'engine/retries': float(attempts - 1),
  }
  assert not served.faults.answers
  (record,) = caplog.records
  assert line in record.getMessage() and record.levelno == logging.WARNING
  assert '\n' not in record.getMessage()


def test_a_slow_turn_times_out_and_is_requested_again(served):
  engine = served.engine(timeout=0.5, retries=1)
  fake_servers.begin(engine, [[0]])
  (healthy,) = fake_servers.turns(engine).values()
  served.faults.answers = ['slow']
  fake_servers.begin(engine, [[0]])
  fake_servers.assert_same_turns(fake_servers.turns(engine), {0: healthy})
  assert engine.statistics()['engine/retries'] == 1


def test_retry_after_is_honoured(served):
  pauses = http_client.Pauses(first=0.001, longest_retry_after=0.2)
  engine = served.engine(pauses=pauses)
  served.faults.answers = [(429, {'Retry-After': '7'}), (503, {})]
  start = time.monotonic()
  fake_servers.begin(engine, [[0]])
  assert None not in fake_servers.turns(engine).values()
  assert 0.2 <= time.monotonic() - start < 5.0
