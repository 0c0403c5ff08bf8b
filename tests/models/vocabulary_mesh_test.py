"""The vocabulary sharded over devices: equal numbers, and what they send.

Meshes of 8 devices are (data, fsdp, tensor).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from stppo_jax.models import heads
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.tools.plan import hlo
from stppo_jax.tools.plan import hlo_cost
from tests import compilations
from tests.models import shapes

_B, _L, _M, _D, _V, _CHUNK = 8, 33, 32, 8, 512, 32
_KINDS = ('entropy', 'divergence')


def _arguments(entries=_V, rows=_B):
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  hidden, output = draw(rows, _L, _D), draw(entries, _D)
  tokens = rng.integers(0, entries, (rows, _L)).astype(np.int32)
  order = rng.permuted(np.tile(np.arange(_L), (rows, 1)), axis=1)[:, :_M]
  return hidden, output, tokens, order.astype(np.int32)


def _total(kind, mesh, hidden, output, tokens, positions):
  """Returns a sum that weighs every token, for either function."""
  options = {'temperature': 0.7, 'chunk': _CHUNK, 'mesh': mesh}
  options['loss_positions_BM'] = positions
  if kind == 'entropy':
    found = heads.token_logprobs_and_entropy(hidden, output, tokens, **options)
  else:
    models = hidden, output, 0.5 - hidden, output
    found = heads.token_divergence(*models, tokens, **options)
  weights_L = jnp.cos(jnp.arange(_L))[None]
  weighted = [(n + 1) * weights_L * x_BL for n, x_BL in enumerate(found)]
  return sum(jnp.sum(x) for x in weighted), found


def _placed(mesh, arguments):
  """Returns rows sharded by data and fsdp, the matrix by tensor and fsdp."""
  rows = sharding.batch_sharding(mesh)
  if len(arguments[0]) % 4:
    rows = NamedSharding(mesh, P())
  fits = len(arguments[1]) % mesh.shape['tensor'] == 0
  matrix = NamedSharding(mesh, P('tensor' if fits else None, 'fsdp'))
  layout = rows, matrix, rows, rows
  return jax.device_put(arguments, layout), layout


def _function(kind, mesh):
  return jax.value_and_grad(
    functools.partial(_total, kind, mesh), (0, 1), has_aux=True
  )


@functools.cache
def _jitted(kind, mesh):
  return jax.jit(_function(kind, mesh), compiler_options=compilations.QUICK)


def _lowered(kind, axes):
  """Returns a program for a mesh, and what it is called with."""
  mesh = mesh_lib.make_mesh(
    **dict(zip(('data', 'fsdp', 'tensor'), axes, strict=True))
  )
  placed, (rows, matrix, *_) = _placed(mesh, _arguments())
  jitted = jax.jit(
    _function(kind, mesh),
    out_shardings=((None, rows), (rows, matrix)),
    compiler_options=compilations.QUICK,
  )
  return jitted.lower(*placed), placed


@functools.cache
def _compiled(kind, axes):
  """Returns the text of a program, the program compiled, and its results."""
  lowered, placed = _lowered(kind, axes)
  compiled = lowered.compile()
  return lowered.as_text(), compiled, jax.device_get(compiled(*placed))


def _assert_same(actual, expected):
  """Compares results and gradients; in the total, terms cancel."""
  (_, found), gradients = jax.device_get(actual)
  (_, expected_found), expected_gradients = jax.device_get(expected)
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5),
    (found, gradients),
    (expected_found, expected_gradients),
  )


@pytest.mark.parametrize(
  ('kind', 'axes'),
  [
    ('entropy', (2, 2, 2)),
    *(
      pytest.param(kind, axes, marks=pytest.mark.slow)
      for kind, axes in (
        ('divergence', (1, 1, 8)),
        ('entropy', (1, 1, 8)),
        ('divergence', (2, 2, 2)),
      )
    ),
  ],
)
def test_many_devices_equal_one(kind, axes):
  *_, found = _compiled(kind, axes)
  _assert_same(found, _jitted(kind, None)(*_arguments()))


@pytest.mark.parametrize(
  ('entries', 'rows'),
  [(511, _B), pytest.param(_V, 3, marks=pytest.mark.slow)],
)
def test_dimensions_that_an_axis_does_not_divide_are_replicated(entries, rows):
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  arguments = _arguments(entries, rows)
  placed, _ = _placed(mesh, arguments)
  _assert_same(
    _jitted('entropy', mesh)(*placed), _jitted('entropy', None)(*arguments)
  )


def test_what_is_added_to_scatter_a_sum_changes_no_number(monkeypatch):
  own, _, expected = _compiled('entropy', (2, 2, 2))
  monkeypatch.setattr(mesh_lib, 'platform', lambda mesh: 'tpu')
  filled, placed = _lowered('entropy', (2, 2, 2))
  # A device has half of the entries. Their sum is scattered in whole blocks.
  assert '1024x8xf32' in filled.as_text()
  assert '1024x8xf32' not in own
  found = filled.compile()(*placed)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize('kind', _KINDS)
def test_no_logits_are_sent_and_the_matrix_is_sent_once_a_pass(kind):
  _, compiled, _ = _compiled(kind, (2, 2, 2))
  # The chunk of a device that has half of the entries.
  chunk = _CHUNK * _V // 2
  assert shapes.largest(compiled) == chunk
  found = hlo_cost.collectives(hlo.read(compiled.as_text()))
  size = lambda c: max(math.prod(x.dims) for x in c.arrays)
  # Each pass gathers half of the entries with all columns, of each model.
  own = _V // 2 * _D
  gathers = [c for c in found if c.kind == 'all-gather']
  assert gathers and all(size(c) == own and c.times == 1 for c in gathers)
  assert len(gathers) <= 2
  # The matrix's gradient is sent once; the loop sends numbers and states only.
  once = [c for c in found if c.times == 1 and c not in gathers]
  inside = [c for c in found if c.times > 1]
  assert max(map(size, once)) <= own
  assert {c.times for c in inside} == {_B // 4 * _M // _CHUNK}
  assert max(map(size, inside)) == _CHUNK * _D
