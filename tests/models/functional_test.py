"""The functions of a model: heads, values, and weights that do not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import lora
from tests.models import tiny

_TOKENS = np.array([[1, 5, 2, 7], [3, 3, 9, 0]], np.int32)


def test_initial_weights_have_the_right_shapes_and_scales():
  model = tiny.model('scalar')

  @jax.jit  # two leaves only, so that the others are not even compiled
  def fresh(key):
    params = model.init(key)
    return params['scalar_head'], params['layers']['q_proj']['kernel']

  head, kernel = jax.device_get(fresh(jax.random.key(0)))
  # All values are zero at first.
  assert not np.any(head)
  # Layers are stacked, and differ from each other.
  assert kernel.shape == (2, 16, 16)
  assert 0.015 < kernel[0].std() < 0.025
  assert abs(np.corrcoef(kernel[0].ravel(), kernel[1].ravel())[0, 1]) < 0.2


# The numbers at loss positions are tested every time in learner/step_test.py;
# this counts operations too.
@pytest.mark.slow
@pytest.mark.parametrize(
  ('unrolled', 'adapted'), [(1, False), (2, True), (2, False)]
)
def test_states_that_are_not_wanted_are_not_computed(unrolled, adapted):
  model = tiny.model('both', scan_unroll=unrolled)
  params = tiny.params(model)
  rng = np.random.default_rng(0)
  if adapted:
    options = lora.Lora(rank=2, alpha=4.0, targets='layers/.*_proj$')
    model = dataclasses.replace(model, lora=options)
    params = model.join_params(params, tiny.adapters(model))
  tokens_BL = rng.integers(0, model.config.vocab_size, (3, 9)).astype(np.int32)
  # The last row has no loss position; 9 is filler.
  positions_BM = np.array([[1, 4, 8], [3, 5, 9], [9, 9, 9]], np.int32)

  def outputs(params, values_everywhere):
    found = model.token_outputs(
      params,
      tokens_BL,
      loss_positions_BM=positions_BM,
      temperature=1.0,
      values_everywhere=values_everywhere,
    )
    return found.logprobs_BL, found.entropy_BL, found.values.values_BL

  def loss(params, values_everywhere):
    asked_BL = np.zeros(tokens_BL.shape, bool)
    for n, places in enumerate(positions_BM):
      asked_BL[n, places[places < 9]] = True
    logprobs_BL, entropy_BL, values_BL = outputs(params, values_everywhere)
    # Values are computed for all tokens, or at loss positions only.
    values_BL = jnp.where(asked_BL, values_BL, 0.0)
    total = jnp.sum(jnp.sin(logprobs_BL + entropy_BL + values_BL))
    return total, (logprobs_BL, entropy_BL, values_BL)

  run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
  narrow, wide = (run.lower(params, x).compile() for x in (False, True))
  for ours, theirs in zip(
    jax.tree.leaves(narrow(params)), jax.tree.leaves(wide(params))
  ):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
  flops = lambda program: program.cost_analysis()['flops']
  # A loop over layers has one program for all of them.
  assert (flops(narrow) < 0.95 * flops(wide)) == (unrolled == 2)


def test_values_are_computed_at_loss_positions_only():
  model = tiny.model('scalar', scan_unroll=2)
  params = tiny.params(model)
  tokens_BL = np.arange(12, dtype=np.int32).reshape(2, 6) % 11
  positions_BM = np.array([[1, 3], [5, 6]], np.int32)
  values = lambda *x, **rows: jax.device_get(jax.jit(model.values)(*x, **rows))
  whole_BL, _ = values(params, tokens_BL)
  found_BL, _ = values(params, tokens_BL, loss_positions_BM=positions_BM)
  expected_BL = np.zeros((2, 6), np.float32)
  for place in ((0, 1), (0, 3), (1, 5)):
    expected_BL[place] = whole_BL[place]
  np.testing.assert_allclose(found_BL, expected_BL, rtol=1e-5, atol=1e-6)


def test_weights_of_another_shape_are_named():
  # Ids past the end of a short embedding would be clamped without an error.
  model = tiny.model()
  params = {**tiny.params(model), 'embedding': np.zeros((9, 16))}
  with pytest.raises(AssertionError, match='embedding'):
    model.hidden(params, _TOKENS)
