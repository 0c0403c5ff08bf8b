"""Stops on token ids are the stops in the decoded text."""

import contextlib
import functools

import numpy as np
import pytest

from stppo_jax.envs import actions
from stppo_jax.sampling import stops
from tests.sampling import vocabularies


@functools.cache
def _automaton(tokenizer):
  return stops.build(
    tokenizer.token_bytes(),
    stop_strings=actions.STOP_STRINGS,
    eos_ids=(tokenizer.eos_id,),
  )


def _check(tokenizer, automaton, ids):
  """Checks the automaton after each token; returns whether it stopped."""
  state = automaton.START
  for count, token_id in enumerate(ids, start=1):
    state = automaton.next_state_ZV[state, token_id]
    text = tokenizer.decode(ids[:count])
    expected = tokenizer.eos_id in ids[:count] or any(
      stop in text for stop in ('</search>', '</answer>')
    )
    assert (state == automaton.stopped) == expected, (ids[:count], text)
  return state == automaton.stopped


def _random_ids(rng, token_bytes):
  """Returns tags in random spellings, some damaged, and other tokens."""
  ids = []
  for _ in range(rng.integers(1, 4)):
    ids += rng.integers(0, len(token_bytes), rng.integers(0, 4)).tolist()
    rest = (b'</search>', b'</answer>')[rng.integers(2)]
    while rest:
      fitting = [
        n
        for n, token in enumerate(token_bytes)
        if token and (rest.startswith(token) or token.startswith(rest))
      ]
      if rng.random() < 0.1:  # one token left out, or another in its place
        ids += rng.integers(0, len(token_bytes), rng.integers(2)).tolist()
      ids.append(fitting[rng.integers(len(fitting))])
      rest = rest[len(token_bytes[ids[-1]]) :]
  return ids


@pytest.mark.parametrize(
  'name', [pytest.param('phrases', marks=pytest.mark.slow), 'bpe']
)
def test_stopped_means_that_the_text_holds_a_stop_string(name):
  tokenizer = vocabularies.PLAIN[name]()
  token_bytes = tokenizer.token_bytes()
  automaton = _automaton(tokenizer)
  rng = np.random.default_rng(0)
  count = 500
  stopped = sum(
    _check(tokenizer, automaton, _random_ids(rng, token_bytes))
    for _ in range(count)
  )
  assert 0.2 * count < stopped < 0.98 * count  # both happen


@pytest.mark.parametrize(
  ('tokens', 'stops_at'),
  [
    ([b'</search>'], 0),
    ([b'</answer>'], 0),
    ([b'x</search>y'], 0),
    ([b'<', b'</sea', b'rch>'], 2),
    ([b'</s', b'</search', b'> so'], 2),
    ([b'</answe', b'', b'r', b'>'], 3),
    ([b'</search', b'x', b'>'], None),
    ([b'</sea', b'swer>'], None),
    ([b'<search>', b'/search>'], None),
    ([b'</search>', b'x', b'y'], 0),
  ],
)
def test_the_automaton_stops_with_the_first_stop_string(tokens, stops_at):
  vocabulary = [*tokens, b'</search></answer>', b'eos']
  automaton = stops.build(
    vocabulary, stop_strings=actions.STOP_STRINGS, eos_ids=[len(vocabulary) - 1]
  )
  state, states = automaton.START, []
  for token_id in range(len(tokens)):
    state = automaton.next_state_ZV[state, token_id]
    states.append(state == automaton.stopped)
  if stops_at is None:
    assert not any(states)
  else:  # it never leaves that state
    assert states == [n >= stops_at for n in range(len(tokens))]


def test_each_of_several_end_tokens_stops_from_every_state():
  automaton = stops.build(
    [b'</search>', b'x', b'<e>', b'<f>'],
    stop_strings=['</search>'],
    eos_ids=[2, 3],
  )
  stopped_ZV = automaton.next_state_ZV == automaton.stopped
  assert stopped_ZV[automaton.START].tolist() == [True, False, True, True]
  assert stopped_ZV[:, 2:].all()


@pytest.mark.parametrize(
  ('tokens', 'spelled'),
  [
    ([b'<search>', b'answer', b'<', b'>'], False),  # no slash at all
    ([b'</', b'xsearch>', b'</answer>'], False),  # has all bytes of the string
    ([b'</sea', b'ch>', b'search', b'</answer>'], False),
    ([b'a</search>b'], True),
    ([b'a<', b'/', b'se', b'arch>b'], True),
    ([bytes([byte]) for byte in b'</search>'], True),
  ],
)
def test_a_stop_that_no_tokens_spell_is_refused_by_name(tokens, spelled):
  expected = pytest.raises(ValueError, match="can spell '</search>'")
  with contextlib.nullcontext() if spelled else expected:
    stops.build(
      [*tokens, b''], stop_strings=('</search>',), eos_ids=[len(tokens)]
    )


def test_padding_ids_of_the_model_change_nothing():
  tokenizer = vocabularies.phrases()
  automaton = _automaton(tokenizer)
  size = tokenizer.vocab_size
  table_SV = automaton.table(size + 3)
  np.testing.assert_array_equal(table_SV[:, :size], automaton.next_state_ZV)
  states = np.arange(len(table_SV))
  for padding in range(size, size + 3):
    np.testing.assert_array_equal(table_SV[:, padding], states)
    assert tokenizer.decode([padding]) == ''
