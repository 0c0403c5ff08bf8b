"""Attention against sums by hand, and the kernels against the definition."""

import functools

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from stppo_jax.models import attention
from stppo_jax.models import fused_attention
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.tools.plan import hlo
from stppo_jax.tools.plan import hlo_cost
from tests.models import attending
from tests.models import cudnn
from tests.models import tiny

_SPLASH = functools.partial(fused_attention.splash, interpret=True)


def _by_hand(q_BLNH, k_BLKH, v_BLKH, window=100):
  """Returns attention computed one query at a time, in float64."""
  mixed = np.zeros(q_BLNH.shape)
  shared = q_BLNH.shape[2] // k_BLKH.shape[2]
  for b, at, head in np.ndindex(q_BLNH.shape[:3]):
    seen = slice(max(at + 1 - window, 0), at + 1)
    keys = k_BLKH[b, seen, head // shared].astype(np.float64)
    logits = keys @ q_BLNH[b, at, head] / np.sqrt(attending.H)
    weights = np.exp(logits - logits.max())
    values = v_BLKH[b, seen, head // shared]
    mixed[b, at, head] = weights @ values / weights.sum()
  return mixed


@pytest.mark.parametrize('num_kv_heads', [1, 4])
def test_attention_by_hand(num_kv_heads):
  inputs = attending.inputs(2, 9, 4, num_kv_heads)
  make = functools.partial(attention.causal_attention, 'xla', 9)
  attend = jax.jit(lambda *x: make(lengths_B=None, mesh=None)(*x))
  np.testing.assert_allclose(attend(*inputs), _by_hand(*inputs), atol=1e-5)


def _assert_equal_the_definition(kernel, inputs, lengths_B, mesh=None):
  """Compares rows of these lengths; None: whole ones."""
  rows, size = inputs[0].shape[:2]
  of_rows = np.full(rows, size) if lengths_B is None else lengths_B
  attending.assert_equal_the_definition(
    lambda lengths_B: kernel(size, lengths_B=lengths_B, mesh=mesh),
    inputs,
    lengths_B,
    ids_BL=(np.arange(size)[None] < of_rows[:, None]).astype(int),
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ('size', 'num_heads', 'num_kv_heads', 'lengths'),
  [
    (130, 4, 2, (130, 77)),  # a second, nearly empty tile
    (5, 7, 1, (5, 0)),  # a row of nothing
  ],
)
def test_splash_equals_the_definition(size, num_heads, num_kv_heads, lengths):
  inputs = attending.inputs(2, size, num_heads, num_kv_heads)
  _assert_equal_the_definition(_SPLASH, inputs, np.array(lengths, np.int32))


@pytest.mark.parametrize('lengths', [(9, 4, 0, 9), None])
def test_cudnn_gets_equivalent_arguments(lengths, monkeypatch):
  monkeypatch.setattr(jax.nn, 'dot_product_attention', cudnn.stand_in)
  lengths_B = None if lengths is None else np.array(lengths, np.int32)
  kernel = functools.partial(attention.causal_attention, 'cudnn')
  inputs = attending.inputs(4, 9, 4, 2)
  _assert_equal_the_definition(kernel, inputs, lengths_B)


def test_a_kernel_runs_on_shards_of_the_mesh():
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  lengths_B = np.array([4, 9, 1, 6], np.int32)
  inputs = attending.inputs(4, 9, 4, 2)
  _assert_equal_the_definition(_SPLASH, inputs, lengths_B, mesh)


@pytest.mark.slow
def test_devices_that_share_heads_run_the_kernel_on_their_own():
  mesh = mesh_lib.make_mesh(data=2, fsdp=1, tensor=4)
  lengths_B = np.array([9, 4], np.int32)
  inputs = attending.inputs(2, 9, 4, 2)
  layouts = [
    jax.NamedSharding(mesh, P('data', None, heads))
    for heads in ('tensor', None, None)
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
  expected = _by_hand(*inputs)
  found = compiled(*jax.device_put(inputs, tuple(layouts)))
  for b, length in enumerate(lengths_B):
    np.testing.assert_allclose(
      found[b, :length], expected[b, :length], atol=2e-5
    )


def test_a_model_uses_the_configured_attention(monkeypatch):
  monkeypatch.setattr(jax.nn, 'dot_product_attention', cudnn.stand_in)
  tokens_BL = np.random.default_rng(0).integers(0, 11, (2, 6)).astype(np.int32)
  lengths_B = np.array([6, 3], np.int32)
  plain, found = (
    np.asarray(
      tiny.hidden(model)(tiny.params(model), tokens_BL, lengths_B=lengths_B)
    )
    for model in (tiny.model(), tiny.model(attention='cudnn'))
  )
  for b, length in enumerate(lengths_B):
    np.testing.assert_allclose(found[b, :length], plain[b, :length], atol=1e-4)
  # The kernel masks padding; the definition does not need to.
  assert np.abs(found[1, 3:] - plain[1, 3:]).max() > 1e-2
  assert np.isfinite(found).all()


@pytest.mark.parametrize(
  ('platform', 'dtype', 'head_dim', 'expected'),
  [
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


# blockwise_test.py compares tiles with the definition.
@pytest.mark.parametrize(
  ('kernel', 'devices'),
  [
    (attention.IMPLEMENTATIONS['xla'], 1),
    (attention.IMPLEMENTATIONS['cudnn'], 2),
    *(
      pytest.param(kernel, 1, marks=pytest.mark.slow)
      for kernel in (attention.IMPLEMENTATIONS['cudnn'], _SPLASH)
    ),
  ],
)
@pytest.mark.parametrize('window', [pytest.param(0, marks=pytest.mark.slow), 6])
def test_segments_do_not_see_each_other(kernel, devices, window, monkeypatch):
  monkeypatch.setattr(jax.nn, 'dot_product_attention', cudnn.stand_in)
  inputs = attending.inputs(2, 22, 4, 2)
  mesh = mesh_lib.make_mesh(
    data=devices, fsdp=1, tensor=1, devices=jax.devices()[:devices]
  )
  # There is a number without a segment.
  segments = attention.Segments(_SEGMENTS, _POSITIONS, 5, 22)
  options = dict(mesh=mesh, segments=segments, window=window)
  make = lambda: kernel(22, lengths_B=None, **options)
  text = _SEGMENTS > 0
  mixed, *gradients = attending.results(make, inputs, text)
  alone = _segments_alone(inputs, window or 100)
  np.testing.assert_allclose(np.asarray(mixed)[text], alone[text], atol=1e-5)
  _, *expected = attending.expected(inputs, _SEGMENTS, window)
  for ours, theirs in zip(gradients, expected, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
