"""Dense search equals a sort of all products, on one device and on eight."""

import jax
import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.retrieval.indexes import dense


def _passages(size):
  return [types.Passage(f'p{n}', f'T{n}', f'text {n}') for n in range(size)]


def _vectors(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _index(vectors_PD, num_devices, **options):
  return dense.DenseIndex(
    vectors_PD,
    _passages(len(vectors_PD)),
    lambda texts: _vectors(len(texts), vectors_PD.shape[1], seed=1),
    devices=jax.local_devices()[:num_devices],
    **options,
  )


@pytest.mark.parametrize('num_devices', [1, 8])
def test_it_equals_a_sort_of_all_products(num_devices):
  vectors_PD, query_vectors = _vectors(20_000, 64), _vectors(7, 64, seed=1)
  index = _index(vectors_PD, num_devices, tile=600)
  scores, rows = index.nearest(query_vectors, 10)
  products = query_vectors @ vectors_PD.T
  order = np.argsort(-products, axis=1, kind='stable')[:, :10]
  np.testing.assert_array_equal(rows, order)
  expected = np.take_along_axis(products, order, axis=1)
  np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_passages_come_with_scores_and_the_prefix_is_written():
  texts = []

  def encode(queries):
    texts.extend(queries)
    return np.eye(len(queries), 3, dtype=np.float32)

  vectors_PD = np.array([[1, 0, 0], [0, 2, 0], [0, 1, 3]], np.float32)
  index = dense.DenseIndex(
    vectors_PD, _passages(3), encode, query_prefix='query: '
  )
  first, second = index.search(['a', 'b'], 2)
  assert texts == ['query: a', 'query: b'] and len(index) == 3
  assert [(p.id, p.score) for p in first] == [('p0', 1.0), ('p1', 0.0)]
  assert [(p.id, p.score) for p in second] == [('p1', 2.0), ('p2', 1.0)]
  assert index.search([], 2) == []


@pytest.mark.parametrize('num_devices', [1, 8])
def test_ties_come_in_the_order_of_the_corpus_and_topk_may_exceed_it(
  num_devices,
):
  vectors_PD = np.ones((50, 4), np.float32)
  vectors_PD[30] += 1
  index = _index(vectors_PD, num_devices, tile=3)
  order = [30, *range(30), *range(31, 50)]
  for topk in (5, 60):
    _, rows = index.nearest(np.ones((1, 4), np.float32), topk)
    assert rows.tolist() == [order[:topk]]


@pytest.mark.parametrize('dtype', dense.DTYPES)
def test_vectors_are_written_and_read(tmp_path, dtype):
  texts = []

  def encode(some):
    texts.extend(some)
    return _vectors(len(some), 8)

  dense.write_vectors(
    tmp_path, _passages(9), encode, size=8, dtype=dtype, passage_prefix='of: '
  )
  assert texts[3] == 'of: T3\ntext 3' and len(texts) == 9
  found = dense.read_vectors(tmp_path, dtype, size=8)
  np.testing.assert_array_equal(
    found.astype(np.float32),
    _vectors(9, 8).astype(dense.DTYPES[dtype]).astype(np.float32),
  )
  # In bfloat16 a product has three digits.
  _, rows = _index(found, 8).nearest(_vectors(9, 8), 1)
  np.testing.assert_array_equal(
    rows[:, 0], np.argmax(_vectors(9, 8) @ _vectors(9, 8).T, axis=1)
  )
  with pytest.raises(ValueError, match=r'shape \(9, 8\), not .* 7\)'):
    dense.read_vectors(tmp_path, dtype, size=7)
  (tmp_path / 'vectors.npy').write_bytes(b'x')
  with pytest.raises(ValueError, match='damaged vectors'):
    dense.read_vectors(tmp_path, dtype, size=8)


def test_another_number_of_vectors_is_refused():
  with pytest.raises(ValueError, match='4 vectors for 5 passages'):
    dense.DenseIndex(_vectors(4, 2), _passages(5), _vectors)
