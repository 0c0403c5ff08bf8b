"""A mixture of experts against a loop over tokens, and against itself.

B rows, L tokens, D width, X experts, E visited experts, F width of an expert.
"""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import moe
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.tools.plan import hlo
from tests.models import tiny

SHAPE = tiny.model(**tiny.MIXTURE).config
B, L, D, X, E, F = 4, 5, 16, 6, 2, 8
TOKENS = np.random.default_rng(1).standard_normal((B, L, D), np.float32)
MASK = np.arange(L)[None] < np.array([5, 3, 1, 0])[:, None]


@functools.cache
def _parts(mesh=None, **changes):
  """Returns a function of (weights, x, expert ids, mask), and weights."""
  make = lambda: moe.MixtureOfExperts(
    dataclasses.replace(SHAPE, **changes), mesh, rngs=nnx.Rngs(0)
  )
  graph, abstract = nnx.split(nnx.eval_shape(make))
  rng = np.random.default_rng(0)
  weights = jax.tree.map(
    lambda s: (0.4 * rng.standard_normal(s.shape)).astype(np.float32), abstract
  )

  def mix(weights, x_BLD, ids_BLE=None, counted_BSL=None):
    module = nnx.merge(graph, weights)
    return module(x_BLD, expert_ids_BLE=ids_BLE, counted_BSL=counted_BSL)

  return mix, weights


def _matrices(weights):
  tree = nnx.to_pure_dict(weights)
  names = ('router', 'gate_proj', 'up_proj', 'down_proj')
  return [tree[name]['kernel'].astype(np.float64) for name in names]


def _softmax(scores):
  powers = np.exp(scores - np.max(scores))
  return powers / np.sum(powers)


def _twin(weights, tokens, *, chosen=None, normed=True):
  """Returns the mixture by a loop over tokens and experts, in float64."""
  router, gates, ups, downs = _matrices(weights)
  outputs = np.zeros(tokens.shape)
  ids = np.zeros((*tokens.shape[:2], E), int)
  for place in np.ndindex(tokens.shape[:2]):
    x = tokens[place].astype(np.float64)
    probs = _softmax(x @ router)
    given = chosen is not None and chosen[place].min() >= 0
    ids[place] = chosen[place] if given else np.argsort(-probs)[:E]
    share = np.sum(probs[ids[place]]) if normed else 1.0
    for e in ids[place]:
      gate, up = x @ gates[e], x @ ups[e]
      y = (gate / (1 + np.exp(-gate)) * up) @ downs[e]
      outputs[place] += probs[e] / share * y
  return outputs, ids


@pytest.mark.parametrize('normed', (True, False))
@pytest.mark.parametrize('name', tuple(moe.IMPLEMENTATIONS))
def test_the_mixture_equals_a_loop_over_tokens_and_experts(name, normed):
  apply, weights = _parts(moe=name, norm_topk_prob=normed)
  y, routing = jax.jit(apply)(weights, TOKENS)
  wanted, ids = _twin(weights, TOKENS, normed=normed)
  np.testing.assert_array_equal(routing.expert_ids, ids)
  np.testing.assert_allclose(y, wanted, atol=1e-5)
  assert np.abs(wanted).max() > 0.5


@functools.partial(jax.jit, static_argnums=0)
def _gradients(apply, weights, tokens, ids_BLE):
  """Returns gradients of a loss, the mixture, and its routing."""

  def loss(weights, tokens):
    y, routing = apply(weights, tokens, ids_BLE)
    return jnp.mean(jnp.square(y - 1.0)), (y, routing)

  gradients, aux = jax.grad(loss, argnums=(0, 1), has_aux=True)(weights, tokens)
  return gradients, *aux


@pytest.mark.parametrize(
  'visited', (E, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, X)))
)
def test_grouped_equals_dense_with_its_gradient(visited):
  ids = np.random.default_rng(visited).permuted(
    np.broadcast_to(np.arange(X), (B, L, X)), axis=-1
  )[..., :visited]
  ids = np.where(
    ids == 3, (ids + visited) % X, ids
  )  # one expert is not visited
  ids = ids if visited == 1 else np.sort(ids)
  found = []
  for name in moe.IMPLEMENTATIONS:
    apply, weights = _parts(moe=name, num_experts_per_tok=visited)
    found.append(_gradients(apply, weights, TOKENS, ids)[:2])
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *found)


