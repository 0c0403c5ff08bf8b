"""The kernels that read live pages equal the definition of attention."""

import contextlib
import functools

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import cache as cache_lib
from stppo_jax.models.kernels import live_pages_gpu
from stppo_jax.models.kernels import live_pages_tpu

_SIZE = live_pages_tpu.PAGE_SIZE
_N = 6  # pages that a row can have


def _arrays(
  lengths, *, dtype='float32', queries=5, own=128, heads=2, size=_SIZE
):
  """Returns queries, pages, own keys and values, and the pages of rows."""
  rng = np.random.default_rng(0)
  normal = lambda *shape, scale=1.0: (scale * rng.normal(size=shape)).astype(
    jnp.dtype(dtype)
  )
  B, K, R, H = len(lengths), heads, 3, 32
  q_BKRCH = normal(B, K, R, queries, H, scale=H**-0.5)
  pages = [normal(B * _N, K, size, H) for _ in 'kv']
  table_BN = rng.permutation(B * _N).reshape(B, _N).astype(np.int32)
  table_BN = np.where(
    np.arange(_N) * size < np.array(lengths)[:, None],
    table_BN,
    cache_lib.NO_PAGE,
  )
  return q_BKRCH, *pages, *(normal(B, K, own, H) for _ in 'kv'), table_BN


