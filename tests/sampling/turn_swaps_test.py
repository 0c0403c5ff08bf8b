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
# So different that a token of another version would be found out.
_POLICIES = [tiny.params(_MODEL, seed) for seed in range(5)]


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
    checks: functions that are called before each poll.
  """
  rng = np.random.default_rng(seed)
  newest = 0

  def before_poll():
    nonlocal newest
    for check in checks:
      check()
    if rng.random() < swap:
      newest += 1
      weights = engine.transferred(_POLICIES[newest % len(_POLICIES)])
      engine.swap_weights(weights, newest)

  engine.publish(_POLICIES[0], 0)
  dialogues = tiny_engine.dialogues(
    engine,
    rows,
    group_size=group_size,
    delays=seed,
    observe=_observe,
    before_poll=before_poll,
  )
  return [dialogues[row] for row in range(rows)]


def _observe(row, turns):
  """Returns 1 to 3 tokens, or None after four turns."""
  return None if turns == 4 else tiny_engine.ids(100 * row + turns, turns % 4)


def _arrays(found):
  """Returns tokens, log-probabilities, mask and version of each token.

  The version of a prompt or an observation is that of the turn that follows.
  """
  tokens, versions = np.zeros((2, len(found), _LENGTH), np.int32)
  logprobs = np.zeros((len(found), _LENGTH), np.float32)
  mask = np.zeros((len(found), _LENGTH), bool)
  for row, dialogue in enumerate(found):
    count, begin = len(dialogue.tokens), 0
    tokens[row, :count] = dialogue.tokens
    logprobs[row, :count] = dialogue.logprobs
    for (first, end), version in zip(dialogue.spans, dialogue.versions):
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
@pytest.mark.parametrize('deterministic', [True, False])
@pytest.mark.parametrize('turn_swaps', _REFERENCES)
def test_no_turn_has_tokens_of_two_versions(deterministic, turn_swaps):
  engine, _ = _engine(deterministic=deterministic, turn_swaps=turn_swaps)
  # Whole groups, so that prompts are copied between slots, too.
  found = _collect(engine, 340, group_size=2)
  tokens_BL, logprobs_BL, mask_BL, versions_BL = _arrays(found)
  assert sum(len(dialogue.spans) for dialogue in found) >= 1000
  assert sum(len(set(dialogue.versions)) > 1 for dialogue in found) >= 200
  assert all(x.versions == sorted(x.versions) for x in found)
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
    # Slots are read in other groups, which some CPUs add in another order.
    np.testing.assert_allclose(found[1], logprobs_BL, rtol=0, atol=2e-6)
