"""Attention in tiles: its numbers, its memory, and what devices send."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from stppo_jax.models import attention
from stppo_jax.models import blockwise
from stppo_jax.parallel import activations
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.tools.plan import hlo
from stppo_jax.tools.plan import hlo_cost

_H = 8
_ROWS, _HEADS = activations.ROWS, activations.TENSOR


def _inputs(size, num_heads, num_kv_heads, *, rows=4, dtype=np.float32):
  rng = np.random.default_rng(size)
  return tuple(
    rng.normal(size=(rows, size, heads, _H)).astype(dtype)
    for heads in (num_heads, num_kv_heads, num_kv_heads)
  )


def _definition(q_BLNH, k_BLKH, v_BLKH, visible_BLL):
  k_BKLH, v_BKLH = (x.swapaxes(1, 2) for x in (k_BLKH, v_BLKH))
  return attention.attention(q_BLNH, k_BKLH, v_BKLH, visible_BLL)


def _loss(mixed):
  """Returns a sum that weighs every number of the result differently."""
  weights = np.random.default_rng(9).normal(size=mixed.shape)
  return jnp.sum(mixed * weights.astype(np.float32))


@functools.partial(jax.jit, static_argnums=0)
def _results(attend, inputs, text_BL, *others):
  def loss(inputs):
    mixed = jnp.where(text_BL[..., None, None], attend(*inputs, *others), 0)
    return _loss(mixed), mixed

  (_, mixed), gradients = jax.value_and_grad(loss, has_aux=True)(inputs)
  return mixed, *gradients


def _found(attend, inputs):
  return _results(attend, inputs, np.ones(inputs[0].shape[:2], bool))


def _expected(inputs, window=0, ids_BL=None):
  size = inputs[0].shape[1]
  if ids_BL is None:
    ids_BL = np.ones(inputs[0].shape[:2], int)
  hidden_LL = np.tri(size, k=-(window or size), dtype=bool)
  visible_BLL = ids_BL[:, :, None] == ids_BL[:, None]
  visible_BLL &= np.tri(size, dtype=bool) & ~hidden_LL
  return _results(_definition, inputs, ids_BL > 0, visible_BLL)


@pytest.mark.parametrize(
  ('size', 'tile', 'num_heads', 'num_kv_heads', 'window'),
  [
    (45, 8, 4, 2, 0),  # six tiles of 8 with three tokens of padding
    # Four, the last shorter.
    pytest.param(22, 7, 4, 1, 0, marks=pytest.mark.slow),
    pytest.param(9, 1, 2, 2, 0, marks=pytest.mark.slow),  # each token alone
    (45, 45, 4, 2, 0),  # one
    # Windows of one tile, one more and one less, and of several.
    (45, 8, 4, 2, 9),
    *(
      pytest.param(45, 8, 4, 2, window, marks=pytest.mark.slow)
      for window in (7, 8, 25)
    ),
    (22, 7, 4, 1, 6),
    *(
      pytest.param(22, 7, 4, 1, window, marks=pytest.mark.slow)
      for window in (1, 7, 8, 15)
    ),
  ],
)
def test_tiles_equal_the_definition(
  size, tile, num_heads, num_kv_heads, window
):
  inputs = _inputs(size, num_heads, num_kv_heads)
  # Logits that are far larger than all before and after them.
  inputs[1][:, size // 2] *= 4
  attend = blockwise.attend(size, tile, None, window=window)
  mixed, *gradients = _found(attend, inputs)
  expected, *expected_gradients = _expected(inputs, window)
  np.testing.assert_allclose(mixed, expected, rtol=1e-6, atol=1e-6)
  for ours, theirs in zip(gradients, expected_gradients, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  'window', [0, pytest.param(7, marks=pytest.mark.slow), 9]
)
def test_packed_sequences_equal_the_definition(window):
  # Six tiles of 8: sequences within a tile, over its edge and over all tiles.
  lengths = ((11, 3, 25), (30, 15), (2, 2, 4, 9), ())
  ids_BL = np.array(
    [
      np.pad(
        np.repeat(np.arange(len(row)) + 4 * n + 1, row), (0, 45 - sum(row))
      )
      for n, row in enumerate(lengths)
    ]
  )
  inputs = _inputs(45, 4, 2)
  tiles = lambda *x: blockwise.attend(45, 8, None, ids_BL, window)(*x)
  found = _results(tiles, inputs, ids_BL > 0)
  for x, y in zip(found, _expected(inputs, window, ids_BL), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_tiles_that_share_no_sequence_are_not_computed():
  # Three sequences fill the tiles 0 to 1, 2 to 3 and 4 to 5 of one row, and
  # most of the other row is padding.
  ids_BL = np.repeat([[1, 2, 3], [4, 0, 0]], 16, axis=1)
  inputs = _inputs(48, 4, 2, rows=2)

  def loss(inputs):
    mixed = blockwise.attend(48, 8, None, ids_BL)(*inputs)
    return jnp.sum(mixed[0, 16:]), mixed

  results = jax.jit(jax.grad(loss, has_aux=True))
  expected = np.asarray(results(inputs)[1])
  # A weight of 0 would make NaN of NaN.
  inputs[2][:, :16] = np.nan
  gradients, found = jax.tree.map(np.asarray, results(inputs))
  np.testing.assert_array_equal(found[0, 16:], expected[0, 16:])
  assert np.isnan(found[0, :16]).all()
  assert all(np.isfinite(x[0, 16:]).all() for x in gradients)


def test_sums_are_in_float32():
  inputs = _inputs(45, 4, 2, dtype=jnp.bfloat16)
  exact = _expected(tuple(x.astype(np.float32) for x in inputs))
  found = _found(blockwise.attend(45, 3, None), inputs)
  for ours, theirs in zip(found, exact, strict=True):
    assert ours.dtype == jnp.bfloat16
    scale = np.abs(theirs).max()
    np.testing.assert_allclose(
      np.asarray(ours, np.float32) / scale,
      np.asarray(theirs) / scale,
      atol=2**-7,
    )


def _compiled(size, num_heads, num_kv_heads, mesh):
  """Returns the compiled gradients of attention for this length."""
  attend = attention.causal_attention('xla', size, lengths_B=None, mesh=mesh)

  def shape(heads):
    over = _HEADS if heads % activations.extent(mesh, _HEADS) == 0 else None
    sharding = NamedSharding(mesh, P(_ROWS, None, over))
    shape = (8, size, heads, _H)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

  inputs = tuple(map(shape, (num_heads, num_kv_heads, num_kv_heads)))

  def loss(inputs):
    constrained = (
      activations.constrain(x, mesh, _ROWS, None, _HEADS) for x in inputs
    )
    return _loss(attend(*constrained))

  out_shardings = None
  if mesh is not None:
    out_shardings = tuple(x.sharding for x in inputs)
  return (
    jax.jit(jax.grad(loss), out_shardings=out_shardings).lower(inputs).compile()
  )


def _temporary(size, again):
  """Returns the bytes of the gradient of two layers of attention."""
  attend = attention.causal_attention('xla', size, lengths_B=None, mesh=None)
  layer = lambda x_BLNH, _: (x_BLNH + attend(x_BLNH, x_BLNH, x_BLNH), None)
  if again:
    layer = jax.checkpoint(layer, prevent_cse=False)
  loss = lambda x_BLNH: jnp.sum(jax.lax.scan(layer, x_BLNH, length=2)[0])
  x_BLNH = jax.ShapeDtypeStruct((1, size, 2, _H), jnp.float32)
  compiled = jax.jit(jax.grad(loss)).lower(x_BLNH).compile()
  return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
  'again', [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_memory_grows_with_the_length(again):
  few, many = (_temporary(size, again) for size in (2048, 4096))
  assert math.log2(many / few) < 1.2


def test_keys_outside_a_window_cost_nothing():
  inputs = _inputs(400, 4, 2)
  operations = {}
  for window in (0, 80):
    attend = attention.causal_attention(
      'xla', 400, lengths_B=None, mesh=None, window=window
    )
    compiled = jax.jit(attend).lower(*inputs).compile()
    operations[window] = max(
      x.times for x in hlo.read(compiled.as_text()).instructions
    )
  # Pairs of five tiles: all, and each with itself and the one before it.
  assert operations == {0: 15, 80: 9}


@pytest.mark.slow
@pytest.mark.parametrize(
  ('size', 'tiles', 'loops'), [(80, 1, 0), (320, 4, 0), (321, 1, 1)]
)
def test_many_tiles_are_one_loop(size, tiles, loops):
  inputs = _inputs(size, 4, 2, rows=1)
  attend = attention.causal_attention('xla', size, lengths_B=None, mesh=None)
  text = jax.jit(attend).lower(*inputs).as_text()
  assert text.count('stablehlo.while') == loops
  assert text.count('stablehlo.exponential') == tiles + loops
  if tiles == 1 and not loops:
    np.testing.assert_array_equal(
      attend(*inputs), _definition(*inputs, np.tri(size, dtype=bool)[None])
    )


@pytest.mark.parametrize(
  ('axes', 'num_heads', 'num_kv_heads', 'shared'),
  [
    ((2, 2, 2), 4, 2, False),
    ((2, 1, 4), 4, 2, True),  # two devices share a key and value head
  ],
)
def test_tiles_need_no_communication_between_devices(
  axes, num_heads, num_kv_heads, shared
):
  mesh = mesh_lib.make_mesh(**dict(zip(('data', 'fsdp', 'tensor'), axes)))
  compiled = _compiled(400, num_heads, num_kv_heads, mesh)
  sent = hlo_cost.collectives(hlo.read(compiled.as_text()))
  assert bool(sent) == shared
  # The gradient is summed between devices once, not in every pair of tiles.
  assert {x.times for x in sent} <= {1}
  assert max(x.times for x in hlo.read(compiled.as_text()).instructions) == 15


def test_devices_that_share_heads_compute_the_same():
  mesh = mesh_lib.make_mesh(data=2, tensor=4, fsdp=1)
  inputs = _inputs(45, 4, 2)
  found = _found(blockwise.attend(45, 12, mesh), inputs)
  for ours, theirs in zip(found, _expected(inputs), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
