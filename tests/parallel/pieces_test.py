"""Large matrices of decoding weights are cut, and products stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import pieces
from tests.models import tiny
from tests.sampling import tiny_engine

_MOST = 512  # bytes: 128 weights of float32


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
    # With `out` sharded, this matrix cannot be halved.
    'q_proj': {'kernel': shape((9, 32), None, 'tensor')},
  }
  return {'embedding': shape((64, 32), 'tensor'), 'layers': (layer,)}


@pytest.mark.parametrize('tensor', [1, 2])
@pytest.mark.parametrize('rows', [3, 1025])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_products_with_pieces_equal_those_with_matrices(
  tensor, rows, dtype, monkeypatch
):
  monkeypatch.setattr(pieces, 'MOST_BYTES', {'cpu': _MOST})
  devices = jax.devices()[:tensor]
  mesh = mesh_lib.make_mesh(data=1, fsdp=1, tensor=tensor, devices=devices)
  shapes, rng = _shapes(mesh), np.random.default_rng(0)
  drawn = jax.tree.map(lambda x: rng.standard_normal(x.shape, x.dtype), shapes)
  layouts = jax.tree.map(lambda x: x.sharding, shapes)
  weights = jax.device_put(drawn, layouts)
  cut = pieces.cut_layers(weights, mesh)
  layer, whole = cut['layers'][0], drawn['layers'][0]
  describe = lambda tree: jax.tree.map(
    lambda x: (x.shape, x.dtype, x.sharding), tree
  )
  assert describe(cut) == describe(pieces.cut_layers(shapes, mesh))

  sizes = lambda name: [piece.shape for piece in layer[name]['kernel']]
  assert sizes('up_proj') == ([(32, 3)] * 16 if tensor == 1 else [(4, 48)] * 8)
  assert sizes('down_proj') == (
    [(48, 2)] * 16 if tensor == 1 else [(48, 4)] * 8
  )
  assert weights['layers'][0]['up_proj']['kernel'].is_deleted()
  untouched = [cut['embedding'], layer['k_proj']['kernel']]
  untouched += [layer['q_proj']['kernel']] if tensor == 2 else []
  assert all(isinstance(x, jax.Array) for x in untouched)

  for name in ('up_proj', 'down_proj', 'q_proj'):
    matrix = jnp.asarray(whole[name]['kernel'])
    x = jax.random.normal(jax.random.key(1), (rows, len(matrix)), dtype)
    found = jax.jit(pieces.product)(x, layer[name]['kernel'])
    expected = x @ matrix.astype(dtype)
    assert found.dtype == dtype
    close = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(
      np.asarray(found, np.float32),
      np.asarray(expected, np.float32),
      rtol=close,
      atol=close,
    )


@pytest.mark.parametrize(('devices', 'tensor'), [(1, 1), (2, 2)])
def test_an_engine_with_cut_weights_samples_the_same_tokens(
  devices, tensor, monkeypatch
):
  model = tiny.model(num_heads=4, num_kv_heads=2, vocab_size=12)
  found = []
  for most in ({}, {'cpu': _MOST}):
    monkeypatch.setattr(pieces, 'MOST_BYTES', most)
    engine, (driver,) = tiny_engine.new_engine(
      devices, tensor=tensor, model=model
    )
    found.append(
      tiny_engine.run_dialogues(
        engine, tiny_engine.prompts(4), tiny_engine.keys(4)
      )
    )
    kernel = driver.programs.weights.params['layers'][1]['up_proj']['kernel']
    assert isinstance(kernel, tuple) == bool(most)
  for row, dialogue in found[0].items():
    tiny_engine.assert_same(found[1][row], dialogue)
