"""Sampled values agree with the exact values of a small game.

The game has three turns of two tokens each. The policy chooses each token by
fixed odds, and the reward of the end depends on all of them, so that the value
of every prefix is a sum over what can follow.
"""

import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.rollout import collect
from stppo_jax.rollout import event_loop
from stppo_jax.rollout import pack
from stppo_jax.tools.lab import continuations
from stppo_jax.tools.lab import values
from tests.rollout import dialogues

_TURNS = 3
_COUNT = 128  # continuations of a prefix
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


class _Game:
  """The environment of the game: a token is the letter `a` or `b`."""

  tags, tools = (), ()

  def prompt(self, question):
    return question.text

  def episode(self, question):
    del question
    return _Episode()


class _Episode:
  """Remembers the turns, so that it must have seen those of a prefix."""

  def __init__(self):
    self.seen = []

  async def step(self, question, turn_index, text):
    assert len(self.seen) == turn_index
    assert question.id == 'q'
    self.seen.append(text)
    tokens = _tokens(text)
    reward = _TURN_REWARD * (tokens[0] == tokens[1])
    if turn_index + 1 == _TURNS:
      status = types.TrajectoryStatus.COMPLETED
      return protocol.Step('answer', None, status, reward)
    observation = protocol.Observation('', 'o', '')
    return protocol.Step('ask', observation, None, reward)

  def rewards(self, question, prompt, texts, status):
    del question, status
    assert prompt == 'p' and list(texts) == self.seen
    return {'outcome': _outcome(_tokens(''.join(texts)))}, {}

  def close(self):
    pass


def _tokens(text):
  return ['ab'.index(letter) for letter in text]


class _Tokenizer(dialogues.Letters):
  """One token for each letter."""

  def encode_text(self, text, *, tags=()):
    del tags
    return np.array(['abop'.index(letter) for letter in text], np.int32)

  def decode(self, ids):
    return ''.join('abop'[n] for n in ids)


class _Engine:
  """An engine whose policy has the odds of the game."""

  max_length, version = 64, 0

  def __init__(self):
    self._rng = np.random.default_rng(0)

  def begin(self, prompts, keys, *, group_size, max_turn_tokens, greedy):
    del max_turn_tokens, greedy
    assert len(keys) == len(prompts) * group_size
    repeated = [x for x in prompts for _ in range(group_size)]
    self._ids = {n: list(x) for n, x in enumerate(repeated)}
    self._writing = set(self._ids)

  @property
  def busy(self):
    return bool(self._writing)

  def poll(self):
    turns = {}
    for row in sorted(self._writing):
      ids, written = self._ids[row], []
      if ids[-1] < 2:  # the prompt ends within a turn
        written.append(self._draw(ids[-1]))
      else:
        written.append(self._draw(None))
        written.append(self._draw(written[0]))
      ids += written
      zeros = np.zeros(len(written), np.float32)
      turns[row] = types.GeneratedTurn(
        np.array(written, np.int32), zeros, zeros, True
      )
    self._writing.clear()
    return turns

  def _draw(self, before):
    return int(self._rng.random() < _ODDS[before][1])

  def remaining(self, row):
    return self.max_length - len(self._ids[row])

  def resume(self, row, token_ids):
    self._ids[row] += list(token_ids)
    self._writing.add(row)

  def close(self, row):
    del row

  def statistics(self):
    return {}

  def finish(self):
    pass


def _collector(loop, environment, tokenizer, *, group_size):
  return collect.Collector(
    engine=_Engine(),
    environment=environment,
    tokenizer=tokenizer,
    loop=loop,
    max_turn_tokens=2,
    max_observation_tokens=1,
    group_size=group_size,
  )


def _batch(num_rows, count):
  """Returns trajectories and the arrays of their batch with sampled values."""
  game, tokenizer = _Game(), _Tokenizer()
  question = types.Question('q', 'p', ('x',), 'game')
  with event_loop.EventLoop() as loop:
    keys = np.zeros(num_rows)
    collector = _collector(loop, game, tokenizer, group_size=num_rows)
    trajectories = collector.collect([question], keys)
    adapted = continuations.continuing(game, tokenizer)
    sampled = continuations.sample(
      _collector(loop, *adapted, group_size=count),
      trajectories,
      count=count,
      seed=0,
      step=0,
    )
  packed = pack.pack(trajectories, length_bucket=1)
  arrays = {
    name: np.asarray(getattr(packed, name))
    for name in ('loss_mask_BL', 'turn_ids_BL', 'rewards_BL', 'tokens_BL')
  }
  shape = arrays['loss_mask_BL'].shape
  return arrays | continuations.as_arrays(sampled, shape)


@pytest.fixture(scope='module')
def arrays():
  return _batch(32, _COUNT)


def _exact(arrays):
  """Returns exact means and variances [B, L] at policy tokens, 0 elsewhere."""
  exact = np.zeros((2, *arrays['tokens_BL'].shape))
  for row, position in np.argwhere(arrays['loss_mask_BL']):
    ids = arrays['tokens_BL'][row, :position]
    mean, square = _moments([n for n in ids if n < 2])
    exact[:, row, position] = mean, square - mean**2
  return exact


def test_every_turn_has_sampled_values_at_its_first_and_last_token(arrays):
  assert arrays['loss_mask_BL'].sum() == 32 * 2 * _TURNS
  np.testing.assert_array_equal(
    arrays['oracle_counts_BL'], np.where(arrays['loss_mask_BL'], _COUNT, 0)
  )


def test_sampled_values_are_the_exact_ones(arrays):
  means_BL, variances_BL = _exact(arrays)
  places = arrays['loss_mask_BL']
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
  rng = np.random.default_rng(2)
  random_BL = rng.normal(size=exact_BL.shape)
  found = values.correlations(
    arrays, {'perfect': perfect_BL, 'random': random_BL, 'none': 0 * random_BL}
  )
  assert found.turns == [1, 2, 3]
  np.testing.assert_allclose(found.estimators['perfect'], found.most, atol=0.03)
  assert min(found.most) > 0.8
  assert np.abs(found.estimators['random']).max() < 0.4
  assert np.isnan(found.estimators['none']).all()
