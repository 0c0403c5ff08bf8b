"""The options of prompts; rollout/families_test.py has whole dialogues."""

import pytest

from stppo_jax.sampling import chat_template
from stppo_jax.sampling import tokenizer as tokenizer_lib
from tests.sampling import families

_TOOLS = [{'type': 'function', 'function': {'name': 'say'}}]


def _prompt(directory, family, *, template=None, given=(), **options):
  """Returns the prompt of a short text; `given` are the tools."""
  families.save(family, directory, template=template)
  tokenizer = tokenizer_lib.Tokenizer.load(directory)
  tokenizer = tokenizer.with_prompts(chat_template.Options(**options))
  return tokenizer.decode(tokenizer.encode_prompt('hm', tools=given))


@pytest.mark.parametrize('family', ['Llama 3', 'OLMo 2', 'Gemma 2'])
@pytest.mark.parametrize(('bos', 'count'), [('auto', 1), ('on', 1), ('off', 0)])
def test_a_prompt_never_begins_twice(family, bos, count, tmp_path):
  start = families.FAMILIES[family].bos
  template = '{{ bos_token }}' + families.FAMILIES[family].template
  text = _prompt(tmp_path, family, template=template, bos=bos)
  assert text.count(start) == count and text.startswith(start) == bool(count)


@pytest.mark.parametrize(
  ('family', 'bos', 'begins'),
  [
    ('Llama 2, base', 'auto', True),
    ('Llama 2, base', 'off', False),
    # A template decides, or there is no bos token.
    ('Llama 3', 'auto', False),
    ('Gemma 2', 'auto', False),
    ('Qwen3', 'auto', False),
  ],
)
def test_the_tokenizer_begins_a_text_without_a_template(
  family, bos, begins, tmp_path
):
  families.save(family, tmp_path)
  tokenizer = tokenizer_lib.Tokenizer.load(tmp_path)
  options = chat_template.Options(bos=bos)
  prompts = tokenizer.with_prompts(options).prompts
  assert prompts.begun_by_tokenizer == begins


def test_a_template_that_hides_the_format_of_the_day_is_refused(tmp_path):
  for call in ('(f)', "('%d' ~ '%Y')", '(format="%Y")', ' (f)'):
    clock = '{{ strftime_now' + call + ' }}'
    template = "{% set f = '%Y' %}" + clock + '{{ messages[0].content }}'
    with pytest.raises(ValueError, match='fails .* calls strftime_now with a'):
      _prompt(tmp_path, 'Qwen3', template=template)


def test_the_template_describes_tools_unless_told_otherwise(tmp_path):
  with_tools = _prompt(tmp_path, 'Qwen3', given=_TOOLS)
  assert '# Tools{"type": "function", "function": {"name"' in with_tools
  without = _prompt(tmp_path, 'Qwen3')
  assert without != with_tools and with_tools.endswith(without)
  off = _prompt(tmp_path, 'Qwen3', given=_TOOLS, tools=False)
  assert off == without


def test_a_system_text_must_be_written(tmp_path):
  # It is dropped beside tools only, which the first dialogue does not have.
  template = (
    "{% for m in messages if not tools or m.role == 'user' %}{{ m.content }}"
    '{% endfor %}'
  )
  options = {'template': template, 'system': 'Be brief.'}
  text = _prompt(tmp_path, 'Qwen3', **options)
  assert text == 'Be brief.hm'
  with pytest.raises(ValueError, match='leaves out the text of the system '):
    _prompt(tmp_path, 'Qwen3', given=_TOOLS, **options)
