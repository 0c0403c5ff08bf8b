"""A flat index of FAISS finds what exact search finds."""

import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.retrieval.indexes import dense
from stppo_jax.retrieval.indexes import faiss_index

pytestmark = pytest.mark.filterwarnings('ignore:builtin type [sS]wig')
_PASSAGES = [types.Passage(f'p{n}', '', '') for n in range(300)]


def _vectors(texts):
  rng = np.random.default_rng(len(texts))
  vectors = rng.standard_normal((len(texts), 16), np.float32)
  return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture(scope='module')
def faiss():
  return pytest.importorskip('faiss')


@pytest.mark.parametrize('kind', ['IndexFlatIP', 'IndexFlatL2'])
def test_flat_agrees_with_exact_search(faiss, tmp_path, kind):
  vectors_PD = _vectors(_PASSAGES)
  flat = getattr(faiss, kind)(16)
  flat.add(vectors_PD)
  path = tmp_path / 'flat.index'
  faiss.write_index(flat, str(path))
  exact = dense.DenseIndex(vectors_PD, _PASSAGES, _vectors)
  found = faiss_index.FaissIndex(path, _PASSAGES, _vectors, size=16)
  queries = ['a', 'b', 'c']
  for ours, theirs in zip(exact.search(queries, 5), found.search(queries, 5)):
    assert [p.id for p in ours] == [p.id for p in theirs]
    scores = np.array([p.score for p in theirs])
    if kind == 'IndexFlatL2':  # |q - v|^2 = 2 - 2 q v, negated
      scores = 1 + scores / 2
    np.testing.assert_allclose(scores, [p.score for p in ours], atol=1e-5)
  assert len(found) == 300 and found.search([], 3) == []


def test_what_does_not_fit_is_refused(faiss, tmp_path):
  path = tmp_path / 'flat.index'
  flat = faiss.IndexFlatIP(8)
  flat.add(np.zeros((300, 8), np.float32))
  faiss.write_index(flat, str(path))
  with pytest.raises(ValueError, match='300 vectors for 299 passages'):
    faiss_index.FaissIndex(path, _PASSAGES[1:], _vectors, size=16)
  with pytest.raises(ValueError, match='of 8 numbers, but the .* of 16'):
    faiss_index.FaissIndex(path, _PASSAGES, _vectors, size=16)
  path.write_bytes(b'x')
  with pytest.raises(ValueError, match='not an index of FAISS') as error:
    faiss_index.FaissIndex(path, _PASSAGES, _vectors, size=8)
  assert '\n' not in str(error.value)


def test_a_file_that_is_missing_or_no_package(tmp_path):
  with pytest.raises(ValueError, match='no such file|FAISS is not installed'):
    faiss_index.FaissIndex(tmp_path / 'x', _PASSAGES, _vectors, size=16)
