"""Turns that a server fails are repeated, or fail their row only."""

import logging

import pytest

from tests.sampling.remote import fake_servers

_EOS, _TURN = fake_servers.EOS, fake_servers.TURN
_choice = fake_servers.change_choice


def _no_choices(reply):
  reply['choices'] = []


def _written(ids, logprobs):
  return _choice(token_ids=ids, logprobs={'token_logprobs': logprobs})


_FAULTS = {
  # These pass: the request is repeated.
  '500': ((500, {}), 2, 'status 500: so sorry'),
  '502': ((502, {}), 2, 'status 502'),
  '429': ((429, {'Retry-After': '0'}), 2, 'status 429'),
  '408': ((408, {}), 2, 'status 408'),
  'garbage': ('garbage', 2, 'JSON'),
  'nothing': (_no_choices, 2, 'one choice'),
  'aborted': (_choice(finish_reason='abort'), 2, "finish_reason='abort'"),
  'too short': (_written([0], [-1.0]), 2, '1 of 9 tokens'),
  # These do not.
  '400': ((400, {}), 1, 'status 400'),
  '302': ((302, {'Location': '/health'}), 1, 'status 302'),
  'other prompt': (_choice(prompt_token_ids=[9]), 1, 'other token ids'),
  'no prompt': (_choice(prompt_token_ids=None), 1, 'without its token ids'),
  'no ids': (_choice(token_ids=None), 1, 'no token ids'),
  'text': (_choice(token_ids=['a']), 1, 'no token ids'),
  'no logprobs': (_choice(logprobs=None), 1, 'no log-probabilities'),
  'fewer': (_choice(logprobs={'token_logprobs': []}), 1, '0 log-prob'),
  'null': (_written([_EOS], [None]), 1, 'at most 0'),
  'positive': (_written([_EOS], [0.5]), 1, 'at most 0'),
  'foreign': (_written([99] * _TURN, [-1.0] * _TURN), 1, 'id 99'),
  'too long': (
    _written([0] * 10, [-1.0] * 10),
    1,
    '10 tokens, but max_tokens=9',
  ),
}


@pytest.mark.parametrize('name', _FAULTS)
def test_a_fault_costs_a_retry_or_the_turn(served, name, caplog):
  fault, attempts, line = _FAULTS[name]
  engine = served.vllm_engine(retries=1)
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
  # The server may still complain of clients that have gone.
  (record,) = [x for x in caplog.records if x.name.startswith('stppo_jax')]
  assert line in record.getMessage() and record.levelno == logging.WARNING
  assert '\n' not in record.getMessage()


def test_a_slow_turn_times_out_and_is_requested_again(served):
  patient = served.engine()  # for which the server compiles its programs
  fake_servers.begin(patient, [[0]])
  (healthy,) = fake_servers.turns(patient).values()
  engine = served.engine(timeout=0.5, retries=1)
  engine.statistics()
  served.faults.answers = ['slow']
  fake_servers.begin(engine, [[0]])
  fake_servers.assert_same_turns(fake_servers.turns(engine), {0: healthy})
  assert engine.statistics()['engine/retries'] == 1
