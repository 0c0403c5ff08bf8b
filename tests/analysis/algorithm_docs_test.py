"""docs/algorithms.md is what the table makes of it, and nothing is missing."""

import copy
import importlib.util
import inspect
import pathlib
import re

import pytest

from docs import texts
from stppo_jax import settings
from stppo_jax.analysis import algorithm_docs
from stppo_jax.configs import algorithms
from stppo_jax.rl import preferences

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_FILE = _ROOT / 'docs' / 'algorithms.md'


def _maker():
  """docs/make_algorithms.py, which is in no package."""
  path = _FILE.with_name('make_algorithms.py')
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _markdown(rows=algorithms.ALGORITHMS, texts=texts):
  return algorithm_docs.markdown(
    rows,
    algorithms.BLOCKS,
    algorithms.GROUP_ADVANTAGES,
    {'name': 'tdpo2', 'beta': 0.1, 'alpha': 0.5},
    texts,
  )


def _entry(name, text=None, heading='###'):
  """What the document says under a heading, up to the next one."""
  text = _FILE.read_text(encoding='utf-8') if text is None else text
  return text.split(f'\n{heading} {name}\n')[1].split('\n##')[0]


def _bullet(key, entry):
  """The text of a bullet, its line breaks undone."""
  (found,) = re.findall(
    rf'^- \*\*{re.escape(key)}:\*\* (.*?)(?=\n- |\n*\Z)', entry, re.M | re.S
  )
  return ' '.join(found.split())


def _as_told(flat):
  return ', '.join(f'`{key}={value}`' for key, value in flat.items()) + '.'


def test_the_document_is_what_the_table_makes():
  there = _FILE.read_text(encoding='utf-8')
  assert there == _maker().text(), 'out of date: make docs'


def test_every_row_has_a_description_and_the_other_way_round():
  assert list(texts.ROWS) == list(algorithms.ALGORITHMS)
  assert list(texts.PREFERENCES) == list(preferences.PREFERENCES)


def test_every_choice_has_a_description_and_the_other_way_round():
  told = {key: list(choices) for key, choices in texts.CHOICES.items()}
  assert told == algorithm_docs.choices()
  assert list(algorithm_docs.QUESTIONS) == list(algorithm_docs.choices())


@pytest.mark.parametrize('missing', ['row', 'choice'])
def test_what_is_not_described_is_an_error(missing):
  rows = dict(algorithms.ALGORITHMS)
  changed = copy.copy(texts.__dict__)
  if missing == 'row':
    rows['mine'] = rows['st_ppo']
  else:
    changed['CHOICES'] = copy.deepcopy(texts.CHOICES)
    del changed['CHOICES']['bounds.name']['fixed']
  namespace = type('Texts', (), changed)
  with pytest.raises(KeyError, match='mine' if missing == 'row' else 'fixed'):
    _markdown(rows, namespace)


def _all_texts():
  yield from texts.ROWS.items()
  yield from texts.PREFERENCES.items()
  for key, choices in texts.CHOICES.items():
    for name, text in choices.items():
      yield f'{key}={name}', text


def test_every_entry_says_how_sure_and_says_something():
  for name, text in _all_texts():
    assert text.sure.startswith(tuple(texts.SURE)), name
    assert all(text) and len(text.equation) > 5, name
    assert text.when.endswith('.') and text.sure.endswith('.'), name
    widest = max(map(len, inspect.cleandoc(text.equation).splitlines()))
    assert widest <= 79, name


def test_every_arxiv_id_becomes_a_link():
  for name, text in _all_texts():
    ids = re.findall(r'arXiv:? ?(\S+)', text.source)
    assert all(re.match(r'\d{4}\.\d{5}\b', x) for x in ids), name


def test_equations_name_every_number_of_their_block():
  for kind, blocks in algorithms.BLOCKS.items():
    for name, options in blocks.items():
      equation = texts.CHOICES[f'{kind}.name'][name].equation
      for key, value in options.items():
        if not isinstance(value, str):
          assert re.search(rf'\b{key}\b', equation), (kind, name, key)
  corrections = algorithms.ALGORITHMS['token_ppo']['correction']
  for name, text in texts.CHOICES['correction.names'].items():
    for key, value in corrections[name].items():
      if not isinstance(value, str | tuple):
        assert re.search(rf'\b{key}\b', text.equation), (name, key)