def _with_balance(mesh, **changes):
  """Returns the loss and the gradients of a mixture with its load balance."""
  apply, weights = _parts(mesh, **changes)

  def loss(weights, tokens):
    y, routing = apply(weights, tokens)
    balance = moe.load_balance(
      jnp.sum(routing.visits_BX, axis=0),
      jnp.sum(routing.probs_BX, axis=0),
      jnp.float32(B * L),
    )
    return jnp.mean(jnp.square(y - 1.0)) + balance

  value_and_grad = jax.value_and_grad(loss, argnums=(0, 1))
  return jax.jit(value_and_grad)(weights, TOKENS)


@functools.cache
def _on_one(**changes):
  """Returns what the simpler implementation finds on one device."""
  return jax.tree.map(np.asarray, _with_balance(None, moe='dense', **changes))


def _assert_close(found, expected):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5),
    found,
    expected,
  )


# Of the mesh, with the default of `expert` last.
_AXES = ('data', 'fsdp', 'tensor', 'expert')


@pytest.mark.parametrize(
  ('name', 'axes'),
  [
    ('grouped', (2, 1, 2, 2)),
    *(
      pytest.param(name, axes, marks=pytest.mark.slow)
      for name, axes in (
        ('dense', (2, 1, 2, 2)),
        ('dense', (2, 2, 2)),
        ('grouped', (2, 2, 2)),
      )
    ),
  ],
)
def test_eight_devices_are_one(name, axes):
  eight = mesh_lib.make_mesh(**dict(zip(_AXES, axes)))
  _assert_close(_with_balance(eight, moe=name), _on_one())


def test_devices_rank_experts_for_their_own_rows():
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=1, expert=2)
  apply, weights = _parts(mesh, moe='grouped')
  tokens = np.zeros((8, L, D), np.float32)
  layouts = None, sharding.batch_sharding(mesh)
  program = jax.jit(apply, in_shardings=layouts).lower(weights, tokens)
  gathered = {
    line.arrays[0].dims
    for line in hlo.read(program.compile().as_text()).instructions
    if line.opcode == 'all-gather'
  }
  # The two devices along `expert` gather their rows, and what these visit.
  assert gathered == {(2 * L, D), (2 * L, E)}


# ragged_test.py compares the kernel itself every time.
@pytest.mark.slow
@pytest.mark.parametrize(
  ('axes', 'width'),
  [
    (None, F),
    ((2, 2, 2), F),
    ((1, 1, 8), 12),  # neither the rows nor the width are divided
    ((1, 8, 1), F),
    ((2, 1, 2, 2), F),
  ],
)
def test_the_kernel_for_tpu_changes_no_gradient(monkeypatch, axes, width):
  mesh = axes and mesh_lib.make_mesh(**dict(zip(_AXES, axes)))
  monkeypatch.setitem(
    moe.IMPLEMENTATIONS,
    'grouped',
    functools.partial(
      moe.grouped, product=functools.partial(moe.ragged_dot, interpret=True)
    ),
  )
  changes = {} if width == F else {'moe_intermediate_size': width}
  _assert_close(
    _with_balance(mesh, moe='grouped', **changes), _on_one(**changes)
  )


@pytest.mark.parametrize('name', tuple(moe.IMPLEMENTATIONS))
def test_given_experts_get_the_routers_weights(name):
  chosen = np.random.default_rng(2).integers(0, X - 1, (B, L, E))
  chosen[..., 1] = chosen[..., 0] + 1
  chosen[0] = -1  # a negative id leaves its token to the router
  apply, weights = _parts(moe=name, num_experts_per_tok=E)
  gradients, y, routing = _gradients(apply, weights, TOKENS, chosen)
  expected, ids = _twin(weights, TOKENS, chosen=chosen)
  np.testing.assert_array_equal(routing.expert_ids, ids)
  np.testing.assert_allclose(y, expected, atol=1e-5)
  gradient = nnx.to_pure_dict(gradients[0])
  assert np.abs(gradient['router']['kernel']).max() > 1e-3


