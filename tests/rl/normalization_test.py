"""By hand; the loop over random batches is in losses_test.py."""

import functools

import jax
import numpy as np
import pytest

from stppo_jax.rl import ratios
from tests.rl import batches

# Turns of spread 0.3, 0.1, none at all, and a single token.
LOGS = np.array([[0.5, -0.1, 0.0, 0.3, 0.1, 0.2, 0.2, 0.7]])
TURNS = np.array([[1, 1, 0, 2, 2, 3, 3, 4]], np.int32)


@jax.jit
def _guard(logs):
  batch, _, _ = batches.make()
  batch = batch.replace(turn_ids_BL=TURNS, loss_mask_BL=TURNS > 0)
  guard = ratios.NORMALIZATIONS['guard']
  target = guard.statistics(logs, batch, num_turns=4)
  return target, *guard.function(logs, batch, target, num_turns=4)


def test_guard_does_nothing_at_the_old_policy_and_its_scale_is_limited():
  target, normal, weights = _guard(np.zeros_like(LOGS))
  assert target == 0
  np.testing.assert_array_equal(normal, np.zeros_like(LOGS))
  np.testing.assert_array_equal(weights, np.ones_like(LOGS))
  _, _, weights = _guard(np.where(TURNS == 1, LOGS * 1e-4, LOGS))
  np.testing.assert_allclose(weights[0, 0], 1 / ratios.GUARD_LIMIT)


@jax.jit
@functools.partial(jax.value_and_grad, has_aux=True)
def _loss_and_ratio(logprobs, entropy, batch):
  """Returns (loss, ratio) of guarded GRPO, and the gradient of the loss."""
  algorithm = batches.algorithm('grpo_guard')
  loss = batches.policy_loss(algorithm, logprobs, entropy, batch)
  return loss.loss, loss.ratio_BL


@pytest.mark.parametrize('log_ratio', [4.0, 7.0, 20.0])
@pytest.mark.parametrize('advantage', [-1.0, 1.0])
def test_one_unusual_token_moves_its_turn_by_a_bounded_amount(
  log_ratio, advantage
):
  turn_ids = np.ones((1, 10), np.int32)
  logprobs = np.zeros((1, 10), np.float32)
  logprobs[0, 0] = log_ratio
  zeros = np.zeros_like(logprobs)
  batch = batches.rows(batches.make(dtype=np.float32)[0], np.arange(1)).replace(
    tokens_BL=turn_ids,
    turn_ids_BL=turn_ids,
    loss_mask_BL=turn_ids > 0,
    old_logprobs_BL=zeros,
    advantages_BL=zeros + np.float32(advantage),
  )
  (value, ratio_BL), gradient = _loss_and_ratio(logprobs, zeros, batch)
  assert np.isfinite(value) and np.all(np.isfinite(gradient))
  # Nine tokens did not change. The mean of e^l - 1 - l gave them ratios of 143
  # at log_ratio 4; the mean of l gives them less than 1.
  assert np.all(np.asarray(ratio_BL)[0, 1:] < 1)
  assert np.all(np.asarray(ratio_BL) <= np.exp(np.float32(20)))
