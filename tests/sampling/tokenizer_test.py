"""Tokenizers keep all text, and foreign text never yields an added token."""

import json
import random
import tempfile

from hypothesis import given
from hypothesis import strategies as st
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
import transformers

from stppo_jax import text as text_lib
from stppo_jax.envs import actions
from stppo_jax.envs import prompts
from stppo_jax.models.hf import families
from stppo_jax.sampling import tokenizer as tokenizer_lib
from tests.sampling import vocabularies

_MAKERS = {'phrases': vocabularies.phrases, 'bpe': vocabularies.bpe}
_TAGS = text_lib.TAGS
_TAGGED = {
  'a token for each tag': lambda: vocabularies.with_added(_TAGS),
  'a special token for each tag': lambda: vocabularies.with_added(
    special=_TAGS
  ),
  'Qwen3': lambda: vocabularies.with_added(['<think>', '</think>']),
  'Llama 2': vocabularies.llama,
  'Gemma': lambda: vocabularies.llama(strip=False),
}
_ASCII = st.text(st.characters(min_codepoint=32, max_codepoint=126))


def _with_added(*literals, special=(), chat_template=None):
  """Returns a byte-level tokenizer with added tokens, and how to find ids."""
  tokenizer = vocabularies.with_added(
    literals, special=special, chat_template=chat_template
  )
  with tempfile.TemporaryDirectory() as directory:
    tokenizer.save(directory)
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
  return tokenizer, fast.convert_tokens_to_ids


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


def _random_ids(tokenizer, rng):
  """Returns random ids, with tokens of single bytes (3 to 258) among them."""
  ids = []
  for _ in range(rng.randrange(1, 9)):
    kind = rng.random()
    if kind < 0.1:
      ids += [3 + byte for byte in rng.choice('日é\n').encode()]
    elif kind < 0.15:
      ids.append(rng.randrange(3, 259))
    else:
      ids.append(rng.choice([0, 1, 2, *range(259, tokenizer.vocab_size)]))
  return ids


@pytest.mark.parametrize('name', ['Llama 2', 'Gemma'])
def test_the_text_is_that_of_transformers(name, tmp_path):
  tokenizer = _TAGGED[name]()
  tokenizer.save(tmp_path)
  reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  rng, num_equal = random.Random(0), 0
  for _ in range(10_000):
    ids = _random_ids(tokenizer, rng)
    ours = b''.join(tokenizer.token_bytes()[i] for i in ids)
    theirs = reference.decode(ids)
    try:
      text = ours.decode()
    except UnicodeDecodeError:
      assert '\ufffd' in theirs  # they replace all bytes in a row, we the wrong
      continue
    num_equal += 1
    assert tokenizer.decode(ids) == text
    if name == 'Llama 2' and text.startswith(' '):
      text = text[1:]  # which is in front of whole texts, not of turns
    assert theirs == text
  assert num_equal > 8_000


@pytest.mark.parametrize('name', _TAGGED)
def test_a_dialogue_comes_back_as_it_was_written(name):
  tokenizer = _TAGGED[name]()
  turn = '<think> é 日 x</think><search> a [b] </search>'
  for text in (turn, '\n\n<information>', '</information>\n\n', 'Doc 1: a'):
    assert tokenizer.decode(tokenizer.encode_text(text, tags=_TAGS)) == text
  assert actions.parse_action(turn) == actions.Action('search', 'a [b]')


@pytest.mark.parametrize('name', list(_TAGGED)[:3])
def test_tags_are_encoded_as_the_tokenizer_would(name, tmp_path):
  tokenizer = _TAGGED[name]()
  tokenizer.save(tmp_path)
  reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  text = '<think> x</think><search> the of</search>'
  ids = tokenizer.encode_text(text, tags=_TAGS).tolist()
  assert ids == reference.encode(text, add_special_tokens=False)
  assert reference.convert_tokens_to_ids('<think>') == ids[0]
  # Other literals are broken up also beside tags, and tags in foreign text.
  ids = tokenizer.encode_text('<think><|im_end|>', tags=_TAGS)
  assert tokenizer.decode(ids) == '<think>< |im_end|>'
  assert tokenizer.decode(tokenizer.encode_text('<think>')) == '< think>'


def test_a_lookalike_that_is_normalised_to_a_literal_is_dropped():
  backend = tokenizers.Tokenizer(models.BPE({'a': 0, 'x': 1}, []))
  backend.normalizer = normalizers.NFKC()
  backend.decoder = decoders.Fuse()
  fast = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, eos_token='<e>'
  )
  fast.add_tokens([tokenizers.AddedToken('<t>', normalized=True)])
  tokenizer = tokenizer_lib.Tokenizer(fast)
  assert tokenizer.decode(tokenizer.encode_text('a＜t＞x')) == 'ax'


@pytest.mark.parametrize('trusting', [False, True])
@pytest.mark.parametrize('name', [*_MAKERS, 'Llama 2'])
@pytest.mark.parametrize('model_type', families.FAMILIES)
def test_auto_tokenizer_reads_what_a_run_writes(
  name, model_type, trusting, tmp_path
):
  tokenizer = (_MAKERS | _TAGGED)[name]()
  tokenizer.save(tmp_path)
  (tmp_path / 'config.json').write_text(json.dumps({'model_type': model_type}))
  auto = transformers.AutoTokenizer.from_pretrained(
    tmp_path, trust_remote_code=trusting
  )
  for text in ('<think> the of</think>\n', 'Doc 12(Title: é)', "it's 1234 "):
    ids = auto.encode(text, add_special_tokens=False)
    if name != 'Llama 2':  # which puts a space in front of whole texts
      assert ids == tokenizer.encode_text(text).tolist()
    assert ids == tokenizer.encode_prompt(text).tolist()
  assert auto.eos_token_id == tokenizer.eos_id
  assert len(auto) == tokenizer.vocab_size


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