_balance = jax.jit(moe.load_balance)


def test_load_balance_sums_over_layers_and_valid_tokens():
  visits, probs, tokens = np.zeros(X), np.zeros(X), 0
  found = []
  apply, first = _parts()
  hidden = np.where(MASK[..., None], TOKENS, np.nan)
  for weights in (first, jax.tree.map(np.flipud, first)):  # two
    _, routing = jax.jit(apply)(weights, hidden, None, MASK[:, None])
    found.append(jax.tree.map(np.asarray, routing))
    router, *_ = _matrices(weights)
    _, ids = _twin(weights, TOKENS)
    for place in zip(*np.nonzero(MASK)):
      visits[ids[place]] += 1
      probs += _softmax(TOKENS[place].astype(np.float64) @ router)
      tokens += 1
  sums = jax.tree.map(lambda *x: sum(x), *found)
  of_all = np.sum(sums.visits_BX, axis=(0, 1))
  np.testing.assert_array_equal(of_all, visits)
  balance = lambda probs_BX: _balance(
    of_all, np.sum(probs_BX, axis=(0, 1)), np.float32(tokens)
  )
  wanted = X * np.sum(visits / tokens * probs / tokens)
  np.testing.assert_allclose(balance(sums.probs_BX), wanted, rtol=1e-6)
  parts = sum(float(balance(x)) for x in np.split(sums.probs_BX, [1]))
  np.testing.assert_allclose(parts, wanted, rtol=1e-6)
  assert wanted > E + 0.05  # the loss of an even load is E


def test_an_even_load_has_a_loss_of_experts_per_token():
  visits, probs = (np.full(X, 10.0 * n / X, np.float32) for n in (E, 1))
  found = _balance(visits, probs, np.float32(10))
  np.testing.assert_allclose(found, E, rtol=1e-6)
  assert _balance(0 * visits, 0 * visits, np.float32(0)) == 0


def test_the_platform_chooses_the_implementation():
  assert moe.choose('auto', platform='cpu') == 'dense'
  assert moe.choose('auto', platform='tpu') == 'grouped'
  assert moe.choose('grouped', platform='cpu') == 'grouped'


@pytest.mark.torch
@pytest.mark.parametrize('name', tuple(moe.IMPLEMENTATIONS))
@pytest.mark.parametrize('normed', (True, False))
def test_the_layer_of_transformers_agrees(name, normed):
  torch = pytest.importorskip('torch', exc_type=ImportError)
  from transformers.models.qwen3_moe import modeling_qwen3_moe as theirs

  config = theirs.Qwen3MoeConfig(
    hidden_size=D,
    num_experts=X,
    num_experts_per_tok=E,
    moe_intermediate_size=F,
    norm_topk_prob=normed,
  )
  apply, weights = _parts(moe=name, norm_topk_prob=normed)
  router, gates, ups, downs = map(torch.tensor, _matrices(weights))
  block = theirs.Qwen3MoeSparseMoeBlock(config)
  with torch.no_grad():
    block.gate.weight.copy_(router.T)
    both = torch.cat((gates, ups), dim=-1)
    block.experts.gate_up_proj.copy_(both.swapaxes(1, 2))
    block.experts.down_proj.copy_(downs.swapaxes(1, 2))
    wanted = block(torch.tensor(TOKENS)).numpy()
    scores, _, ids = block.gate(torch.tensor(TOKENS))
    balance = theirs.load_balancing_loss_func(
      (scores,), X, E, torch.tensor(MASK)
    )
  y, routing = jax.jit(apply)(weights, TOKENS, None, MASK[:, None])
  np.testing.assert_allclose(y, wanted, atol=1e-5)
  np.testing.assert_array_equal(
    routing.expert_ids, ids.numpy().reshape(B, L, E)
  )
  sums = map(np.asarray, (routing.visits_BX, routing.probs_BX))
  found = _balance(
    *(np.sum(x, axis=(0, 1)) for x in sums),
    np.float32(np.sum(MASK)),
  )
  np.testing.assert_allclose(found, balance.item(), rtol=1e-5)
