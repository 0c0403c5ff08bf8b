"""Whole models with experts: the routing of tokens, and its replay.

B rows, L tokens, E experts that a token visits, X experts.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import functional
from stppo_jax.models import heads
from stppo_jax.models.hf import config_json
from stppo_jax.models.hf import load
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from tests.models import tiny

MODEL = tiny.model(**tiny.MIXTURE)
B, L, N, E, X = 3, 9, 2, 2, 6
TOKENS = np.random.default_rng(0).integers(0, 11, (B, L)).astype(np.int32)
LENGTHS = np.array([L, 4, 1], np.int32)
_routed = jax.jit(MODEL.hidden_and_routing)  # one for all tests: it compiles


def _other_routers(params):
  """Returns the weights with routers that rank the experts differently."""
  moe = params['layers']['moe']
  kernel = np.random.default_rng(9).permuted(moe['router']['kernel'], axis=-1)
  moe = {**moe, 'router': {'kernel': kernel}}
  return {**params, 'layers': {**params['layers'], 'moe': moe}}


def test_every_layer_reports_its_experts_and_sums():
  params = tiny.params(MODEL)
  hidden, routing = _routed(params, TOKENS, lengths_B=LENGTHS)
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


def test_a_model_without_experts_has_no_routing():
  model = tiny.model()
  _, routing = jax.jit(model.hidden_and_routing)(tiny.params(model), TOKENS)
  assert routing is None


def test_replaying_a_models_own_experts_changes_nothing():
  params = tiny.params(MODEL)
  hidden, routing = _routed(params, TOKENS)
  again, _ = _routed(params, TOKENS, expert_ids=routing.expert_ids)
  np.testing.assert_allclose(again, hidden, atol=1e-6)


def test_a_replay_visits_the_given_experts_of_other_routers():
  params = tiny.params(MODEL)
  other = _other_routers(params)
  _, routing = _routed(params, TOKENS)
  _, own = _routed(other, TOKENS)
  _, replayed = _routed(other, TOKENS, expert_ids=routing.expert_ids)
  np.testing.assert_array_equal(replayed.expert_ids, routing.expert_ids)
  assert np.mean(own.expert_ids != routing.expert_ids) > 0.2


def test_reading_in_chunks_visits_the_same_experts():
  params = tiny.params(MODEL)
  _, routing = _routed(params, TOKENS)
  cache = cache_lib.empty(MODEL.config, -(-L // 4) * B, 4)
  for start in range(0, L, 3):
    at = np.full(B, start, np.int32)
    tokens_BC = TOKENS[:, start : start + 3]
    _, cache = tiny.read_on(MODEL, params, tokens_BC, cache, at, np.full(B, 3))
  visited = [
    cache_lib.expert_ids(cache, pages_N)[:L] for pages_N in tiny.table(cache, B)
  ]
  np.testing.assert_array_equal(np.stack(visited), routing.expert_ids)


@pytest.mark.parametrize(
  'unrolled', [1, pytest.param(2, marks=pytest.mark.slow)]
)
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


# The layer with experts on eight devices is tested every time in moe_test.py.
@pytest.mark.slow
@pytest.mark.parametrize('remat', ['none', 'full'])
def test_eight_devices_are_one(remat):
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  config = dataclasses.replace(
    MODEL.config, vocab_size=12, moe='grouped', remat=remat
  )
  tokens = np.concatenate([TOKENS, TOKENS[:1]])  # rows for four devices
  lengths = np.array([*LENGTHS, L], np.int32)

  def gradient(mesh):
    model = functional.Model(config, 'vocabulary', mesh)

    def loss(params, tokens, lengths):
      hidden, routing = model.hidden_and_routing(
        params, tokens, lengths_B=lengths
      )
      states = jnp.mean(jnp.square(hidden[:, :1]))  # no padding among them
      return states + jnp.mean(routing.probs_BX * routing.visits_BX)

    params, rows = tiny.params(model), (tokens, lengths)
    if mesh is not None:
      params = jax.device_put(params, sharding.param_shardings(params, mesh))
      rows = jax.device_put(rows, sharding.batch_sharding(mesh))
    return jax.jit(jax.value_and_grad(loss))(params, *rows)

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    gradient(None),
    gradient(mesh),
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


@pytest.mark.torch
@pytest.mark.parametrize('name', ('dense', 'grouped'))
def test_logits_and_routing_equal_those_of_transformers(name, tmp_path):
  torch = pytest.importorskip('torch', exc_type=ImportError)
  import transformers

  shape = {**config_json.write(MODEL.config), 'output_router_logits': True}
  torch.manual_seed(0)
  theirs = transformers.Qwen3MoeForCausalLM(
    transformers.Qwen3MoeConfig(**shape)
  )
  with torch.no_grad():
    for parameter in theirs.parameters():
      parameter.add_(0.3 * torch.randn_like(parameter))
    answer = theirs.float().eval()(torch.tensor(TOKENS, dtype=torch.long))
  theirs.save_pretrained(tmp_path)
  runtime = dict(dtype='float32', remat='none', scan_unroll=1)
  config = load.read_config(tmp_path, **runtime)
  model = functional.Model(dataclasses.replace(config, moe=name), 'vocabulary')
  params = load.read_params(tmp_path, config)
  hidden, routing = jax.jit(model.hidden_and_routing)(params, TOKENS)
  np.testing.assert_allclose(
    heads.logits(hidden, model.output_VD(params)),
    answer.logits.numpy(),
    atol=1e-4,
  )
  for layer, scores in enumerate(answer.router_logits):
    ids = torch.topk(scores, E)[1].numpy().reshape(B, L, E)
    np.testing.assert_array_equal(routing.expert_ids[:, :, layer], ids)
