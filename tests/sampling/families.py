"""Small tokenizers and chat templates of the kinds that families have.

Each template is a short one of the same kind as that of its family. Beside it,
`written` says in plain code what the template is to write.
"""

from collections.abc import Callable
import functools
import json
from typing import NamedTuple

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors
from tokenizers import trainers
import transformers

from stppo_jax import text as text_lib
from stppo_jax.envs import prompts
from tests.sampling import vocabularies

TAGS = text_lib.TAGS
_TEXTS = [
  prompts.BUILT_IN,
  'Who is it? It is the lake of the king, said the river to the tower.\n',
  '<think> the lake</think><search> a tower </search>\n\n<information>Doc 1(',
  'Title: x) a river\n</information>\n\n<answer> the king </answer>',
] * 4
_SPLIT = tokenizers.Regex(r' ?[A-Za-z]+|\d{1,3}| ?[^\sA-Za-z\d]+|\s+')
_DAY = '26 Jul 2024'  # of every prompt


class Family(NamedTuple):
  """A kind of tokenizer with a kind of template.

  Attributes:
    backend: a key of the table of backends.
    eos, bos: tokens that end and begin a text; '' = none.
    special: further special tokens; the first ends a turn.
    template: the chat template; '' = none.
    written: what it writes of a system text, a user's text and the choice of
      enable_thinking; a system text that it does not take is '' here.
    takes_system: whether it takes a system message.
    begins: whether the tokenizer itself puts `bos` before a text.
    rstrip: whether the special tokens swallow white space that follows them.
  """

  backend: str
  eos: str
  bos: str
  special: tuple[str, ...]
  template: str
  written: Callable[[str, str, str], str]
  takes_system: bool = True
  begins: bool = False
  rstrip: bool = False


def _qwen3(system: str, text: str, thinking: str) -> str:
  head = f'<|im_start|>system\n{system}<|im_end|>\n' if system else ''
  tail = '<think>\n\n</think>\n\n' if thinking == 'off' else ''
  return (
    f'{head}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n{tail}'
  )


def _qwen2(system: str, text: str, thinking: str) -> str:
  del thinking
  return _qwen3(system or 'You are a model.', text, '')


def _llama3(system: str, text: str, thinking: str) -> str:
  del thinking
  start, end = '<|start_header_id|>', '<|end_header_id|>\n\n'
  return (
    f'<|begin_of_text|>{start}system{end}Today Date: {_DAY}\n\n{system}'
    f'<|eot_id|>{start}user{end}{text.strip()}<|eot_id|>{start}assistant{end}'
  )


def _olmo2(system: str, text: str, thinking: str) -> str:
  del thinking
  head = f'<|system|>\n{system}\n' if system else ''
  return f'<|endoftext|>{head}<|user|>\n{text}\n<|assistant|>\n'


def _mistral(system: str, text: str, thinking: str) -> str:
  del system, thinking
  return f'<s>[INST] {text} [/INST]'


def _gemma(system: str, text: str, thinking: str) -> str:
  del thinking
  head = f'{system}\n\n' if system else ''
  return (
    f'<s><start_of_turn>user\n{head}{text.strip()}<end_of_turn>\n'
    '<start_of_turn>model\n'
  )


def _phi3(system: str, text: str, thinking: str) -> str:
  del thinking
  head = f'<|system|>\n{system}<|end|>\n' if system else ''
  return f'{head}<|user|>\n{text}<|end|>\n<|assistant|>\n'


def _base(system: str, text: str, thinking: str) -> str:
  del system, thinking
  return f'<s>{text}'


# Like that of Qwen3, it removes the thoughts of turns that are not the last.
_CHATML = (
  '{% for m in messages %}'
  "{% set said = m.content.split('</think>')[-1] if m.role == 'assistant' "
  'else m.content %}'
  '<|im_start|>{{ m.role }}\n{{ said }}<|im_end|>\n{% endfor %}'
  '{% if add_generation_prompt %}<|im_start|>assistant\n'
)
_QWEN3 = (
  '{% if tools %}<|im_start|>system\n# Tools{% for t in tools %}\n'
  '{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}'
  + _CHATML
  + '{% if enable_thinking is defined and enable_thinking is false %}'
  '<think>\n\n</think>\n\n{% endif %}{% endif %}'
)
_QWEN2 = (
  "{% if messages[0].role != 'system' %}<|im_start|>system\n"
  f'You are a model.<|im_end|>\n{{% endif %}}{_CHATML}{{% endif %}}'
)
_HEADER = '<|start_header_id|>{{ %s }}<|end_header_id|>\n\n'
_LLAMA3 = (
  "{% set has_system = messages[0].role == 'system' %}{{ bos_token }}"
  + _HEADER % "'system'"
  + 'Today Date: {{ strftime_now("%d %b %Y") }}\n\n'
  '{% if has_system %}{{ messages[0].content | trim }}{% endif %}<|eot_id|>'
  "{% for m in messages if m.role != 'system' %}"
  + _HEADER % 'm.role'
  + '{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}'
  + _HEADER % "'assistant'"
  + '{% endif %}'
)
_OLMO2 = (
  '{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n'
  '{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}'
)
_MISTRAL = (
  '{{ bos_token }}{% for m in messages %}'
  "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
  "{{ raise_exception('roles must alternate') }}{% endif %}"
  "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
  '{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}'
)
_GEMMA_TURNS = (
  '<start_of_turn>user\n{{ %s }}<end_of_turn>\n'
  '{%% if add_generation_prompt %%}<start_of_turn>model\n{%% endif %%}'
)
_GEMMA2 = (
  "{% if messages[0].role == 'system' %}"
  "{{ raise_exception('System role not supported') }}{% endif %}{{ bos_token }}"
  + _GEMMA_TURNS
  % 'messages[0].content | trim'
)
_GEMMA3 = (
  "{% set head = messages[0].content + '\n\n' if messages[0].role == 'system' "
  "else '' %}{{ bos_token }}"
  + _GEMMA_TURNS
  % 'head + messages[-1].content | trim'
)
_PHI3 = (
  '{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n'
  '{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}'
)

