"""No secret stays in a text, however it is quoted, and nothing else goes."""

import json

import pytest

from stppo_jax.records import scrubbing


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('run --token abc -x', 'run --token *** -x'),
    ('run --token "a b c" -x', 'run --token *** -x'),
    ("run --token 'a b c' -x", 'run --token *** -x'),
    ('run --token="a\\"bc" -x', 'run --token=*** -x'),
    ('sh -c "run --token \\"abc\\" -x"', 'sh -c "run --token *** -x"'),
    ("sh -c 'run --token abc'", "sh -c 'run --token ***'"),
    ('run --token "abc', 'run --token ***'),
    ('OPENAI_KEY=abc run -x', 'OPENAI_KEY=*** run -x'),
    ('http://host/?key=abc&n=1', 'http://host/?key=***&n=1'),
    ('http://me:abc@host/', 'http://***@host/'),
    (
      'curl -H "Authorization: Bearer abc" http://host',
      'curl -H "Authorization: Bearer ***" http://host',
    ),
    (
      "curl -H 'Authorization: abc' --bearer",
      "curl -H 'Authorization: ***' --bearer",
    ),
    ('a/tokenizer of the keys, n=1', 'a/tokenizer of the keys, n=1'),
  ],
)
def test_a_secret_goes_whatever_its_quotes(text, expected):
  assert scrubbing.scrubbed(text) == expected


def test_values_keep_their_shape_and_can_be_written():
  values = {
    'tools': {'servers': ('run --token "abc" -x', 'run -x'), 'limit': 3},
    'paths': ['a', None],
  }
  scrubbed = scrubbing.scrubbed_values(values)
  assert scrubbed == {
    'tools': {'servers': ('run --token *** -x', 'run -x'), 'limit': 3},
    'paths': ['a', None],
  }
  assert 'abc' not in json.dumps(scrubbed)
