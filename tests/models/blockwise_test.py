"""Attention in tiles: its numbers, its memory, and what devices send."""

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
from tests.models import attending

_ROWS, _HEADS = activations.ROWS, activations.TENSOR


@pytest.mark.parametrize(
  ('size', 'tile', 'num_heads', 'num_kv_heads', 'window'),
  [
    (45, 8, 4, 2, 0),  # six tiles of 8 with three tokens of padding
    # Four, the last shorter.
    pytest.param(22, 7, 4, 1, 0, marks=pytest.mark.slow),
    pytest.param(9, 1, 2, 2, 0, marks=pytest.mark.slow),  # each token alone
    pytest.param(45, 45, 4, 2, 0, marks=pytest.mark.slow),  # one
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
  inputs = attending.inputs(4, size, num_heads, num_kv_heads)
  # Logits that are far larger than all before and after them.
  inputs[1][:, size // 2] *= 4
  tiles = lambda: blockwise.attend(size, tile, None, window=window)
  attending.assert_equal_the_definition(tiles, inputs, window=window)


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
  tiles = lambda: blockwise.attend(45, 8, None, ids_BL, window)
  attending.assert_equal_the_definition(
    tiles, attending.inputs(4, 45, 4, 2), ids_BL=ids_BL, window=window
  )


def test_tiles_that_share_no_sequence_are_not_computed():
  # Three sequences fill the tiles 0 to 1, 2 to 3 and 4 to 5 of one row, and
  # most of the other row is padding.
  ids_BL = np.repeat([[1, 2, 3], [4, 0, 0]], 16, axis=1)
  inputs = attending.inputs(2, 48, 4, 2)

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
  inputs = attending.inputs(4, 45, 4, 2, dtype=jnp.bfloat16)
  ids_BL = attending.everywhere(inputs)
  tiles = lambda: blockwise.attend(45, 3, None)
  found = attending.results(tiles, inputs, ids_BL > 0)
  exact = attending.expected([x.astype(np.float32) for x in inputs], ids_BL)
  for ours, theirs in zip(found, exact, strict=True):
    assert ours.dtype == jnp.bfloat16
    bound = 2**-7 * np.abs(theirs).max()
    np.testing.assert_allclose(np.float32(ours), theirs, rtol=0, atol=bound)


def _temporary(size, again):
  """Returns the bytes of the gradient of two layers of attention."""
  attend = attention.causal_attention('xla', size, lengths_B=None, mesh=None)
  layer = lambda x_BLNH, _: (x_BLNH + attend(x_BLNH, x_BLNH, x_BLNH), None)
  if again:
    layer = jax.checkpoint(layer, prevent_cse=False)
  loss = lambda x_BLNH: jnp.sum(jax.lax.scan(layer, x_BLNH, length=2)[0])
  x_BLNH = jax.ShapeDtypeStruct((1, size, 2, attending.H), jnp.float32)
  compiled = jax.jit(jax.grad(loss)).lower(x_BLNH).compile()
  return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
  'again', [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_memory_grows_with_the_length(again):
  few, many = (_temporary(size, again) for size in (2048, 4096))
  assert math.log2(many / few) < 1.2


def test_keys_outside_a_window_cost_nothing():
  inputs = attending.inputs(4, 400, 4, 2)
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
  inputs = attending.inputs(1, size, 4, 2)
  attend = attention.causal_attention('xla', size, lengths_B=None, mesh=None)
  text = jax.jit(attend).lower(*inputs).as_text()
  assert text.count('stablehlo.while') == loops
  assert text.count('stablehlo.exponential') == tiles + loops
  if tiles == 1 and not loops:
    np.testing.assert_array_equal(
      attend(*inputs),
      attending.definition(np.tri(size, dtype=bool)[None])(*inputs),
    )


@pytest.mark.parametrize(
  ('axes', 'shared'),
  [
    ((2, 2, 2), False),
    # Two devices share a key and value head.
    pytest.param((2, 1, 4), True, marks=pytest.mark.slow),
  ],
)
def test_tiles_need_no_communication_between_devices(axes, shared):
  mesh = mesh_lib.make_mesh(**dict(zip(('data', 'fsdp', 'tensor'), axes)))
  attend = attention.causal_attention('xla', 400, lengths_B=None, mesh=mesh)

  def shape(heads, over=_HEADS):
    sharding = NamedSharding(mesh, P(_ROWS, None, over))
    shape = (8, 400, heads, attending.H)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

  def loss(inputs):
    constrained = (
      activations.constrain(x, mesh, _ROWS, None, _HEADS) for x in inputs
    )
    return jnp.sum(jnp.sin(attend(*constrained)))

  inputs = shape(4), *[shape(2, None if shared else _HEADS)] * 2
  layouts = tuple(x.sharding for x in inputs)
  gradient = jax.jit(jax.grad(loss), out_shardings=layouts)
  program = hlo.read(gradient.lower(inputs).compile().as_text())
  sent = hlo_cost.collectives(program)
  assert bool(sent) == shared
  # The gradient is summed between devices once, not in every pair of tiles.
  assert {x.times for x in sent} <= {1}
  assert max(x.times for x in program.instructions) == 15


def test_devices_that_share_heads_compute_the_same():
  mesh = mesh_lib.make_mesh(data=2, tensor=4, fsdp=1)
  attending.assert_equal_the_definition(
    lambda: blockwise.attend(45, 12, mesh), attending.inputs(4, 45, 4, 2)
  )
