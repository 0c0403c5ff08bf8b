"""Sampled values agree with the exact values of a small game.

The game has three turns of two tokens each. The policy chooses each token by
fixed odds, and the reward of the end depends on all of them, so that the value
of every prefix is a sum over what can follow.
"""

import types as types_lib

import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.rollout import event_loop
from stppo_jax.rollout import pack
from stppo_jax.sampling import scripted
from stppo_jax.tools.lab import continuations
from stppo_jax.tools.lab import values
from tests.rollout import dialogues

_TURNS = 3
_ROWS, _COUNT = 24, 64  # trajectories, and continuations of a prefix
_TURN_REWARD = 0.25  # of each turn whose tokens are equal
_ODDS = {None: (0.3, 0.7), 0: (0.6, 0.4), 1: (0.2, 0.8)}  # by the token before


def _outcome(tokens):
  return float(sum(tokens) >= 4) + 0.5 * tokens[0] * tokens[-1]


def _reward(tokens):
  """Returns what the last of these tokens earns."""
  if len(tokens) % 2:
    return 0.0
  outcome = _outcome(tokens) if len(tokens) == 2 * _TURNS else 0.0
  return outcome + _TURN_REWARD * (tokens[-1] == tokens[-2])


def _moments(tokens):
  """Returns the exact mean and mean square of what follows these tokens."""
  if len(tokens) == 2 * _TURNS:
    return np.zeros(2)
  odds = _ODDS[tokens[-1] if len(tokens) % 2 else None]
  total = np.zeros(2)
  for token, p in enumerate(odds):
    reward = _reward([*tokens, token])
    mean, square = _moments([*tokens, token])
    total += p * np.array(
      [reward + mean, reward**2 + 2 * reward * mean + square]
    )
  return total


class _Episode:
  """Remembers the turns, so that it must have seen those of a prefix.

  A token is the letter `a` or `b`.
  """

  def __init__(self, question):
    del question
    self.seen = []

  async def step(self, question, turn_index, text):
    assert len(self.seen) == turn_index
    assert question.id == 'q'
    self.seen.append(text)
    reward = _TURN_REWARD * (text[0] == text[1])
    if turn_index + 1 == _TURNS:
      status = types.TrajectoryStatus.COMPLETED
      return protocol.Step('answer', None, status, reward)
    observation = protocol.Observation('', 'o', '')
    return protocol.Step('ask', observation, None, reward)

  def rewards(self, question, prompt, texts, status):
    del question, status
    assert prompt == 'p' and list(texts) == self.seen
    tokens = ['ab'.index(letter) for letter in ''.join(texts)]
    return {'outcome': _outcome(tokens)}, {}

  def close(self):
    pass


class _Tokenizer(dialogues.Letters):
  """One token for each letter."""

  def encode_text(self, text, *, tags=()):
    del tags
    return np.array(['abop'.index(letter) for letter in text], np.int32)

  def decode(self, ids):
    return ''.join('abop'[n] for n in ids)


class _Engine(scripted.ScriptedEngine):
  """An engine whose policy has the odds of the game."""

  version = 0

  def __init__(self):
    super().__init__([], max_length=64)
    self._rng = np.random.default_rng(0)

  def begin(self, prompts, keys, *, group_size, **options):
    assert len(keys) == len(prompts) * group_size
    repeated = [x for x in prompts for _ in range(group_size)]
    self._scripts = [self._turns_after(prompt[-1]) for prompt in repeated]
    super().begin(prompts, group_size=group_size, **options)

  def _turns_after(self, last):
    """Draws the rest of a turn that has begun, and as many as may follow."""
    turns = [[self._draw(last)]] if last < 2 else []
    for first in [self._draw(None) for _ in range(_TURNS)]:
      turns.append([first, self._draw(first)])
    return [np.array(turn, np.int32) for turn in turns]

  def _draw(self, before):
    return int(self._rng.random() < _ODDS[before][1])