def _reference(
  arrays, lengths, first, *, window=None, soft_cap=None, sinks_KR=None
):
  """Returns attention of each query by loops, in float64."""
  *arrays, table_BN = arrays
  q, k, v, own_k, own_v = (np.asarray(x, np.float64) for x in arrays)
  result = np.zeros(q.shape)
  for b, head, r, c in np.ndindex(q.shape[:-1]):
    length, seen = lengths[b], lengths[b] + first + c + 1
    keys, values = (
      np.concatenate(
        [x[page, head] for page in table_BN[b, : -(-length // k.shape[2])]]
        + [np.zeros((0, q.shape[-1]))]
      )[:length]
      for x in (k, v)
    )
    begin = 0 if window is None else max(seen - window, 0)
    keys = np.concatenate([keys, own_k[b, head]])[begin:seen]
    values = np.concatenate([values, own_v[b, head]])[begin:seen]
    logits = keys @ q[b, head, r, c]
    if soft_cap is not None:
      logits = soft_cap * np.tanh(logits / soft_cap)
    weights = np.exp(logits)
    total = weights.sum()
    if sinks_KR is not None:
      total += np.exp(np.float64(sinks_KR[head, r]))
    result[b, head, r, c] = weights @ values / total
  return result


@functools.partial(
  jax.jit, static_argnames=('kernel', 'interpret', 'window', 'soft_cap')
)
def _planned(arrays, lengths_B, first, *, kernel, interpret, **options):
  *arrays, table_BN = arrays
  window = options.get('window', 0)
  work = kernel.plan_work(lengths_B, table_BN, len(arrays[1]), window=window)
  return kernel.attend(*arrays, work, first, interpret=interpret, **options)


def _attend(arrays, lengths, first, *, kernel=live_pages_tpu, **options):
  options = dict(kernel=kernel, interpret=True) | options
  return np.asarray(_planned(arrays, np.array(lengths), first, **options))


_SINKS_KR = np.array([[0.5, -1, 3], [9, 0, -5]], np.float32)
_DECODING = dict(queries=1, own=16)
_OF_WHOLE_CHUNK = dict(queries=256, own=256)  # whose own keys are all of it
_EVERY_OPTION = dict(window=7, soft_cap=2.0, sinks_KR=_SINKS_KR)


def _slow(*cases):
  return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
  ('kernel', 'first', 'sizes', 'options'),
  [
    (live_pages_tpu, 9, _DECODING, {}),
    (live_pages_gpu, 9, _DECODING, {}),
    (live_pages_tpu, 2, {}, _EVERY_OPTION),
    *_slow(
      (live_pages_gpu, 1, dict(own=20, size=48), dict(window=130)),
      *(
        (kernel, first, sizes | {'dtype': dtype}, {})
        for kernel in (live_pages_tpu, live_pages_gpu)
        for dtype in ('float32', 'bfloat16')
        for first, sizes in (
          (9, _DECODING),
          (0, _DECODING),
          (0, _OF_WHOLE_CHUNK),
          (40, {}),
        )
      ),
      *(
        (kernel, 0, dict(queries=384, own=384, lengths=(300,)), {})
        for kernel in (live_pages_tpu, live_pages_gpu)
      ),
      *(
        (live_pages_tpu, 2, {}, options)
        for options in (dict(soft_cap=0.7), dict(sinks_KR=_SINKS_KR))
      ),
      *(
        (kernel, 2, dict(own=own), dict(window=window))
        for kernel, own in ((live_pages_tpu, 128), (live_pages_gpu, 20))
        for window in (1, 9, 130, 300, 900)
      ),
      (live_pages_gpu, 1, dict(size=16), {}),
    ),
  ],
)
def test_a_kernel_equals_loops(kernel, first, sizes, options):
  size = sizes.get('size', _SIZE)
  lengths = sizes.get('lengths', (0, 1, size + 1, _N * size))
  arrays = _arrays(**sizes | {'lengths': lengths})
  found = _attend(arrays, lengths, first, kernel=kernel, **options)
  assert found.dtype == arrays[0].dtype
  expected = _reference(arrays, lengths, first, **options)
  tolerance = 1e-5 if found.dtype == np.float32 else 2e-2
  np.testing.assert_allclose(np.float64(found), expected, atol=tolerance)


@pytest.mark.parametrize(
  ('window', 'entries'),
  [
    (1, [(0, 0), (1, 0), (2, 5)]),
    (130, [(0, 0), (1, 0), (2, 4)]),  # the window begins in page 4
    (300, [(0, 0), (1, 0), (2, 3)]),
    (513, [(0, 0), (1, 0), (2, 1), (2, 5)]),
    (900, [(0, 0), (1, 0), (2, 0), (2, 4)]),
  ],
)
@pytest.mark.slow
def test_pages_before_a_window_are_not_read(window, entries):
  table_BN = np.random.default_rng(0).permutation(3 * _N).reshape(3, _N)
  plan = functools.partial(live_pages_tpu.plan_work, num_pages=3 * _N)
  work = jax.jit(functools.partial(plan, window=window))(
    np.array([0, 128, 700]), table_BN.astype(np.int32)
  )
  count = int(work.count_1[0])
  assert [*zip(work.rows_E.tolist(), work.firsts_E.tolist())][:count] == entries


def test_keys_that_no_query_sees_are_not_read_on_a_gpu():
  lengths = 0, 60, 700
  *arrays, table_BN = _arrays(lengths, own=20)
  for pages in (1, 2):
    x = arrays[pages]
    x[table_BN[1, 0], :, 64:] = np.nan  # another block than its last token's
    x[table_BN[2, 0]] = np.nan  # before the window
    x[table_BN[2, 5], :, 64:] = np.nan  # 700 = 5 pages and 60 tokens
  found = _attend(
    (*arrays, table_BN), lengths, 0, kernel=live_pages_gpu, window=130
  )
  assert np.isfinite(found).all()


def test_the_kernel_for_gpu_can_be_lowered_without_one():
  *arrays, table_BN = _arrays((0, 300), dtype='bfloat16', queries=1, own=12)
  plan = functools.partial(live_pages_gpu.plan_work, num_pages=len(arrays[1]))
  work = jax.eval_shape(plan, np.array([0, 300]), table_BN)
  device = contextlib.nullcontext()
  if hasattr(jax.sharding, 'AbstractDevice'):  # jax 0.11 asks for one
    described = jax.sharding.AbstractDevice('NVIDIA H100', 132, 'gpu')
    device = jax.sharding.use_abstract_mesh(
      jax.sharding.AbstractMesh((1,), ('x',), abstract_device=described)
    )
  with device:
    traced = jax.jit(live_pages_gpu.attend).trace(*arrays, work, 5)
    lowered = traced.lower(lowering_platforms=('cuda',))
  assert 'triton' in lowered.as_text()


def test_sizes_that_a_gpu_can_multiply():
  assert live_pages_gpu.supports(32, 16) and live_pages_gpu.supports(32, 48)
  for head_dim, size in ((96, 16), (8, 16), (64, 100)):
    assert not live_pages_gpu.supports(head_dim, size)


@pytest.mark.slow
def test_a_tile_may_be_as_long_as_the_own_tokens():
  arrays = _arrays((200,), queries=128, heads=8)
  # This mode raises if a block is outside of its array.
  with pltpu.force_tpu_interpret_mode():
    found = _attend(arrays, (200,), 0, interpret=False)
  expected = _reference(arrays, (200,), 0)
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_only_begun_pages_are_read():
  lengths_B = np.array([0, 1, 128, 129, 513, 768])
  rng = np.random.default_rng(0)
  table_BN = rng.permutation(36).reshape(6, _N).astype(np.int32)
  plan = functools.partial(live_pages_tpu.plan_work, num_pages=36)
  work = jax.tree.map(np.asarray, jax.jit(plan)(lengths_B, table_BN))
  count = work.count_1[0]
  # A place reads a page when it is another one than before.
  pages_ZE = work.pages_ZE[:, :count]
  read = pages_ZE[:, 0].tolist() + [
    page
    for places in pages_ZE
    for before, page in zip(places, places[1:])
    if page != before
  ]
  begun = [
    page
    for row, length in zip(table_BN, lengths_B)
    for page in row[: max(-(-length // _SIZE), 1)]
  ]
  # The places of the first entry hold some page in any case.
  assert len(read) <= len(begun) + pages_ZE.shape[0] - 1
  assert set(begun) <= set(read)
