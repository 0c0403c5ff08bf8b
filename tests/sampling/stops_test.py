"""Stops on token ids are the stops in the decoded text."""

import functools

import numpy as np
import pytest

from stppo_jax.envs import actions
from stppo_jax.sampling import stops
from tests.sampling import vocabularies

_MAKERS = {'phrases': vocabularies.phrases, 'bpe': vocabularies.bpe}


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
  tokenizer = _MAKERS[name]()
  token_bytes = tokenizer.token_bytes()
  automaton = _automaton(tokenizer)
  rng = np.random.default_rng(0)
  count = 1500
  stopped = sum(
    _check(tokenizer, automaton, _random_ids(rng, token_bytes))
    for _ in range(count)
  )
  assert 0.2 * count < stopped < 0.98 * count  # both happen


def test_the_vocabularies_cut_stop_strings_in_many_ways():
  tokens = vocabularies.bpe().token_bytes()
  assert not {b'</search>', b'</answer>'} & set(tokens)
  assert any(t.startswith(b'>') and len(t) > 1 for t in tokens)
  assert {b'</search>', b'</answer>', b'<'} <= set(
    vocabularies.phrases().token_bytes()
  )


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


def test_the_end_of_sequence_stops_from_every_state():
  tokenizer = vocabularies.phrases()
  automaton = _automaton(tokenizer)
  column = automaton.next_state_ZV[:, tokenizer.eos_id]
  assert (column == automaton.stopped).all()


def test_each_of_several_end_tokens_stops():
  automaton = stops.build(
    [b'</search>', b'x', b'<e>', b'<f>'],
    stop_strings=['</search>'],
    eos_ids=[2, 3],
  )
  stopped = automaton.next_state_ZV[automaton.START] == automaton.stopped
  assert stopped.tolist() == [True, False, True, True]


@pytest.mark.parametrize(
  'tokens',
  [
    [b'<search>', b'answer', b'<', b'>'],  # no slash at all
    [b'</', b'xsearch>', b'</answer>'],  # has all bytes of the string
    [b'</sea', b'ch>', b'search', b'</answer>'],
  ],
)
def test_a_stop_that_no_tokens_spell_is_refused_by_name(tokens):
  with pytest.raises(ValueError, match="can spell '</search>'"):
    stops.build(
      [*tokens, b''], stop_strings=actions.STOP_STRINGS, eos_ids=[len(tokens)]
    )


@pytest.mark.parametrize(
  'tokens',
  [
    [b'a</search>b'],
    [b'a<', b'/', b'se', b'arch>b'],
    [bytes([byte]) for byte in b'</search>'],
  ],
)
def test_a_stop_that_tokens_spell_is_accepted(tokens):
  vocabulary = [*tokens, b'']
  stops.build(vocabulary, stop_strings=('</search>',), eos_ids=[len(tokens)])


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