def _batch(num_rows, count):
  """Returns trajectories and the arrays of their batch with sampled values."""
  game = types_lib.SimpleNamespace(
    tags=(), tools=(), prompt=lambda question: question.text, episode=_Episode
  )
  tokenizer = _Tokenizer()
  question = types.Question('q', 'p', ('x',), 'game')
  with event_loop.EventLoop() as loop:
    keys = np.zeros(num_rows)
    collector = dialogues.make_collector(
      _Engine(), game, loop, tokenizer=tokenizer, group_size=num_rows
    )
    trajectories = collector.collect([question], keys)
    adapted, encoder = continuations.continuing(game, tokenizer)
    collector = dialogues.make_collector(
      _Engine(), adapted, loop, tokenizer=encoder, group_size=count
    )
    options = dict(count=count, seed=0, step=0)
    sampled = continuations.sample(collector, trajectories, **options)
  packed = pack.pack(trajectories, length_bucket=1)
  names = ('loss_mask_BL', 'turn_ids_BL', 'rewards_BL', 'tokens_BL')
  arrays = {name: np.asarray(getattr(packed, name)) for name in names}
  shape = arrays['loss_mask_BL'].shape
  return arrays | continuations.as_arrays(sampled, shape)


@pytest.fixture(scope='module')
def arrays():
  return _batch(_ROWS, _COUNT)


def _exact(arrays):
  """Returns exact means and variances [B, L] at policy tokens, 0 elsewhere."""
  exact = np.zeros((2, *arrays['tokens_BL'].shape))
  for row, position in np.argwhere(arrays['loss_mask_BL']):
    ids = arrays['tokens_BL'][row, :position]
    mean, square = _moments([n for n in ids if n < 2])
    exact[:, row, position] = mean, square - mean**2
  return exact


def test_sampled_values_are_the_exact_ones(arrays):
  means_BL, variances_BL = _exact(arrays)
  places = arrays['loss_mask_BL']
  assert places.sum() == _ROWS * 2 * _TURNS
  np.testing.assert_array_equal(
    arrays['oracle_counts_BL'], np.where(places, _COUNT, 0)
  )
  errors = (arrays['oracle_values_BL'] - means_BL)[places]
  z = errors / np.sqrt(np.maximum(variances_BL[places], 1e-6) / _COUNT)
  assert np.abs(z).max() < 5
  assert np.mean(z**2) == pytest.approx(1, abs=0.3)


@pytest.mark.slow
def test_the_ceiling_and_the_figures_of_a_critic_are_unbiased():
  """With two continuations, noise is as large as the values' own spread."""
  arrays = _batch(1000, 2)
  means_BL, variances_BL = _exact(arrays)
  noise = np.random.default_rng(1).normal(0, 0.3, means_BL.shape)
  arrays['old_values_BL'] = 0.1 + means_BL + noise
  found = values.values(arrays)[values.ALL_TURNS]
  places = arrays['loss_mask_BL']
  exact, luck = means_BL[places], variances_BL[places].mean()
  assert found.mean == pytest.approx(exact.mean(), abs=0.02)
  assert found.spread == pytest.approx(exact.std(), abs=0.02)
  assert found.luck == pytest.approx(np.sqrt(luck), abs=0.02)
  total = exact.var() + luck
  assert found.ceiling == pytest.approx(exact.var() / total, abs=0.03)
  error = 0.1**2 + 0.3**2
  assert found.critic.bias == pytest.approx(0.1, abs=0.02)
  assert found.critic.error == pytest.approx(np.sqrt(error), abs=0.02)
  assert found.critic.explained == pytest.approx(
    (exact.var() - error) / total, abs=0.03
  )
  slope = exact.var() / (exact.var() + 0.3**2)
  assert found.critic.slope == pytest.approx(slope, abs=0.05)


def test_exact_advantages_agree_as_well_as_noise_allows(arrays):
  """An estimator with exact values reaches the correlation named perfect."""
  (exact_BL, _), ids_BL = _exact(arrays), arrays['turn_ids_BL']
  perfect_BL = np.zeros(exact_BL.shape)
  for row in range(len(ids_BL)):
    for turn in range(1, _TURNS + 1):
      own = ids_BL[row] == turn
      after = ids_BL[row] == turn + 1
      first = np.argmax(own)
      next_value = exact_BL[row, np.argmax(after)] if after.any() else 0.0
      earned = arrays['rewards_BL'][row][own].sum()
      perfect_BL[row, own] = earned + next_value - exact_BL[row, first]
  random_BL = np.random.default_rng(2).normal(size=exact_BL.shape)
  found = values.correlations(
    arrays, {'perfect': perfect_BL, 'random': random_BL, 'none': 0 * random_BL}
  )
  assert found.turns == [1, 2, 3]
  np.testing.assert_allclose(found.estimators['perfect'], found.most, atol=0.03)
  assert min(found.most) > 0.8
  assert np.abs(found.estimators['random']).max() < 0.4
  assert np.isnan(found.estimators['none']).all()
