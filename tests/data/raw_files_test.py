"""The paragraphs that come with questions are written beside them."""

import json

import pytest

from stppo_jax import types
from stppo_jax.data import raw_files


def test_a_file_of_passages_is_that_of_the_last_build(tmp_path):
  path = tmp_path / 'set.corpus.jsonl'
  with raw_files.corpus_file(path) as keep:
    keep(types.Passage('p', 'Paris', 'In France.'))
    assert not path.exists()
  expected = {'pid': 'p', 'title': 'Paris', 'text': 'In France.'}
  assert json.loads(path.read_text('utf-8')) == expected
  with pytest.raises(KeyError), raw_files.corpus_file(path) as keep:
    keep(types.Passage('q', '', ''))
    raise KeyError
  assert json.loads(path.read_text('utf-8')) == expected
  with raw_files.corpus_file(path):
    pass  # its questions have no paragraphs
  assert list(tmp_path.iterdir()) == []