@pytest.mark.parametrize('kind', algorithms.BLOCKS)
def test_options_of_a_choice_are_those_of_the_table(kind):
  section = _FILE.read_text(encoding='utf-8').split(f'\n### {kind}.name\n')[1]
  section = section.split('\n### ')[0]
  for name, options in algorithms.BLOCKS[kind].items():
    entry = _entry(f'`{name}`', section, '####')
    if options:
      assert _bullet('Options', entry) == _as_told(options)
    else:
      assert '**Options' not in entry


def test_options_of_a_correction_are_those_of_the_table():
  section = _FILE.read_text(encoding='utf-8').split('\n### correction.names\n')
  section = section[1].split('\n### ')[0]
  options = algorithms.ALGORITHMS['token_ppo']['correction']
  for name in texts.CHOICES['correction.names']:
    entry = _entry(f'`{name}`', section, '####')
    assert _bullet('Options', entry) == _as_told(options[name])


def test_every_default_is_that_of_the_table():
  table = _entry('Every option of `token_ppo`', heading='##')
  told = dict(re.findall(r'^\| `(\S+)` \| `(.*?)` \|', table, re.M))
  flat = settings.flatten(algorithms.ALGORITHMS['token_ppo'])
  assert told == {key: str(value) for key, value in flat.items()}


def test_what_is_allowed_is_the_rule_of_the_row_s_own_block():
  row = copy.deepcopy(algorithms.ALGORITHMS['token_ppo'])
  row['objective'] = algorithms.block('objective', 'dual_clip')
  rules = algorithm_docs.rules(row)
  assert list(rules) == list(settings.flatten(row))
  assert rules['objective.c'].problem(1.0) == 'must be a finite number > 1'
  assert rules['advantage.whiten'].names == ('none', 'policy', 'all')
  table = _entry('Every option of `token_ppo`', heading='##')
  assert '| `bounds.clip_low` | `0.2` | a finite number >= 0 |' in table
  assert '| `kl.controller` | `fixed` | `fixed`, `adaptive` |' in table


def test_a_row_tells_what_differs():
  base = algorithms.ALGORITHMS['token_ppo']
  assert algorithm_docs.differences(base, base) == {}
  assert _bullet('Differs from `token_ppo`', _entry('`st_ppo`')) == (
    "`ratio.level=turn`, `correction.names=('clipping_bias',)`."
  )
  # Of another block all options, those too that are as in the first row.
  for row, bounds in {'bapo': 'balanced', 'sspo': 'entropy_scaled'}.items():
    told = _bullet('Differs from `token_ppo`', _entry(f'`{row}`'))
    for key, value in algorithms.BLOCKS['bounds'][bounds].items():
      assert f'`bounds.{key}={value}`' in told
  assert 'Differs' not in _entry('`token_ppo`')
  twice = dict(algorithms.ALGORITHMS, so_ppo=base)
  entry = _entry('`so_ppo`', _markdown(twice))
  assert _bullet('Differs from `token_ppo`', entry) == 'nothing.'


def test_a_changed_default_changes_the_document():
  rows = copy.deepcopy(algorithms.ALGORITHMS)
  assert _markdown(rows) == _FILE.read_text(encoding='utf-8')
  rows['token_ppo']['kl']['coefficient'] = 0.007
  changed = _markdown(rows)
  assert '| `kl.coefficient` | `0.007` |' in changed
  # All other rows differ in it now.
  assert changed.count('`kl.coefficient=0.001`') == len(rows) - 1


def test_what_a_row_needs():
  assert _bullet('Needs', _entry('`st_ppo`')) == 'a value model.'
  assert _bullet('Needs', _entry('`reinforce`')) == 'no value model.'
  assert _bullet('Needs', _entry('`sspo`')) == (
    'no value model, several trajectories of a question, `sentence_ids_BL` in '
    'the loss.'
  )


def test_options_of_the_preference_losses():
  assert _bullet('Options', _entry('`tdpo1`')) == '`beta=0.1`.'
  assert _bullet('Options', _entry('`tdpo2`')) == '`beta=0.1`, `alpha=0.5`.'
