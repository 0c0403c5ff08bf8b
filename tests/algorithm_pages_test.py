"""The pages in docs are those made from the table, and complete."""

import copy
import re

from docs import algorithm_pages
from docs import descriptions as texts
from docs import make_algorithms
from docs import sources
from stppo_jax import settings
from stppo_jax.configs import algorithms
from stppo_jax.configs import defaults
from stppo_jax.rl import preferences

_PAGES = {
  path.relative_to(make_algorithms.FOLDER).as_posix(): path.read_text('utf-8')
  for path in (
    make_algorithms.FOLDER / 'algorithms.md',
    *(make_algorithms.FOLDER / 'choices').glob('*.md'),
  )
}
_OVERVIEW = _PAGES['algorithms.md']
_CORRECTIONS = 'correction.names'


def _pages(table=algorithms.ALGORITHMS, texts=texts):
  return algorithm_pages.pages(
    table,
    defaults.DEFAULTS,
    {'name': 'tdpo2', 'beta': 0.1, 'alpha': 0.5},
    texts,
    sources,
  )


def _entry(name, text=_OVERVIEW, heading='###'):
  """Returns the text under a heading of a page."""
  return text.split(f'\n{heading} {name}\n')[1].split('\n##')[0]


def _choices(key):
  """Returns the section of an option on the page of its axis."""
  page = _PAGES[f'choices/{key.split(".")[0]}.md']
  return page.split(f'\n## {key}\n')[1].split('\n## ')[0]


def _bullet(key, entry):
  """Returns the text of a bullet without line breaks."""
  (found,) = re.findall(
    rf'^- \*\*{re.escape(key)}:\*\* (.*?)(?=\n- |\n*\Z)', entry, re.M | re.S
  )
  return ' '.join(found.split())


def _settings(flat):
  return ', '.join(f'`{key}={value}`' for key, value in flat.items()) + '.'


def test_the_pages_are_made_from_the_table():
  made = make_algorithms.pages()
  found = {make_algorithms.FOLDER / path: text for path, text in _PAGES.items()}
  assert found == made, 'out of date: make docs'


def test_every_algorithm_and_choice_has_a_description():
  assert list(texts.ALGORITHMS) == list(algorithms.ALGORITHMS)
  assert list(texts.PREFERENCES) == list(preferences.PREFERENCES)
  described = {key: list(names) for key, names in texts.CHOICES.items()}
  assert described == algorithm_pages.choices()
  assert all(q.endswith('?') for q in texts.QUESTIONS.values())


def _all_texts():
  yield from texts.ALGORITHMS.items()
  yield from texts.PREFERENCES.items()
  for key, choices in texts.CHOICES.items():
    for name, text in choices.items():
      yield f'{key}={name}', text


def test_every_entry_says_how_sure_and_says_something():
  for name, text in _all_texts():
    assert text.sure.startswith(tuple(texts.SURE)), name
    assert all(text) and len(text.equation) > 5, name
    assert text.when.endswith('.') and text.sure.endswith('.'), name
    assert max(map(len, text.equation.splitlines())) <= 79, name
    # Every id of arXiv becomes a link.
    ids = re.findall(r'arXiv:? ?(\S+)', text.source)
    assert all(re.match(r'\d{4}\.\d{5}\b', x) for x in ids), name


def test_options_of_a_choice_are_those_of_the_table():
  corrections = algorithms.ALGORITHMS['token_ppo']['correction']
  of_names = {name: corrections[name] for name in texts.CHOICES[_CORRECTIONS]}
  tables = {f'{kind}.name': table for kind, table in defaults.DEFAULTS.items()}
  for key, table in (tables | {_CORRECTIONS: of_names}).items():
    for name, options in table.items():
      entry = _entry(f'`{name}`', _choices(key))
      if options:
        assert _bullet('Options', entry) == _settings(options)
      else:
        assert '**Options' not in entry
      # An equation names every number of its options.
      for option, value in options.items():
        if not isinstance(value, str | tuple):
          equation = texts.CHOICES[key][name].equation
          assert re.search(rf'\b{option}\b', equation), (key, name, option)


