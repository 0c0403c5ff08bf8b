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
# The experts of all tokens, left to the routers.
OWN = np.full((B, L, N, E), -1, np.int32)
_jitted = jax.jit(MODEL.hidden_and_routing)  # one for all tests: it compiles


def _routed(params, expert_ids=OWN, lengths_B=FULL):
  return jax.device_get(
    _jitted(params, TOKENS, expert_ids=expert_ids, lengths_B=lengths_B)
  )


def test_every_layer_reports_its_experts_and_sums():
  _, routing = _routed(tiny.params(MODEL), lengths_B=LENGTHS)
  assert routing.expert_ids.shape == (B, L, N, E)
  visits = np.zeros((B, X))
  for b, length in enumerate(LENGTHS):
    np.add.at(visits[b], routing.expert_ids[b, :length], 1)
  np.testing.assert_array_equal(routing.visits_BX, visits)
  np.testing.assert_allclose(
    np.sum(routing.probs_BX, axis=1), N * LENGTHS, rtol=1e-6
  )


def test_a_replay_visits_the_given_experts():
  params = tiny.params(MODEL)
  hidden, routing = _routed(params)
  ids = routing.expert_ids.astype(np.int32)
  np.testing.assert_allclose(_routed(params, ids)[0], hidden, atol=1e-6)
  # Also with routers that rank the experts differently.
  moe = params['layers']['moe']
  kernel = np.random.default_rng(9).permuted(moe['router']['kernel'], axis=-1)
  moe = {**moe, 'router': {'kernel': kernel}}
  other = {**params, 'layers': {**params['layers'], 'moe': moe}}
  np.testing.assert_array_equal(_routed(other, ids)[1].expert_ids, ids)
  assert np.mean(_routed(other)[1].expert_ids != ids) > 0.2


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
  hidden, routing = jax.device_get(routed(params, TOKENS, expert_ids=OWN))
  cache = tiny.cache_of(model.config, -(-L // 4) * B, 4)
  found, cache = tiny.read_in_chunks(model, params, TOKENS, cache, 3)
  np.testing.assert_allclose(found, hidden, rtol=1e-4, atol=1e-5)
  read = jax.jit(cache_lib.expert_ids)
  visited = [read(cache, row)[:L] for row in tiny.table(cache, B)]
  np.testing.assert_array_equal(visited, routing.expert_ids)
  ids = np.asarray(routing.expert_ids, np.int32)
  again, _ = routed(params, TOKENS, expert_ids=ids)
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
