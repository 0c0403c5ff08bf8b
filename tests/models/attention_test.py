"""Attention against sums by hand, and the kernels against the definition."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from stppo_jax.models import attention
from stppo_jax.models import fused_attention
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.tools.plan import hlo
from stppo_jax.tools.plan import hlo_cost
from tests.models import cudnn
from tests.models import tiny

_H = 8
_SPLASH = functools.partial(fused_attention.splash, interpret=True)


def _inputs(rows, size, num_heads, num_kv_heads, seed=0):
  rng = np.random.default_rng(seed)
  return tuple(
    rng.normal(size=(rows, size, heads, _H)).astype(np.float32)
    for heads in (num_heads, num_kv_heads, num_kv_heads)
  )


def _by_hand(q_BLNH, k_BLKH, v_BLKH, window=100):
  """Returns attention computed one query at a time, in float64."""
  mixed = np.zeros(q_BLNH.shape)
  shared = q_BLNH.shape[2] // k_BLKH.shape[2]
  for b, at, head in np.ndindex(q_BLNH.shape[:3]):
    seen = slice(max(at + 1 - window, 0), at + 1)
    keys = k_BLKH[b, seen, head // shared].astype(np.float64)
    logits = keys @ q_BLNH[b, at, head] / np.sqrt(_H)
    weights = np.exp(logits - logits.max())
    values = v_BLKH[b, seen, head // shared]
    mixed[b, at, head] = weights @ values / weights.sum()
  return mixed


@pytest.mark.parametrize('num_kv_heads', [1, 2, 4])
def test_attention_by_hand(num_kv_heads):
  inputs = _inputs(2, 9, 4, num_kv_heads)
  make = functools.partial(attention.causal_attention, 'xla', 9)
  attend = jax.jit(lambda *x: make(lengths_B=None, mesh=None)(*x))
  np.testing.assert_allclose(attend(*inputs), _by_hand(*inputs), atol=1e-5)


@functools.partial(jax.jit, static_argnums=0)
def _results(make, inputs, weights, *others):
  """Returns attention, and the gradients of its sum with these weights."""

  def loss(inputs):
    mixed_BLNH = make(*others)(*inputs)
    return jnp.sum(mixed_BLNH * weights), mixed_BLNH

  gradients, mixed_BLNH = jax.grad(loss, has_aux=True)(inputs)
  return mixed_BLNH, *gradients


def _weights(inputs, text_BL):
  weights = np.random.default_rng(9).normal(size=inputs[0].shape)
  return np.where(text_BL[..., None, None], weights, 0.0).astype(np.float32)


def _definition(visible_BLL):
  return lambda q, k, v: attention.attention(
    q, k.swapaxes(1, 2), v.swapaxes(1, 2), visible_BLL
  )


def _assert_equal_the_definition(make, inputs, lengths_B):
  """Compares at text only; but what stands at padding has to be finite."""
  rows, size = inputs[0].shape[:2]
  of_rows = np.full(rows, size) if lengths_B is None else lengths_B
  text_BL = np.arange(size)[None] < of_rows[:, None]
  weights = _weights(inputs, text_BL)
  mixed, *gradients = _results(make, inputs, weights, lengths_B)
  assert np.isfinite(mixed).all()
  visible_1LL = np.tri(size, dtype=bool)[None]
  expected, *theirs = _results(_definition, inputs, weights, visible_1LL)
  mixed, expected = (np.asarray(x)[text_BL] for x in (mixed, expected))
  for x, y in zip((mixed, *gradients), (expected, *theirs)):
    np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('size', 'num_heads', 'num_kv_heads', 'lengths'),
  [
    (130, 4, 2, (130, 77)),  # a second, nearly empty tile
    # A row of nothing.
    pytest.param(5, 7, 1, (5, 0), marks=pytest.mark.slow),
  ],
)
def test_splash_equals_the_definition(size, num_heads, num_kv_heads, lengths):
  lengths_B = np.array(lengths, np.int32)
  inputs = _inputs(2, size, num_heads, num_kv_heads)
  make = lambda lengths_B: _SPLASH(size, lengths_B=lengths_B, mesh=None)
  _assert_equal_the_definition(make, inputs, lengths_B)


@pytest.mark.parametrize('lengths', [(9, 4, 0, 9), None])
def test_cudnn_gets_equivalent_arguments(lengths, monkeypatch):
  monkeypatch.setattr(jax.nn, 'dot_product_attention', cudnn.stand_in)
  lengths_B = None if lengths is None else np.array(lengths, np.int32)
  make = lambda lengths_B: attention.causal_attention(
    'cudnn', 9, lengths_B=lengths_B, mesh=None
  )
  _assert_equal_the_definition(make, _inputs(4, 9, 4, 2), lengths_B)


def test_a_kernel_runs_on_shards_of_the_mesh():
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  lengths_B = np.array([4, 9, 1, 6], np.int32)
  make = lambda lengths_B: _SPLASH(9, lengths_B=lengths_B, mesh=mesh)
  _assert_equal_the_definition(make, _inputs(4, 9, 4, 2), lengths_B)


@pytest.mark.slow
def test_devices_that_share_heads_run_the_kernel_on_their_own():
  mesh = mesh_lib.make_mesh(data=2, fsdp=1, tensor=4)
  lengths_B = np.array([9, 4], np.int32)
  inputs = _inputs(2, 9, 4, 2)
  rows, heads = 'data', 'tensor'
  layouts = [
    jax.NamedSharding(mesh, P(rows, None, axis)) for axis in (heads, None, None)
  ]
  attend = jax.jit(
    _SPLASH(9, lengths_B=lengths_B, mesh=mesh),
    in_shardings=layouts,
    out_shardings=layouts[0],
    compiler_options={'xla_backend_optimization_level': 0},
  )
  compiled = attend.lower(*inputs).compile()
  # Neither queries nor results are sent to other devices.
  assert hlo_cost.collectives(hlo.read(compiled.as_text())) == []
  expected = attention.IMPLEMENTATIONS['xla'](
    9, lengths_B=lengths_B, mesh=None
  )(*inputs)
  found = compiled(*jax.device_put(inputs, tuple(layouts)))
  for b, length in enumerate(lengths_B):
    np.testing.assert_allclose(
      found[b, :length], expected[b, :length], atol=2e-5
    )


def test_a_model_uses_the_configured_attention(monkeypatch):
  monkeypatch.setitem(attention.IMPLEMENTATIONS, 'splash', _SPLASH)
  tokens_BL = np.random.default_rng(0).integers(0, 11, (2, 6)).astype(np.int32)
  lengths_B = np.array([6, 3], np.int32)
  hidden = {}
  for name in ('xla', 'splash'):
    model = tiny.model(attention=name, num_layers=1)
    hidden[name] = np.asarray(
      jax.jit(model.hidden)(tiny.params(model), tokens_BL, lengths_B=lengths_B)
    )
  for b, length in enumerate(lengths_B):
    np.testing.assert_allclose(
      hidden['splash'][b, :length], hidden['xla'][b, :length], atol=1e-4
    )
  # The kernel masks padding; the definition does not need to.
  assert np.abs(hidden['splash'][1, 3:] - hidden['xla'][1, 3:]).max() > 1e-2
  assert np.isfinite(hidden['splash']).all()


@pytest.mark.parametrize(
  ('platform', 'dtype', 'head_dim', 'expected'),
  [
    ('cpu', 'float32', 64, 'xla'),
    ('cpu', 'bfloat16', 64, 'xla'),
    ('gpu', 'bfloat16', 64, 'cudnn'),
    ('gpu', 'float32', 64, 'xla'),
    ('gpu', 'bfloat16', 36, 'xla'),
    ('tpu', 'float32', 64, 'splash'),
  ],
)
def test_auto_is_the_fastest_implementation_of_a_platform(
  platform, dtype, head_dim, expected
):
  here = {'platform': platform, 'dtype': dtype, 'head_dim': head_dim}
  assert attention.choose('auto', **here) == expected
  assert attention.choose(expected, **here) == expected
  assert attention.choose('xla', **here) == 'xla'


@pytest.mark.parametrize(
  ('name', 'platform', 'dtype', 'choices'),
  [
    ('cudnn', 'cpu', 'bfloat16', 'auto, xla'),
    ('cudnn', 'gpu', 'float32', 'auto, xla'),
    ('splash', 'gpu', 'bfloat16', 'auto, cudnn, xla'),
  ],
)
def test_an_implementation_that_does_not_run_here_is_refused(
  name, platform, dtype, choices
):
  with pytest.raises(ValueError, match=f'model.attention={name}.*{choices}$'):
    attention.choose(name, dtype=dtype, head_dim=64, platform=platform)


_SEGMENTS = np.array([[1] * 5 + [2] * 9 + [3] * 3 + [0] * 5, [4] * 22])
_POSITIONS = np.array([[*range(5), *range(9), *range(3), *[0] * 5], range(22)])


def _segments_alone(inputs, window):
  """Returns attention of each segment as if it were a batch of its own."""
  mixed = np.zeros(inputs[0].shape)
  for row, ids in enumerate(_SEGMENTS):
    for number in set(ids) - {0}:
      cut = [x[row : row + 1, ids == number] for x in inputs]
      mixed[row, ids == number] = _by_hand(*cut, window)[0]
  return mixed


@pytest.mark.parametrize(
  ('make', 'devices'),
  [
    (attention.IMPLEMENTATIONS['xla'], 1),
    (attention.IMPLEMENTATIONS['cudnn'], 1),
    (attention.IMPLEMENTATIONS['cudnn'], 2),
    (
      lambda size, *, lengths_B, mesh, segments, window: (
        attention.blockwise.attend(size, 4, mesh, segments.ids_BL, window)
      ),
      1,
    ),
    pytest.param(_SPLASH, 1, marks=pytest.mark.slow),
  ],
)
@pytest.mark.parametrize(
  'window', [pytest.param(100, marks=pytest.mark.slow), 6]
)
def test_segments_do_not_see_each_other(make, devices, window, monkeypatch):
  monkeypatch.setattr(jax.nn, 'dot_product_attention', cudnn.stand_in)
  inputs = _inputs(2, 22, 4, 2)
  mesh = mesh_lib.make_mesh(
    data=devices, fsdp=1, tensor=1, devices=jax.devices()[:devices]
  )
  # There is a number without a segment.
  segments = attention.Segments(_SEGMENTS, _POSITIONS, 5, 22)
  alone = lambda: make(
    22, lengths_B=None, mesh=mesh, segments=segments, window=window % 100
  )
  text = _SEGMENTS > 0
  weights = _weights(inputs, text)
  mixed, *gradients = _results(alone, inputs, weights)
  np.testing.assert_allclose(
    np.asarray(mixed)[text], _segments_alone(inputs, window)[text], atol=1e-5
  )
  visible = (_SEGMENTS[:, :, None] == _SEGMENTS[:, None]) & np.tri(
    22, dtype=bool
  )
  visible &= ~np.tri(22, k=-window, dtype=bool)
  _, *expected = _results(_definition, inputs, weights, visible)
  for ours, theirs in zip(gradients, expected):
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