_QWEN_TOKENS = ('<|im_end|>', '<|im_start|>')
_GEMMA_TOKENS = ('<end_of_turn>', '<start_of_turn>')
_LLAMA_TOKENS = ('<|eot_id|>', '<|start_header_id|>', '<|end_header_id|>')
_PHI_TOKENS = ('<|end|>', '<|user|>', '<|assistant|>', '<|system|>')

FAMILIES = {
  'Qwen3': Family('nfc', '<|endoftext|>', '', _QWEN_TOKENS, _QWEN3, _qwen3),
  'Qwen2.5': Family('nfc', '<|endoftext|>', '', _QWEN_TOKENS, _QWEN2, _qwen2),
  'Llama 3': Family(
    *('bytes', '<|end_of_text|>', '<|begin_of_text|>', _LLAMA_TOKENS),
    *(_LLAMA3, _llama3),
    begins=True,  # and so does the template: a trap
  ),
  'OLMo 2': Family(
    'bytes', '<|endoftext|>', '<|endoftext|>', (), _OLMO2, _olmo2
  ),
  'Mistral': Family(
    *('prepend', '</s>', '<s>', (), _MISTRAL, _mistral),
    takes_system=False,
    begins=True,
  ),
  'Gemma 2': Family(
    *('plain', '</s>', '<s>', _GEMMA_TOKENS, _GEMMA2, _gemma),
    takes_system=False,
    begins=True,
  ),
  'Gemma 3': Family(
    *('plain', '</s>', '<s>', _GEMMA_TOKENS, _GEMMA3, _gemma), begins=True
  ),
  'Phi-3': Family(
    *('metaspace', '</s>', '<s>', _PHI_TOKENS, _PHI3, _phi3),
    begins=True,  # but the template writes none
    rstrip=True,
  ),
  'Llama 2, base': Family(
    *('prepend', '</s>', '<s>', (), '', _base), takes_system=False, begins=True
  ),
  'Mistral, base': Family(
    *('metaspace', '</s>', '<s>', (), '', _base),
    takes_system=False,
    begins=True,
  ),
}


@functools.cache
def _backend(name: str) -> str:
  """Returns a trained tokenizer, as the text of its file."""
  if name in ('nfc', 'bytes'):
    made = tokenizers.Tokenizer(models.BPE())
    if name == 'nfc':
      made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
      [
        pre_tokenizers.Split(_SPLIT, 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
      ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
      vocab_size=500,
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    )
    made.train_from_iterator(_TEXTS, trainer)
    return made.to_str()
  spaces = normalizers.Replace(' ', '▁')
  made = vocabularies.byte_fallback(
    _TEXTS,
    vocab_size=300,
    normalizer={
      'prepend': normalizers.Sequence([normalizers.Prepend('▁'), spaces]),
      'plain': spaces,
    }.get(name),
    pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme='first', split=False)
    if name == 'metaspace'
    else None,
    strip=name != 'plain',
  )
  return made.to_str()


def save(
  name: str, directory, *, added=(), special=(), template=None, **changes
) -> Family:
  """Writes the tokenizer of a family as `transformers` does; returns it.

  Args:
    name: the name of the family.
    directory: where the files are written.
    added: added tokens, such as tags.
    special: added tokens that are special, too.
    template: a chat template in place of the family's.
    **changes: fields of tokenizer_config.json that differ.
  """
  family = FAMILIES[name]
  backend = tokenizers.Tokenizer.from_str(_backend(family.backend))
  tokens = [family.eos, *filter(None, [family.bos]), *family.special]
  backend.add_special_tokens(
    [
      tokenizers.AddedToken(t, special=True, rstrip=family.rstrip)
      for t in tokens
    ]
  )
  backend.add_tokens(list(added))
  backend.add_special_tokens(list(special))
  backend.post_processor = processors.TemplateProcessing(
    single=f'{family.bos}:0 $A:0' if family.begins else '$A:0',
    pair='$A:0 $B:1',
    special_tokens=[(family.bos, backend.token_to_id(family.bos))]
    if family.begins
    else [],
  )
  backend.save(str(directory / 'tokenizer.json'))
  config = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'eos_token': family.eos,
    'bos_token': family.bos or None,
    'chat_template': family.template if template is None else template,
    **changes,
  }
  text = json.dumps(
    {k: v for k, v in config.items() if v is not None and v != ''}
  )
  (directory / 'tokenizer_config.json').write_text(text, encoding='utf-8')
  return family


def loaded(directory) -> transformers.PreTrainedTokenizerFast:
  """Returns the tokenizer of `transformers` in a directory."""
  return transformers.PreTrainedTokenizerFast.from_pretrained(directory)
