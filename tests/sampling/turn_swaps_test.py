"""Weights change between turns only, also if they change at any moment."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import cached_pass
from tests.models import tiny
from tests.sampling import tiny_engine

_MODEL, _LENGTH = tiny_engine.MODEL, tiny_engine.MAX_LENGTH
_TURNS = 4  # most turns of a dialogue
# So different that a token of another version would be found out.
_POLICIES = [tiny.params(_MODEL, seed) for seed in range(5)]
_MODES = {'fixed shapes': True, 'active rows': False}


def _engine(**changes):
  engine, (driver,) = tiny_engine.engine_and_drivers(early_exit=0.25, **changes)
  return engine, driver


def _collect(engine, rows, *, group_size=1, swap=0.4, seed=0, checks=()):
  """Returns dialogues during which weights change at random moments.

  Args:
    engine: the engine; version v has the weights of policy v % 5.
    rows: the number of dialogues.
    group_size: see `Engine.begin`.
    swap: the probability of new weights before a poll.
    seed: the seed of these moments.
    checks: functions that are called after each poll.

  Returns:
    For each row, a `Dialogue` and the version of each of its turns.
  """
  rng = np.random.default_rng(seed)
  newest = 0
  engine.publish(_POLICIES[0], 0)
  prompts = tiny_engine.prompts(rows // group_size)
  engine.begin(
    prompts,
    tiny_engine.keys(rows),
    group_size=group_size,
    max_turn_tokens=5,
    greedy=False,
  )
  found = [(tiny_engine.Dialogue([], [], []), []) for _ in range(rows)]
  for n, (dialogue, _) in enumerate(found):
    dialogue.append_observation(prompts[n // group_size])
  due, left = {}, rows
  while left:
    due = {n: wait - 1 for n, wait in due.items()}
    now = [n for n, wait in due.items() if wait < 0]
    if not engine.busy and not now:
      now = [min(due, key=lambda n: due[n])]
    for n in now:
      del due[n]
      dialogue, versions = found[n]
      observation = tiny_engine.ids(100 * n + len(versions), len(versions) % 4)
      if len(versions) == _TURNS or len(observation) >= engine.remaining(n):
        engine.close(n)
        left -= 1
      else:
        engine.resume(n, observation)
        dialogue.append_observation(observation)
    if rng.random() < swap:
      newest += 1
      weights = engine.transferred(_POLICIES[newest % len(_POLICIES)])
      engine.swap_weights(weights, newest)
      del weights
    for n, turn in engine.poll().items():
      found[n][0].append_turn(turn)
      found[n][1].append(turn.version)
      due[n] = int(rng.integers(3))
    for check in checks:
      check()
  return found


def _arrays(found):
  """Returns tokens, log-probabilities, mask and version of each token.

  The version of a prompt or an observation is that of the turn that follows.
  """
  tokens, versions = np.zeros((2, len(found), _LENGTH), np.int32)
  logprobs = np.zeros((len(found), _LENGTH), np.float32)
  mask = np.zeros((len(found), _LENGTH), bool)
  for row, (dialogue, of_turns) in enumerate(found):
    count, begin = len(dialogue.tokens), 0
    tokens[row, :count] = dialogue.tokens
    logprobs[row, :count] = dialogue.logprobs
    for (first, end), version in zip(dialogue.spans, of_turns, strict=True):
      mask[row, first:end] = True
      versions[row, begin:end] = version
      begin = end
  return tokens, logprobs, mask, versions % len(_POLICIES)


def _recomputed(tokens_BL, versions_BL):
  """Returns log-probabilities of whole passes with each token's version."""
  trainer = jax.jit(
    functools.partial(
      _MODEL.logprobs_and_entropy, temperature=tiny_engine.TEMPERATURE
    )
  )
  by_policy = np.stack([trainer(x, tokens_BL)[0] for x in _POLICIES])
  return np.take_along_axis(by_policy, versions_BL[None], axis=0)[0]


