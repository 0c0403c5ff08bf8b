"""A bfloat16 model is cast once; its gradients are summed in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.learner import minibatches
from stppo_jax.learner import offline_losses
from stppo_jax.learner import policy_loss
from stppo_jax.rollout import pairs as pairs_lib
from tests.learner import updates

_FLOAT32, _BFLOAT16 = jnp.dtype('float32'), jnp.dtype('bfloat16')


@functools.cache
def _program(num_microbatches):
  """Returns the traced update of bfloat16 models."""
  batch = updates.batch()
  return updates.traced(
    updates.sums(dtype='bfloat16'),
    batch,
    method=updates.telling_gradient(policy_loss.METHOD),
    packing=updates.packed(batch, num_microbatches).packing,
  )


def _program_of_pairs():
  """Returns the traced update on pairs."""
  policy = updates.sums(dtype='bfloat16').policy
  pairs = pairs_lib.packed(
    np.zeros((8, 2, 12), np.int32), np.ones((8, 2, 12), bool)
  )
  inputs = offline_losses.PairInputs(updates.params(policy, 1), 0.1, 0.5)
  return updates.traced(
    updates.Models(policy, None),
    pairs,
    inputs=updates.HYPERPARAMETERS._replace(loss=inputs),
    method=offline_losses.tdpo('tdpo2'),
    packing=updates.packed(pairs, 4, row_length=24).packing,
  )


def _accumulation(program):
  """Returns the loop that sums over microbatches: it carries the most."""
  loops = [e for e in program.jaxpr.eqns if e.primitive.name == 'scan']
  return max(loops, key=lambda e: len(_read_and_carried(e)[1]))


def _read_and_carried(loop):
  """Returns the avals that all rounds of a scan read, and those they carry.

  A round sees both as they are, and slices of the rest: names of jax for their
  numbers change.
  """
  body = loop.params['jaxpr']

  def whole(outside, inside):
    pairs = zip(outside, inside, strict=True)
    return [x.aval for x, y in pairs if x.aval.shape == y.aval.shape]

  carried = whole(loop.outvars, body.jaxpr.outvars)
  kept = whole(loop.invars, body.jaxpr.invars)
  return kept[: len(kept) - len(carried)], carried


@pytest.mark.parametrize('num_microbatches', [1, 4])
def test_gradients_are_float32_of_every_weight(num_microbatches):
  _, outputs = _program(num_microbatches).out_info
  found = outputs.diagnostics
  state = updates.train_state(updates.sums())
  for gradient, model in (
    (found.policy, state.policy),
    (found.value, state.value),
  ):
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), gradient)
    wanted = jax.tree.map(lambda x: (x.shape, _FLOAT32), model.params)
    assert shapes == wanted


def test_sums_are_carried_in_float32():
  loop = _accumulation(_program(4))
  assert loop.params['length'] == 4
  _, carried = _read_and_carried(loop)
  assert {aval.dtype for aval in carried} == {_FLOAT32}
  params = updates.train_state(updates.sums()).policy.params
  shapes = [aval.shape for aval in carried]
  for leaf in jax.tree.leaves(params):
    assert leaf.shape in shapes


@pytest.mark.parametrize('of_pairs', [False, True])
def test_weights_are_cast_before_the_loop(of_pairs):
  program = _program_of_pairs() if of_pairs else _program(4)
  loop = _accumulation(program)
  consts, _ = _read_and_carried(loop)
  models = updates.policy_alone() if of_pairs else updates.sums()
  for leaf in jax.tree.leaves(updates.train_state(models).params):
    dtypes = {aval.dtype for aval in consts if aval.shape == leaf.shape}
    assert dtypes == {_BFLOAT16}, leaf.shape


@pytest.mark.parametrize('count', [1, 3])
def test_the_function_is_traced_once(count):
  scale, traced = np.float32(2), []

  def function(scale, microbatch):
    traced.append(microbatch)
    return {'sum': scale * microbatch}, microbatch + 1

  def total(scale, rows_B2):
    return minibatches.accumulate(
      lambda microbatch: function(scale, microbatch),
      rows_B2.reshape(-1, count, 2).swapaxes(0, 1),
    )

  rows_B2 = np.arange(12, dtype=np.float32).reshape(6, 2)
  sums, outputs = jax.jit(total)(scale, rows_B2)
  assert len(traced) == 1
  parts = rows_B2.reshape(-1, count, 2).swapaxes(0, 1)
  np.testing.assert_array_equal(sums['sum'], 2 * parts.sum(0))
  np.testing.assert_array_equal(outputs, parts + 1)
  # A number from outside of the loop is differentiated as well.
  slope = jax.jit(jax.grad(lambda x: total(x, rows_B2)[0]['sum'].sum()))(scale)
  assert slope == rows_B2.sum()


def test_minibatches_may_be_in_the_order_of_collection():
  found = minibatches.minibatch_rows(
    6, size=2, count=4, seed=0, step=3, shuffle=False
  )
  expected = [[0, 1], [2, 3], [4, 5], [0, 1]]  # the next epoch begins
  np.testing.assert_array_equal(found, expected)
