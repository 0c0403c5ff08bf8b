"""Both shapes of a passage, and errors that name file and line."""

import json

from hypothesis import given
from hypothesis import strategies as st
import pytest

from stppo_jax import types
from stppo_jax.data import passages


def _write(tmp_path, *lines):
  path = tmp_path / 'corpus.jsonl'
  path.write_text('\n'.join(lines) + '\n', encoding='utf-8')
  return path


def test_reads_both_shapes(tmp_path):
  path = _write(
    tmp_path,
    '{"id": "0", "contents": "\\"A Title\\"\\nfirst\\nsecond"}',
    '',
    '{"pid": "p1", "title": "B", "text": "body"}',
    '{"id": 7, "title": "C", "text": ""}',
  )
  assert passages.read_corpus(path) == [
    types.Passage('0', 'A Title', 'first\nsecond'),
    types.Passage('p1', 'B', 'body'),
    types.Passage('7', 'C', ''),
  ]


@pytest.mark.parametrize(
  ('contents', 'title', 'text'),
  [
    ('"T"\nbody', 'T', 'body'),
    ('T\nbody', 'T', 'body'),
    ('"The "Big" One"\nbody', 'The "Big" One', 'body'),
    ('"\nbody', '"', 'body'),
    ('a single line', '', 'a single line'),
  ],
)
def test_contents(contents, title, text):
  passage = passages.passage_of({'id': 'x', 'contents': contents})
  assert (passage.title, passage.text) == (title, text)


@given(
  st.text('a"\n \u2028', max_size=8),
  st.text('aé\U0001f600"\r\n\t', max_size=20),
)
def test_documents_round_trip(title, text):
  passage = types.Passage('i', title, text)
  read = passages.passage_of(
    json.loads(json.dumps(passages.document_of(passage)))
  )
  assert read.text == text
  assert read.title == ' '.join(title.splitlines())


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('{"id": "1"', 'delimiter'),
    ('[1]', '[1]'),
    ('{"id": "1"}', '"contents"'),
    ('{"id": "1", "contents": "\\ud800"}', 'not Unicode'),
    ('{"id": "1", "contents": 3}', '"contents": expected a string, got 3'),
    ('{"id": true, "contents": "a"}', '"id": expected a string, got True'),
    ('{"contents": "a"}', '"pid"'),
    ('{"id": "0", "contents": "a"}', "duplicate id '0', first at "),
    ('{"id": "1", "title": "a"}', '"contents"'),
  ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
  path = _write(tmp_path, '{"id": "0", "contents": "a"}', line)
  with pytest.raises(ValueError) as error:
    passages.read_corpus(path)
  assert str(error.value).startswith(f'{path}:2: ')
  assert message in str(error.value)
  assert '\n' not in str(error.value)
