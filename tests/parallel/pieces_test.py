"""Large matrices of decoding weights are cut, and products stay the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import chunks
from stppo_jax.models import lora as lora_lib
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import pieces
from tests.models import tiny
from tests.sampling import tiny_engine

_MOST = 512  # bytes: 128 weights of float32
_KERNELS = ('up_proj', 'down_proj', 'k_proj', 'q_proj')


def _shapes(mesh):
  """Returns the shapes of weights in the layout of decoding."""

  def shape(sizes, *axes):
    layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=layout)

  layer = {
    'up_proj': {
      'kernel': shape((32, 48), None, 'tensor'),
      'bias': shape((4096,), 'tensor'),
    },
    'down_proj': {'kernel': shape((48, 32), 'tensor')},
    'k_proj': {'kernel': shape((32, 4), None, 'tensor')},
    'q_proj': {
      'kernel': shape((9, 42), None, 'tensor'),
      'lora_a': shape((256, 2)),
    },
    'moe': {'router': {'kernel': shape((256, 2))}},
  }
  embedding = shape((64, 32), 'tensor')
  return {'embedding': embedding, 'lm_head': embedding, 'layers': (layer,)}


@pytest.mark.parametrize('tensor', [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize('join', [False, True])
@pytest.mark.parametrize(
  'dtype', [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16]
)
def test_products_with_pieces_equal_those_with_matrices(
  tensor, join, dtype, monkeypatch
):
  monkeypatch.setattr(pieces, 'MOST_BYTES', {'cpu': _MOST})
  devices = jax.devices()[:tensor]
  mesh = mesh_lib.make_mesh(data=1, fsdp=1, tensor=tensor, devices=devices)
  shapes, rng = _shapes(mesh), np.random.default_rng(0)
  drawn = jax.tree.map(lambda x: rng.standard_normal(x.shape, x.dtype), shapes)
  layouts = jax.tree.map(lambda x: x.sharding, shapes)
  weights = jax.device_put(drawn, layouts)
  cut = pieces.cut(weights, mesh)
  describe = lambda tree: jax.tree.map(
    lambda x: (x.shape, x.dtype, x.sharding.shard_shape(x.shape)), tree
  )
  assert describe(cut) == describe(pieces.cut(shapes, mesh))

  layer = cut['layers'][0]
  found = {name: layer[name]['kernel'] for name in _KERNELS}
  found |= {'lm_head': cut['lm_head'], 'embedding': cut['embedding']}
  # A piece has 384 bytes on each device, one of `lm_head` 512, and one of
  # `q_proj` 756, because 21 columns cannot be halved.
  whole = {'q_proj': (9, 42)} if tensor == 2 else {}
  assert {name: _sizes(x) for name, x in found.items()} == {
    'up_proj': [(32, tensor, 3)] * (16 // tensor),
    'down_proj': [(48, 1, 2 * tensor)] * (16 // tensor),
    'k_proj': (32, 4),
    'q_proj': [(9, 1, 21)] * 2,
    'lm_head': [(tensor, 4, 32)] * (16 // tensor),
    'embedding': (64, 32),
  } | whole
  small = [layer['q_proj']['lora_a'], layer['moe']['router']['kernel']]
  assert list(map(_sizes, small)) == [(256, 2)] * 2
  assert weights['layers'][0]['up_proj']['kernel'].is_deleted()

  close = {'rtol': 1e-5, 'atol': 1e-5}
  if dtype == jnp.bfloat16:
    close = {'rtol': 2e-2, 'atol': 2e-2}
  matrices = {name: drawn['layers'][0][name]['kernel'] for name in _KERNELS}
  matrices['lm_head'] = drawn['lm_head'].T
  rows = {
    name: rng.standard_normal((3, len(matrix)), np.float32).astype(dtype)
    for name, matrix in matrices.items()
  }
  product = functools.partial(pieces.product, join=join)
  functions = dict.fromkeys(_KERNELS, product) | {'lm_head': chunks.logits}
  results = jax.jit(
    lambda *trees: {n: f(*(x[n] for x in trees)) for n, f in functions.items()}
  )(rows, found)
  for name, matrix in matrices.items():
    assert results[name].dtype == (np.float32 if name == 'lm_head' else dtype)
    expected = np.float32(rows[name]) @ np.float32(matrix.astype(dtype))
    np.testing.assert_allclose(np.float32(results[name]), expected, **close)


def _sizes(x):
  return [one.shape for one in x] if isinstance(x, tuple) else x.shape


def _dialogues(engine):
  return tiny_engine.run_dialogues(
    engine, tiny_engine.prompts(4), tiny_engine.keys(4)
  )


@pytest.mark.parametrize(('devices', 'tensor'), [(1, 1), (2, 2)])
@pytest.mark.slow
def test_an_engine_with_cut_weights_samples_the_same_tokens(
  devices, tensor, monkeypatch
):
  model = tiny_engine.MODEL
  if tensor > 1:
    model = tiny.model(num_heads=4, num_kv_heads=2, vocab_size=12)
  found = []
  for most in ({}, {'cpu': _MOST}):
    monkeypatch.setattr(pieces, 'MOST_BYTES', most)
    engine, (driver,) = tiny_engine.new_engine(
      devices, tensor=tensor, model=model
    )
    found.append(_dialogues(engine))
    kernel = driver.programs.weights.params['layers'][1]['up_proj']['kernel']
    assert isinstance(kernel, tuple) == bool(most)
  for row, dialogue in found[0].items():
    tiny_engine.assert_same(found[1][row], dialogue)


@pytest.mark.slow
def test_adapters_are_published_again_beside_a_base_that_was_cut(monkeypatch):
  lora = lora_lib.Lora(rank=2, alpha=8.0, targets='(q|down)_proj$')
  model = dataclasses.replace(tiny_engine.MODEL, lora=lora)
  base = jax.tree.map(jnp.asarray, tiny_engine.PARAMS)
  found = []
  for most in ({}, {'cpu': _MOST}):
    monkeypatch.setattr(pieces, 'MOST_BYTES', most)
    engine, _ = tiny_engine.new_engine(model=model)
    for number in range(2):
      adapters = jax.tree.map(jnp.asarray, tiny.adapters(model, number + 1.0))
      engine.publish(adapters, number, base=base)
      assert not any(x.is_deleted() for x in jax.tree.leaves((base, adapters)))
      found.append(_dialogues(engine))
  for whole, cut in zip(found[:2], found[2:]):
    for row, dialogue in whole.items():
      tiny_engine.assert_same(cut[row], dialogue)