def _replayed(tokens_BL, versions_BL):
  """Returns log-probabilities where each token is read by its version only.

  One token after the other, by a dense pass that knows no pages and no slots.
  """
  layered = [tiny.split_layers(_MODEL, params) for params in _POLICIES]
  stack = jax.tree.map(lambda *x: jnp.stack(x), *layered)
  nothing = jnp.zeros(1, jnp.int32)
  cached = cached_pass.Copied(((),) * _MODEL.config.num_layers, nothing, 0)

  def of_row(tokens_L, versions_L):
    def read(carry, place):
      recent, hidden_D = carry
      # What predicts a token is of the version that writes it.
      params = jax.tree.map(lambda x: x[versions_L[place]], stack)
      logits_V = _MODEL.output_VD(params) @ hidden_D
      logprobs_V = jax.nn.log_softmax(logits_V / tiny_engine.TEMPERATURE)
      hidden_11D, recent = _MODEL.extend(
        params,
        tokens_L[place][None, None],
        cached=cached,
        lengths_B=nothing,
        recent=recent,
        first=place,
      )
      return (recent, hidden_11D[0, 0]), logprobs_V[tokens_L[place]]

    start = cache_lib.nothing_recent(_MODEL.config, 1, _LENGTH)
    carry = start, jnp.zeros(_MODEL.config.hidden_size)
    return jax.lax.scan(read, carry, jnp.arange(_LENGTH))[1]

  return np.asarray(jax.jit(jax.vmap(of_row))(tokens_BL, versions_BL))


_REFERENCES = {'keep': _replayed, 'recompute': _recomputed}


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['fixed shapes', 'active rows'])
@pytest.mark.parametrize('turn_swaps', _REFERENCES)
def test_no_turn_has_tokens_of_two_versions(mode, turn_swaps):
  engine, _ = _engine(deterministic=_MODES[mode], turn_swaps=turn_swaps)
  # Whole groups, so that prompts are copied between slots, too.
  found = _collect(engine, 300, group_size=2)
  tokens_BL, logprobs_BL, mask_BL, versions_BL = _arrays(found)
  assert sum(len(dialogue.spans) for dialogue, _ in found) >= 1000
  assert sum(len(set(versions)) > 1 for _, versions in found) >= 200
  assert all(versions == sorted(versions) for _, versions in found)
  for name, reference in _REFERENCES.items():
    distance_BL = np.abs(reference(tokens_BL, versions_BL) - logprobs_BL)
    worst = distance_BL[mask_BL].max()
    if name == turn_swaps:
      assert worst < 1e-5
    else:  # the two differ, and by much where policies do
      assert worst > 0.1


@pytest.mark.slow
@pytest.mark.parametrize('turn_swaps', _REFERENCES)
def test_three_versions_of_weights_are_held_at_most(turn_swaps):
  engine, driver = _engine(deterministic=False, turn_swaps=turn_swaps)
  _collect(engine, 6, swap=0.0)
  weights = sum(x.nbytes for x in jax.tree.leaves(_POLICIES[0]))
  held = []

  def measure():
    driver.programs.forget_calls()
    held.append(sum(x.nbytes for x in jax.live_arrays()) / weights)

  measure()  # one version
  _collect(engine, 30, swap=1.0, checks=[measure])
  # Two that turns are written with, and the newest.
  assert 1.9 < max(held) - held[0] < 2.5


def test_weights_that_do_not_change_change_nothing():
  tokens_BL, logprobs_BL, *others = _arrays(
    _collect(_engine(deterministic=True)[0], 18, swap=0.0)
  )
  for turn_swaps in _REFERENCES:
    engine, _ = _engine(deterministic=True, turn_swaps=turn_swaps)
    found = _arrays(_collect(engine, 18, swap=0.0))
    np.testing.assert_array_equal(found[0], tokens_BL)
    np.testing.assert_array_equal(found[2:], others)
    # Waves or not, slots are read in other groups: some CPUs add otherwise then.
    np.testing.assert_allclose(found[1], logprobs_BL, rtol=0, atol=2e-6)