def _summary():
  """Returns the cells of the table of algorithms, by name and column."""
  head, _, *lines = _entry('The algorithms', heading='##').strip().splitlines()
  cells = lambda line: [cell.strip() for cell in line.strip('|').split(' | ')]
  columns = cells(head)
  rows = [dict(zip(columns, cells(line), strict=True)) for line in lines]
  return {row['algorithm'].strip('`'): row for row in rows}


def test_the_table_says_where_an_algorithm_is_from_and_how_it_differs():
  summary = _summary()
  assert list(summary) == list(algorithms.ALGORITHMS)
  for name, row in summary.items():
    sure = f'{row["how sure"]}.'
    assert texts.ALGORITHMS[name].sure.startswith(sure) and sure in texts.SURE
    if name in sources.SOURCES:
      keys = sources.differences(name)
      listed = row['differs from source in'].split(', ')
      assert len(listed) == max(len(keys), 1), name
    else:
      assert row['differs from source in'] == '—'
  assert summary['atpo']['source'] == (
    '[arXiv:2601.04767](https://arxiv.org/abs/2601.04767)'
  )
  assert summary['dppo_kl']['differs from source in'] == (
    '`objective.cap`, `group_size`, `entropy_coefficient`'
  )
  assert summary['so_grpo']['differs from source in'] == 'nothing'


def test_allowed_values_follow_the_rule_of_the_chosen_option():
  algorithm = copy.deepcopy(algorithms.ALGORITHMS['token_ppo'])
  algorithm['objective'] = defaults.choice('objective', 'dual_clip')
  rules = algorithm_pages.rules(algorithm)
  assert list(rules) == list(settings.flatten(algorithm))
  assert not rules['objective.c'].holds(1.0) and rules['objective.c'].holds(1.1)
  assert rules['advantage.whiten'].names == ('none', 'policy', 'all')
  table = _entry('Every option of `token_ppo`', heading='##')
  assert '| `bounds.clip_low` | `0.2` | a finite number >= 0 |' in table
  assert '| `kl.controller` | `fixed` | `fixed`, `adaptive` |' in table


def test_an_entry_lists_the_options_that_differ():
  base = algorithms.ALGORITHMS['token_ppo']
  assert algorithm_pages.differences(base, base) == {}
  assert _bullet('Differs from `token_ppo`', _entry('`st_ppo`')) == (
    "`ratio.level=turn`, `correction.names=('clipping_bias',)`."
  )
  # Of another choice all options are listed, those with equal values too.
  for name, bounds in {'bapo': 'balanced', 'sspo': 'entropy_scaled'}.items():
    listed = _bullet('Differs from `token_ppo`', _entry(f'`{name}`'))
    for key, value in defaults.DEFAULTS['bounds'][bounds].items():
      assert f'`bounds.{key}={value}`' in listed
  assert 'Differs' not in _entry('`token_ppo`')
  twice = dict(algorithms.ALGORITHMS, so_ppo=base)
  entry = _entry('`so_ppo`', _pages(twice)['algorithms.md'])
  assert _bullet('Differs from `token_ppo`', entry) == 'nothing.'


def test_an_entry_lists_the_needs_of_its_algorithm():
  assert _bullet('Needs', _entry('`st_ppo`')) == 'a value model.'
  assert _bullet('Needs', _entry('`reinforce`')) == 'no value model.'
  assert _bullet('Needs', _entry('`sspo`')) == (
    'no value model, several trajectories of a question, `entropy_BL` in the '
    'loss, `sentence_ids_BL` in the loss.'
  )


def test_every_difference_from_a_source_is_a_line():
  for name, source in sources.SOURCES.items():
    entry = ' '.join(_entry(f'`{name}`').split())
    lines = sources.lines(name)
    assert len(lines) >= len(sources.differences(name))
    for line in lines:
      assert f'- {line}' in entry
    assert f'({source.sure}) are ours' in entry
