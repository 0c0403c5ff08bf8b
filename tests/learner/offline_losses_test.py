"""An update on pairs: its gradient, its metrics, and what changes nothing."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.learner import offline_losses
from stppo_jax.rollout import pairs as pairs_lib
from tests.learner import trees
from tests.learner import updates

P, L = 8, 12
_FAILED = 6  # the pair whose dispreferred trajectory has no token
_VALID = P - 1
BETA, ALPHA, TEMPERATURE = 0.4, 0.6, 0.8
_POLICY = dataclasses.replace(updates.sums().policy, chunk=40)
_NAMES = (pytest.param('tdpo1', marks=pytest.mark.slow), 'tdpo2')


@functools.cache
def _pairs():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, _POLICY.config.vocab_size, (P, 2, L))
  mask = rng.random((P, 2, L)) < 0.5
  mask[:, :, 0] = False
  mask[:, :, 5] = True
  mask[_FAILED, 1] = False
  return pairs_lib.packed(tokens, mask)


def _update(pairs, *, name='tdpo2', reference=2, **options):
  """Returns gradient, metrics and state of an update; see `updates`."""
  if isinstance(reference, int):
    reference = updates.params(_POLICY, reference)
  inputs = offline_losses.PairInputs(reference, BETA, ALPHA)
  models = updates.Models(_POLICY, None)
  found = updates.update_by(
    offline_losses.tdpo(name),
    updates.HYPERPARAMETERS._replace(loss=inputs),
    pairs,
    models,
    row_length=2 * L,
    temperature=TEMPERATURE,
    **options,
  )
  gradient, _ = updates.gradients(found, models)
  return gradient, found.metrics, found.state.policy


def _assert_same(actual, expected):
  trees.assert_close(actual[:2], expected[:2], atol=2e-6)


def _log_all(params, tokens):
  """Returns the log-softmax over the vocabulary [2Q, L - 1, V], float64."""
  hidden = np.tanh(np.cumsum(params['embedding'][tokens], axis=1))
  logits = hidden[:, :-1].astype(np.float64) @ params['lm_head'].T
  logits = logits / TEMPERATURE
  return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


@pytest.mark.parametrize('name', _NAMES)
def test_the_metrics_are_those_of_the_formula(name):
  pairs = _pairs()
  tokens = pairs.tokens_Q2L.reshape(-1, L)
  log_pi = _log_all(updates.params(_POLICY, 1), tokens)
  log_ref = _log_all(updates.params(_POLICY, 2), tokens)
  loss = margin = correct = 0
  kls, ratios = np.zeros((2, P, 2))
  for p in range(P):
    if p == _FAILED:
      continue
    for side in (0, 1):
      for i in np.flatnonzero(pairs.loss_mask_Q2L[p, side]):
        row, token = 2 * p + side, pairs.tokens_Q2L[p, side, i]
        q, r = log_pi[row, i - 1], log_ref[row, i - 1]
        ratios[p, side] += q[token] - r[token]
        kls[p, side] += sum(np.exp(r) * (r - q))
    u = ratios[p, 0] - ratios[p, 1]
    shift = (kls[p, 1] - kls[p, 0]) * (1 if name == 'tdpo1' else ALPHA)
    loss += math.log1p(math.exp(-BETA * (u - shift))) / _VALID
    margin += BETA * u / _VALID
    correct += (u > 0) / _VALID
  _, metrics, new = _update(pairs, name=name)
  expected = {
    'preference/loss': loss,
    'preference/margin': margin,
    'preference/accuracy': correct,
    'preference/pairs': _VALID,
    'preference/preferred/kl': kls[:, 0].sum() / _VALID,
    'preference/dispreferred/kl': kls[:, 1].sum() / _VALID,
    'preference/preferred/log_ratio': ratios[:, 0].sum() / _VALID,
    'preference/dispreferred/log_ratio': ratios[:, 1].sum() / _VALID,
    'update/skipped': 0,
    'actor/lr': 1,
  }
  norm = metrics.pop('actor/grad_norm')
  assert norm > 0 and new.updates == 1
  assert metrics == pytest.approx(expected, rel=2e-5, abs=1e-6)


@functools.cache
def _gradient_apart():
  """Returns the gradient of the mean of log pi(preferred) - log pi(other)."""
  pairs = _pairs()

  def apart(params):
    logprobs_BL, _ = _POLICY.logprobs_and_entropy(
      params, pairs.tokens_Q2L.reshape(-1, L), temperature=TEMPERATURE
    )
    logprobs_Q2L = logprobs_BL.reshape(P, 2, L)
    sums_Q2 = jnp.sum(jnp.where(pairs.loss_mask_Q2L, logprobs_Q2L, 0), axis=2)
    apart_Q = sums_Q2[:, 0] - sums_Q2[:, 1]
    return jnp.sum(jnp.where(np.arange(P) == _FAILED, 0, apart_Q)) / _VALID

  return jax.device_get(jax.jit(jax.grad(apart))(updates.params(_POLICY, 1)))


@pytest.mark.parametrize('name', _NAMES)
def test_at_the_reference_the_gradient_separates_the_pair(name):
  gradient, metrics, _ = _update(_pairs(), name=name, reference=1)
  assert metrics['preference/loss'] == pytest.approx(math.log(2), abs=1e-6)
  assert metrics['preference/preferred/kl'] == pytest.approx(0, abs=1e-6)
  expected = jax.tree.map(lambda g: -BETA / 2 * g, _gradient_apart())
  trees.assert_close(gradient, expected)


@pytest.mark.slow
def test_microbatches_devices_and_pairs_without_tokens_change_nothing():
  many = _update(_pairs(), **updates.MANY)
  _assert_same(many, _update(_pairs()))
  three = jax.tree.map(lambda x: x[:3], _pairs())
  filled = pairs_lib.minibatch(three, 0, size=P, seed=0)
  # The rows are sharded and cut, so some devices and one microbatch of others
  # have none of these.
  found = _update(filled, **updates.MANY)
  assert found[1]['preference/pairs'] == 3
  _assert_same(found, _update(three))


def test_models_compute_at_the_loss_positions_only():
  nowhere = np.full_like(_pairs().loss_positions_Q2M, L)
  gradient, metrics, _ = _update(_pairs()._replace(loss_positions_Q2M=nowhere))
  assert metrics['preference/loss'] == pytest.approx(math.log(2), abs=1e-6)
  assert not any(np.any(g) for g in jax.tree.leaves(gradient))


def test_a_gradient_that_is_not_finite_changes_nothing():
  bad = updates.params(_POLICY, 2)
  bad['lm_head'][0] = np.nan
  gradient, metrics, new = _update(_pairs(), reference=bad)
  assert metrics['update/skipped'] == 1
  assert new.updates == 0
  assert not any(np.any(g) for g in jax.tree.leaves(gradient))
