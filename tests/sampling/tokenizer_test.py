"""Text in and out, and foreign text that forges nothing."""

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


def _with_added(*literals, special=()):
  """A byte-level tokenizer with added vocabulary entries."""
  fast = vocabularies.bpe()._fast
  fast = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer.from_str(
      fast.backend_tokenizer.to_str()
    ),
    eos_token='<|im_end|>',
  )
  fast.add_tokens(list(literals))
  fast.add_special_tokens({'extra_special_tokens': list(special)})
  return tokenizer_lib.Tokenizer(fast)


@given(_ASCII)
def test_ascii_comes_back_from_phrases(text):
  tokenizer = vocabularies.phrases()
  text = text.replace(tokenizer_lib.END_OF_TEXT, '').replace('<unk>', '')
  assert tokenizer.decode(tokenizer.encode_text(text)) == text


@given(st.text())
def test_any_text_comes_back_from_bytes(text):
  tokenizer = vocabularies.bpe()
  text = text.replace(tokenizer_lib.END_OF_TEXT, '')
  assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_phrases_are_single_tokens():
  tokenizer = vocabularies.phrases()
  for phrase in ('</search>', '\n\n<information>', ' the', 'Doc 3(Title:'):
    assert len(tokenizer.encode_text(phrase)) == 1
  assert len(tokenizer.encode_text('<think> the of</think>')) == 4
  # However short the phrase is.
  assert (
    len(
      tokenizer_lib.phrase_tokenizer(prompts.phrases(['xy'])).encode_text('xy')
    )
    == 1
  )
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


def test_what_is_no_tokenizer_is_refused(tmp_path):
  with pytest.raises(ValueError, match=f'no tokenizer.json in {tmp_path}'):
    tokenizer_lib.Tokenizer.load(tmp_path)
  backend = tokenizers.Tokenizer(models.BPE())
  backend.save(str(tmp_path / 'tokenizer.json'))
  with pytest.raises(ValueError, match='names no eos_token'):
    tokenizer_lib.Tokenizer.load(tmp_path)


def test_a_prompt_goes_through_the_chat_template():
  tokenizer = _with_added(special=['<|im_start|>'])
  fast = tokenizer._fast
  fast.chat_template = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}:{{ m['content'] }}"
    '<|im_end|>{% endfor %}{% if add_generation_prompt %}go{% endif %}'
  )
  ids = tokenizer.encode_prompt('why?')
  assert tokenizer.decode(ids) == '<|im_start|>user:why?<|im_end|>go'
  start, end = fast.convert_tokens_to_ids(['<|im_start|>', '<|im_end|>'])
  assert ids[0] == start and end in ids  # here they are meant


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
  tokenizer = _with_added('</search>', special=['</answer>'])
  token_bytes = tokenizer.token_bytes()
  for tag in ('</search>', '</answer>', '<|im_end|>'):
    token_id = tokenizer._fast.convert_tokens_to_ids(tag)
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


# Literals that meet, nest, repeat a character, hold the first choice of a gap
# or are as short as they can be.
_LITERAL_SETS = (
  (('<tool>', '</tool>'), ('<|im_start|>',)),
  (('ab', 'a b', 'abab'), ()),
  (('aa', '  ', '   '), ('\n\n',)),
  (('a', '<'), ()),
  ((' ', '.', '-'), ('_',)),
)


@pytest.mark.parametrize(('added', 'special'), _LITERAL_SETS)
def test_foreign_text_never_yields_an_added_token(added, special):
  tokenizer = _with_added(*added, special=special)
  literals = sorted(tokenizer.added_literals)
  assert {*added, *special, '<|im_end|>'} <= set(literals)
  forgeable = set(tokenizer._fast.convert_tokens_to_ids(literals))
  assert len(forgeable) == len(literals)
  # Pieces of literals, and literals inside literals.
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
  tokenizer = _with_added(*' .-_~^')
  with pytest.raises(ValueError, match='is in some added token'):
    tokenizer.encode_text('anything')
