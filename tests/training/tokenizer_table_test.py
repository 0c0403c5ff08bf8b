"""Tokenizers: those that a run takes, and why it refuses the others.

No directory has a weight, so each answer is given before one is read.
"""

import json
from typing import NamedTuple

import pytest

from stppo_jax.configs import base
from stppo_jax.training import model_files
from tests.sampling import families


class Row(NamedTuple):
  """A tokenizer with options of a run.

  Attributes:
    family: the family whose tokenizer is written.
    edit: changes the files, if anything.
    line: a part of the line that refuses it; '' = it is taken.
    saved: the arguments of `families.save`.
    changes: config key to value.
  """

  family: str
  edit: object = None
  line: str = ''
  saved: dict = {}
  changes: dict = {}


def _file(directory):
  return directory / 'tokenizer.json'


def _json(change):
  """Returns a change of tokenizer.json."""

  def edit(directory):
    path = _file(directory)
    content = json.loads(path.read_text('utf-8'))
    change(content)
    path.write_text(json.dumps(content), encoding='utf-8')

  return edit


def _set(**fields):
  return _json(lambda content: content.update(fields))


def _template(text, **row):
  """Returns a row with another template."""
  return Row('Qwen3', saved={'template': text}, **row)


def _moved(directory):
  """Moves the template to a file of its own."""
  path = directory / 'tokenizer_config.json'
  content = json.loads(path.read_text())
  text = content.pop('chat_template')
  path.write_text(json.dumps(content))
  (directory / 'chat_template.jinja').write_text(text)


def _raw_character(content):
  vocab = content['model']['vocab']
  vocab['日'] = vocab.pop('Z')


def _without_a_letter(content):
  """Leaves no token for the letter W."""
  model = content['model']
  model['byte_fallback'] = False
  model['vocab'] = {t: n for t, n in model['vocab'].items() if 'W' not in t}
  model['merges'] = [x for x in model['merges'] if 'W' not in ''.join(x)]


def _only(*names):
  """Returns the files' template under these names, as some models have it."""
  text = families.FAMILIES['Qwen3'].template
  return [{'name': name, 'template': text} for name in names]


_SYSTEM = {'prompt.system': 'Be brief.'}
_THINKS = {'prompt.enable_thinking': 'off'}
_TURNS = '{% for m in messages %}'
_SAYS = _TURNS + '{{ m.role }}: {{ m.content }}\n{% endfor %}'
_NEEDS_SYSTEM = (
  "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}"
  f'{{% endif %}}{_SAYS}'
)
_CUT = {'max_length': 3, 'stride': 0, 'strategy': 'LongestFirst'}
_CUT['direction'] = 'Right'
_TAKEN = {
  **{name: Row(name) for name in families.FAMILIES},
  'tags are tokens': Row('Qwen3', saved={'added': families.TAGS}),
  'tags are special tokens': Row('Gemma 3', saved={'special': families.TAGS}),
  'no system role, but a system text': Row('Gemma 2', changes=_SYSTEM),
  'thinks or not': Row('Qwen3', changes=_THINKS),
  'the template is a file': Row('Qwen3', edit=_moved),
  'two templates': _template(_only('default', 'tool_use')),
  'a turn is marked as generated': _template(
    f'{_SAYS}{{% generation %}}{{% endgeneration %}}'
  ),
  'a template that opens <think>': _template(f'{_SAYS}<think>\n'),
  'needs a system text': _template(_NEEDS_SYSTEM, changes=_SYSTEM),
  'cut and padded': Row(
    'Mistral',
    edit=_set(truncation=_CUT, padding=None),
  ),
}
_LOSES_LETTERS = "gives the prompt 'Which word comes next?' back as "
_NO_BRACKETS = {'type': 'Replace', 'pattern': {'String': '<'}, 'content': ''}
_EDITS = {'type': 'WordPiece', 'prefix': '##', 'cleanup': True}
_REFUSED = {
  'only tokenizer.model': Row(
    'Mistral',
    lambda at: _file(at).rename(at / 'tokenizer.model'),
    'no tokenizer.json in ',
  ),
  'a damaged file': Row(
    'Mistral',
    lambda at: _file(at).write_text('{"version": '),
    'its tokenizer cannot be read (',
  ),
  'no end token': Row(
    'Qwen3', line=' names no eos_token', saved={'eos_token': None}
  ),
  'a decoder that edits': Row(
    'Mistral', _set(decoder=_EDITS), "unsupported decoder 'WordPiece'"
  ),
  'lower case': Row(
    'Qwen3', _set(normalizer={'type': 'Lowercase'}), _LOSES_LETTERS
  ),
  'loses brackets': _template(
    _SAYS, edit=_set(normalizer=_NO_BRACKETS), line='gives the dialogue '
  ),
  'a raw character': Row(
    'Qwen3', _json(_raw_character), 'has a character that no byte-'
  ),
  'an unknown letter': Row('Mistral', _json(_without_a_letter), _LOSES_LETTERS),
  'no gap': Row(
    'Qwen3',
    line='occurs in an added token',
    saved={'added': list(' .-_~^')},
  ),
  'no such end token': Row(
    'Qwen3',
    line='the end token 10000 must be smaller than ',
    changes={'model.eos_token_ids': (10_000,)},
  ),
  'a template with an error': _template('{% for m in %}', line='SyntaxError'),
  'a template that refuses': _template(
    "{{ raise_exception('no') }}", line='fails (TemplateError: no)'
  ),
  'changes the user': _template(
    f'{_TURNS}{{{{ m.content | upper }}}}{{% endfor %}}',
    line='leaves out the text of the user message',
  ),
  'no default template': _template(_only('rag', 'tool_use'), line='fails ('),
  'always thinks': Row(
    'Llama 3', None, "prompt.enable_thinking=off: must be 'auto'", {}, _THINKS
  ),
  'has no begin token': Row(
    'Qwen3',
    line='prompt.bos=on: the tokenizer names no bos_token',
    changes={'prompt.bos': 'on'},
  ),
}


def _check(directory, row):
  families.save(row.family, directory, **row.saved)
  if row.edit is not None:
    row.edit(directory)
  config = base.get_config()
  config.update_from_flattened_dict(
    {'model.tokenizer_path': str(directory), **row.changes}
  )
  tokenizer = model_files.build_tokenizer(config, None)
  model_files.check(config, tokenizer)
  return tokenizer


@pytest.mark.parametrize('name', _TAKEN)
def test_a_tokenizer_is_taken(name, tmp_path):
  tokenizer = _check(tmp_path, _TAKEN[name])
  text = tokenizer.decode(tokenizer.encode_prompt('Who is it?'))
  assert 'Who is it?' in text


@pytest.mark.parametrize('name', _REFUSED)
def test_a_tokenizer_is_refused_in_one_line(name, tmp_path):
  with pytest.raises(ValueError) as caught:
    _check(tmp_path, _REFUSED[name])
  line = str(caught.value)
  assert _REFUSED[name].line in line and '\n' not in line
  assert str(tmp_path) in line or line.startswith('model.eos_token_ids')
