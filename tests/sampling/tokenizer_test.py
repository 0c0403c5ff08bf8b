"""Tokenizers keep all text, and foreign text never yields an added token."""

import functools
import pathlib
import tempfile

from hypothesis import given
from hypothesis import strategies as st
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers import models
import transformers

from stppo_jax.envs import prompts
from stppo_jax.sampling import tokenizer as tokenizer_lib
from tests.sampling import vocabularies

_MAKERS = {'phrases': vocabularies.phrases, 'bpe': vocabularies.bpe}
_ASCII = st.text(st.characters(min_codepoint=32, max_codepoint=126))


@functools.cache
def _saved_bpe():
  """Returns the file of a byte-level tokenizer, as text."""
  with tempfile.TemporaryDirectory() as directory:
    vocabularies.bpe().save(directory)
    return (pathlib.Path(directory) / 'tokenizer.json').read_text()


def _with_added(*literals, special=(), chat_template=None):
  """Returns a byte-level tokenizer with added tokens, some of them special."""
  fast = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer.from_str(_saved_bpe()),
    eos_token='<|im_end|>',
    chat_template=chat_template,
  )
  fast.add_tokens(list(literals))
  fast.add_special_tokens({'extra_special_tokens': list(special)})
  return tokenizer_lib.Tokenizer(fast), fast.convert_tokens_to_ids


@given(_ASCII)
def test_phrases_keep_all_ascii(text):
  tokenizer = vocabularies.phrases()
  text = text.replace(tokenizer_lib.END_OF_TEXT, '').replace('<unk>', '')
  assert tokenizer.decode(tokenizer.encode_text(text)) == text


@given(st.text())
def test_a_byte_level_tokenizer_keeps_all_text(text):
  tokenizer = vocabularies.bpe()
  text = text.replace(tokenizer_lib.END_OF_TEXT, '')
  assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_phrases_are_single_tokens():
  tokenizer = vocabularies.phrases()
  for phrase in ('</search>', '\n\n<information>', ' the', 'Doc 3(Title:'):
    assert len(tokenizer.encode_text(phrase)) == 1
  assert len(tokenizer.encode_text('<think> the of</think>')) == 4
  # However short the phrase is.
  short = tokenizer_lib.phrase_tokenizer(prompts.phrases(['xy']))
  assert len(short.encode_text('xy')) == 1
  assert len(vocabularies.bpe().encode_text('</search>')) > 1


@pytest.mark.parametrize('name', _MAKERS)
def test_a_saved_tokenizer_is_the_same(name, tmp_path):
  tokenizer = _MAKERS[name]()
  tokenizer.save(tmp_path)
  again = tokenizer_lib.Tokenizer.load(tmp_path)
  assert again.eos_id == tokenizer.eos_id
  assert again.vocab_size == tokenizer.vocab_size
  assert again.added_literals == tokenizer.added_literals
  assert again.token_bytes() == tokenizer.token_bytes()
  text = '<think> the of\n</think><search> a [b] </search>'
  ids = tokenizer.encode_text(text)
  assert again.encode_text(text).tolist() == ids.tolist()
  assert again.decode(ids) == text


def test_directories_without_a_tokenizer_are_refused(tmp_path):
  with pytest.raises(ValueError, match=f'no tokenizer.json in {tmp_path}'):
    tokenizer_lib.Tokenizer.load(tmp_path)
  backend = tokenizers.Tokenizer(models.BPE())
  backend.save(str(tmp_path / 'tokenizer.json'))
  with pytest.raises(ValueError, match='names no eos_token'):
    tokenizer_lib.Tokenizer.load(tmp_path)


def test_a_prompt_goes_through_the_chat_template():
  tokenizer, ids_of = _with_added(
    special=['<|im_start|>'],
    chat_template=(
      "{% for m in messages %}<|im_start|>{{ m['role'] }}:{{ m['content'] }}"
      '<|im_end|>{% endfor %}{% if add_generation_prompt %}go{% endif %}'
    ),
  )
  ids = tokenizer.encode_prompt('why?')
  assert tokenizer.decode(ids) == '<|im_start|>user:why?<|im_end|>go'
  start, end = ids_of(['<|im_start|>', '<|im_end|>'])
  assert ids[0] == start and end in ids  # the template may use added tokens


@given(st.data())
@pytest.mark.parametrize('name', _MAKERS)
def test_the_bytes_of_tokens_are_the_text(name, data):
  tokenizer = _MAKERS[name]()
  token_bytes = tokenizer.token_bytes()
  assert len(token_bytes) == tokenizer.vocab_size
  ids = data.draw(
    st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20)
  )
  joined = b''.join(token_bytes[token_id] for token_id in ids)
  assert joined.decode(errors='replace') == tokenizer.decode(ids)


def test_the_bytes_of_added_tokens_are_their_text():
  # A checkpoint whose tags are (special) tokens must still stop at them.
  tokenizer, ids_of = _with_added('</search>', special=['</answer>'])
  token_bytes = tokenizer.token_bytes()
  for tag in ('</search>', '</answer>', '<|im_end|>'):
    token_id = ids_of(tag)
    assert token_bytes[token_id] == tag.encode()
    assert tokenizer.decode([token_id]) == tag


def test_a_decoder_that_edits_text_is_refused():
  backend = tokenizers.Tokenizer(models.WordPiece({'a': 0, '##b': 1}))
  backend.decoder = decoders.WordPiece()
  fast = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, eos_token='e', unk_token='u'
  )
  with pytest.raises(ValueError, match="unsupported decoder 'WordPiece'"):
    tokenizer_lib.Tokenizer(fast).token_bytes()


# Literals that touch, nest, repeat a character, contain the first choice of a
# gap or are as short as possible.
_LITERAL_SETS = (
  (('<tool>', '</tool>'), ('<|im_start|>',)),
  (('ab', 'a b', 'abab'), ()),
  (('aa', '  ', '   '), ('\n\n',)),
  (('a', '<'), ()),
  ((' ', '.', '-'), ('_',)),
)


@pytest.mark.parametrize(('added', 'special'), _LITERAL_SETS)
def test_foreign_text_never_yields_an_added_token(added, special):
  tokenizer, ids_of = _with_added(*added, special=special)
  literals = sorted(tokenizer.added_literals)
  assert {*added, *special, '<|im_end|>'} <= set(literals)
  forgeable = set(ids_of(literals))
  assert len(forgeable) == len(literals)
  # Text from pieces of literals, then literals inside literals.
  pieces = {literal[:n] for literal in literals for n in range(1, 12)}
  pieces |= {literal[n:] for literal in literals for n in range(1, 12)} - {''}

  @given(st.lists(st.one_of(st.sampled_from(sorted(pieces)), st.text('x <'))))
  def forge_nothing(parts):
    text = ''.join(parts)
    ids = set(tokenizer.encode_text(text).tolist())
    assert not ids & forgeable
    if not any(literal in text for literal in literals):
      assert tokenizer.decode(tokenizer.encode_text(text)) == text

  forge_nothing()
  for outer in literals:
    for inner in literals:
      for n in range(len(outer) + 1):
        ids = tokenizer.encode_text(outer[:n] + inner + outer[n:])
        assert not set(ids.tolist()) & forgeable


def test_literals_that_leave_no_gap_are_refused():
  tokenizer, _ = _with_added(*' .-_~^')
  with pytest.raises(ValueError, match='is in some added token'):
    tokenizer.encode_text('anything')
