"""The folder of an index: what is written is read, and damage is named."""

import json

import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.retrieval.indexes import bm25
from stppo_jax.retrieval.indexes import index_folder

_PASSAGES = [
  types.Passage('p0', 'Paris', 'The capital\nof France.'),
  types.Passage('p1', 'Zürich \U0001f30d', ''),
  types.Passage('p2', '', 'of'),
]


def _create(tmp_path, passages=_PASSAGES):
  return index_folder.IndexFolder.create(tmp_path / 'index', passages)


def _add(folder):
  index = bm25.Bm25Index(folder.passages)
  return folder.add_part('bm25', {'k1': 0.9}, index.save)


def _load(path):
  folder = index_folder.IndexFolder(path)
  assert folder.part('bm25') == {'k1': 0.9}
  return bm25.Bm25Index.load(folder.path / 'bm25', folder.passages)


def test_passages_and_index_are_those_that_were_written(tmp_path):
  folder = _create(tmp_path)
  assert list(folder.passages) == _PASSAGES
  assert folder.passages[1:] == _PASSAGES[1:]
  assert folder.passages.sha256() == folder.sha256
  assert _add(folder) and not _add(folder) and folder.parts() == ['bm25']
  queries = ['of', 'Paris zürich', 'unknown', '']
  found = _load(folder.path).search(queries, 2)
  assert found == bm25.Bm25Index(_PASSAGES).search(queries, 2)


def test_an_interrupted_start_is_begun_again(tmp_path):
  folder = _create(tmp_path)
  (folder.path / 'index.json').unlink()
  with pytest.raises(ValueError, match='index.json is missing'):
    index_folder.IndexFolder(folder.path)
  (folder.path / 'bm25.unfinished').mkdir()
  with pytest.raises(ValueError, match='is not empty, and holds no index'):
    _create(tmp_path)
  (folder.path / 'bm25.unfinished').rmdir()
  (tmp_path / 'index' / 'passages.jsonl').write_text('half')
  folder = _create(tmp_path)
  (folder.path / 'bm25.unfinished').mkdir()
  (folder.path / 'bm25.unfinished' / 'part').write_text('half')
  assert _add(folder)
  assert _load(folder.path).search(['paris'], 1)[0][0].id == 'p0'


def test_other_passages_are_refused(tmp_path):
  folder = _create(tmp_path)
  _add(folder)
  with pytest.raises(ValueError, match='the index of another corpus: sha256'):
    _create(tmp_path, _PASSAGES[::-1])
  manifest = folder.path / 'bm25' / 'part.json'
  manifest.write_text(json.dumps({'sha256': '0' * 64, 'k1': 0.9}))
  with pytest.raises(ValueError, match='made from other passages'):
    _load(folder.path)
  with pytest.raises(ValueError, match='no dense index; the folder has: bm25'):
    folder.part('dense')


def _cut(path):
  path.write_bytes(path.read_bytes()[:-5])


def _empty(path):
  np.save(path, np.load(path)[:0])


@pytest.mark.parametrize(
  ('name', 'damage', 'message'),
  [
    ('index.json', _cut, 'index.json'),
    ('index.json', lambda p: p.write_text('[]'), 'index.json'),
    ('index.json', lambda p: p.write_text('{"version": 9}'), 'version 9'),
    ('index.json', lambda p: p.write_text('{"version": 1}'), 'index.json'),
    ('passages.jsonl', _cut, 'passages.jsonl'),
    ('passages.jsonl', lambda p: p.write_bytes(b''), 'damaged'),
    ('offsets.npy', _cut, 'damaged'),
    ('offsets.npy', lambda p: np.save(p, 1.0), 'offsets.npy'),
    ('bm25/part.json', lambda p: p.unlink(), 'part.json'),
    ('bm25/vocab.index.json', _cut, 'damaged BM25'),
    ('bm25/indptr.csc.index.npy', lambda p: p.unlink(), 'damaged BM25'),
    ('bm25/params.index.json', lambda p: p.write_text('{}'), 'of None'),
    ('bm25/params.index.json', lambda p: p.write_text('[]'), 'damaged BM25'),
    ('bm25/data.csc.index.npy', _empty, 'damaged BM25'),
  ],
)
def test_damage_is_one_line(tmp_path, name, damage, message):
  folder = _create(tmp_path)
  _add(folder)
  damage(folder.path / name)
  with pytest.raises(ValueError, match=message) as error:
    _load(folder.path)
  assert '\n' not in str(error.value)
