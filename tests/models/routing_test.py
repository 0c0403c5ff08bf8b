"""Whole models with experts: the routing of tokens, and its replay.

B rows, L tokens, E experts that a token visits, X experts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import cache as cache_lib
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from tests.models import tiny

MODEL = tiny.model(**tiny.MIXTURE)
B, L, N, E, X = 3, 9, 2, 2, 6
TOKENS = np.random.default_rng(0).integers(0, 11, (B, L)).astype(np.int32)
LENGTHS = np.array([L, 4, 1], np.int32)
FULL = np.full(B, L, np.int32)
_routed = jax.jit(MODEL.hidden_and_routing)  # one for all tests: it compiles


def _other_routers(params):
  """Returns the weights with routers that rank the experts differently."""
  moe = params['layers']['moe']
  kernel = np.random.default_rng(9).permuted(moe['router']['kernel'], axis=-1)
  moe = {**moe, 'router': {'kernel': kernel}}
  return {**params, 'layers': {**params['layers'], 'moe': moe}}


def _cache(model):
  """Returns an empty cache for all tokens."""
  return jax.jit(lambda: cache_lib.empty(model.config, -(-L // 4) * B, 4))()


def _visited(cache):
  """Returns the experts that all tokens visited, from a cache."""
  read = jax.jit(cache_lib.expert_ids)
  return np.stack([read(cache, row) for row in tiny.table(cache, B)])[:, :L]


def test_every_layer_reports_its_experts_and_sums():
  params = tiny.params(MODEL)
  hidden, routing = jax.device_get(_routed(params, TOKENS, lengths_B=LENGTHS))
  np.testing.assert_array_equal(
    hidden, tiny.hidden(MODEL)(params, TOKENS, lengths_B=LENGTHS)
  )
  assert routing.expert_ids.shape == (B, L, N, E)
  visits = np.zeros((B, X))
  for b, length in enumerate(LENGTHS):
    np.add.at(visits[b], routing.expert_ids[b, :length], 1)
  np.testing.assert_array_equal(routing.visits_BX, visits)
  np.testing.assert_allclose(
    np.sum(routing.probs_BX, axis=1), N * LENGTHS, rtol=1e-6
  )


def test_replaying_a_models_own_experts_changes_nothing():
  params = tiny.params(MODEL)
  hidden, routing = _routed(params, TOKENS, lengths_B=FULL)
  again, _ = _routed(params, TOKENS, expert_ids=routing.expert_ids)
  np.testing.assert_allclose(again, hidden, atol=1e-6)


def test_a_replay_visits_the_given_experts_of_other_routers():
  params = tiny.params(MODEL)
  other = _other_routers(params)
  _, routing = _routed(params, TOKENS, lengths_B=FULL)
  _, own = _routed(other, TOKENS, lengths_B=FULL)
  _, replayed = _routed(other, TOKENS, expert_ids=routing.expert_ids)
  np.testing.assert_array_equal(replayed.expert_ids, routing.expert_ids)
  assert np.mean(np.not_equal(own.expert_ids, routing.expert_ids)) > 0.2


def test_reading_in_chunks_visits_the_same_experts():
  params = tiny.params(MODEL)
  _, routing = _routed(params, TOKENS, lengths_B=FULL)
  cache = _cache(MODEL)
  for start in range(0, L, 3):
    at = np.full(B, start, np.int32)
    tokens_BC = TOKENS[:, start : start + 3]
    _, cache = tiny.read_on(MODEL, params, tokens_BC, cache, at, np.full(B, 3))
  np.testing.assert_array_equal(_visited(cache), routing.expert_ids)


def _alternating(num_layers):
  """Returns a model of which each second layer has experts."""
  dense, windows = tuple(range(0, num_layers, 2)), (0, 3, 2, 5)
  return tiny.model(
    **tiny.MIXTURE,
    num_layers=num_layers,
    dense_layers=dense,
    windows=num_layers // 4 * windows,
  )


def test_layers_that_alternate_are_computed_in_their_order():
  """A cached pass, which has a loop over no layers, is the twin."""
  model = _alternating(4)
  params = tiny.params(model)
  routed = jax.jit(model.hidden_and_routing)
  hidden, routing = routed(params, TOKENS)
  cache = _cache(model)
  found, cache = tiny.read_on(
    model, params, TOKENS, cache, np.zeros(B, np.int32), np.full(B, L)
  )
  np.testing.assert_allclose(found, hidden, rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(_visited(cache), routing.expert_ids)
  again, _ = routed(params, TOKENS, expert_ids=routing.expert_ids)
  np.testing.assert_allclose(again, hidden, atol=1e-6)


def test_the_program_of_layers_that_alternate_does_not_grow_with_them():
  """Unrolled, each would hold its gathered weights for a whole update."""

  def products(num_layers):
    model = _alternating(num_layers)
    made = jax.make_jaxpr(model.hidden)(model.abstract_params, TOKENS)
    return str(made).count('dot_general')

  assert products(8) == products(4)


@pytest.mark.parametrize('unrolled', [1, 2])
@pytest.mark.slow
def test_gradients_do_not_depend_on_how_experts_and_layers_are_computed(
  unrolled,
):
  def gradient(**changes):
    model = tiny.model(**tiny.MIXTURE, **changes)

    def loss(params):
      hidden, routing = model.hidden_and_routing(params, TOKENS)
      return jnp.mean(jnp.square(hidden)) + jnp.mean(
        routing.probs_BX * routing.visits_BX
      )

    return jax.jit(jax.grad(loss))(tiny.params(model))

  plain = gradient(moe='dense')
  other = gradient(moe='grouped', remat='full', scan_unroll=unrolled)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
    plain,
    other,
  )


def test_every_device_has_a_slice_of_every_expert():
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  params = jax.eval_shape(MODEL.init, jax.random.key(0))
  layouts = sharding.param_shardings(params, mesh)['layers']['moe']
  for name, matrix in params['layers']['moe'].items():
    part = layouts[name]['kernel'].shard_shape(matrix['kernel'].shape)
    cuts = 1 if name == 'router' else 2
    assert part[:-2] == matrix['kernel'].shape[:-2], name
    assert np.prod(part) * 2**cuts == matrix['kernel'].size, name
