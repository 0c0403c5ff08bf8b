"""Makes the Markdown pages about the algorithms from their table.

Defaults, differences and choices are read from the table and from the options
of `rl/`; the descriptions are an argument. A test compares the files in `docs/`
with the pages that are made here, so they cannot disagree with the code.
"""

from collections.abc import Mapping
import re
import textwrap
from typing import Any

from stppo_jax import settings
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import estimator_needs
from stppo_jax.rl import options as options_lib

Algorithm = Mapping[str, Mapping[str, Any]]


def rules(algorithm: Algorithm) -> dict[str, options_lib.OptionRule]:
  """Returns the rule of every option of an algorithm, by its dotted key."""
  return dict(options_lib.rules(algorithm_lib.Algorithm, algorithm))


def choices() -> dict[str, list[str]]:
  """Returns the choices of every option that is a name, or several names.

  An option that several estimators have, such as `advantage.whiten`, has the
  choices of all of them.
  """
  result: dict[str, list[str]] = {}
  for key, rule in options_lib.rules(algorithm_lib.Algorithm):
    if rule.names:
      names = result.setdefault(key, [])
      names += [name for name in rule.names if name not in names]
  return result


def differences(algorithm: Algorithm, base: Algorithm) -> dict[str, Any]:
  """Returns the options in which an algorithm differs from another one.

  A section with another name is returned with all of its options.
  """
  changed = {}
  for kind, section in algorithm.items():
    other = settings.flatten(base[kind], f'{kind}.')
    named = 'name' in section and section['name'] != base[kind]['name']
    for key, value in settings.flatten(section, f'{kind}.').items():
      if named or other[key] != value:
        changed[key] = value
  return changed


def pages(
  table: Mapping[str, Algorithm],
  defaults: Mapping[str, Mapping[str, Mapping[str, Any]]],
  preference: Mapping[str, Any],
  texts: Any,
  sources: Any,
) -> dict[str, str]:
  """Returns the text of every page, by its path below `docs/`.

  Args:
    table: the algorithms; the first is the one that others are compared with.
    defaults: the default options of the choices, by kind and name.
    preference: the defaults of the preference losses.
    texts: the descriptions and the general paragraphs; see
      `docs/descriptions.py`.
    sources: the defaults of the sources; see `docs/sources.py`.

  Raises:
    KeyError: an algorithm or a choice is not described.
  """
  base = next(iter(table.values()))
  made = {'algorithms.md': _overview(table, preference, texts, sources)}
  for axis in texts.TITLES:
    made[_choices_path(axis)] = _choices_page(axis, base, defaults, texts)
  return {
    path: '\n\n'.join(text.strip('\n') for text in paragraphs) + '\n'
    for path, paragraphs in made.items()
  }


_NOTICE = '<!-- Made by `make docs` from configs/. Edits here are lost. -->'


def _choices_path(axis):
  return f'choices/{axis}.md'


def _overview(table, preference, texts, sources) -> list[str]:
  """Returns the paragraphs of the page of the algorithms."""
  base_name, base = next(iter(table.items()))
  paragraphs = [
    '# Algorithms',
    _NOTICE,
    texts.INTRODUCTION,
    '\n'.join(
      f'- [{title}]({_choices_path(axis)}): ' + _first_question(axis, texts)
      for axis, title in texts.TITLES.items()
    ),
    *_general(texts, 'Notation', 'How sure', "The paper's setting"),
    '## The algorithms',
    _summary(table, texts, sources),
  ]
  for name, algorithm in table.items():
    built = algorithm_lib.build_algorithm(algorithm)
    facts = {'Needs': f'{_needs(built)}.'}
    if name != base_name:
      differs = _settings(differences(algorithm, base)) or 'nothing'
      facts = {f'Differs from `{base_name}`': f'{differs}.', **facts}
    paragraphs += _entry(name, texts.ALGORITHMS[name], facts)
    if name in sources.SOURCES:
      paragraphs += _source(sources.SOURCES[name], sources.lines(name))
  paragraphs += _general(texts, 'Preference losses')
  numbers = {key: preference[key] for key in ('beta', 'alpha')}
  for name, text in texts.PREFERENCES.items():
    used = {key: x for key, x in numbers.items() if key in text.equation}
    paragraphs += _entry(name, text, {'Options': f'{_settings(used)}.'})
  return [*paragraphs, f'## Every option of `{base_name}`', _every_option(base)]


def _general(texts, *headings):
  """Returns some of the general paragraphs with their headings."""
  return [f'## {x}\n\n{texts.PARAGRAPHS[x]}' for x in headings]


def _choices_page(axis, base, defaults, texts) -> list[str]:
  """Returns the paragraphs of the page of one axis."""
  paragraphs = [f'# {texts.TITLES[axis]}', _NOTICE, texts.PARAGRAPHS['Choices']]
  for key, names in choices().items():
    if key.split('.')[0] == axis:
      paragraphs += [f'## {key}', texts.QUESTIONS[key]]
      for name in names:
        facts = _options(key, name, base, defaults)
        paragraphs += _entry(name, texts.CHOICES[key][name], facts)
  return paragraphs


def _first_question(axis, texts):
  return next(
    q for key, q in texts.QUESTIONS.items() if key.split('.')[0] == axis
  )


def _entry(name, text, facts):
  """Returns the heading, the equation and the list of facts of an entry."""
  bullets = {
    'Source': _linked(text.source),
    'How sure': text.sure,
    **facts,
    'When': text.when,
    'Elsewhere': text.elsewhere,
  }
  return [
    f'### `{name}`',
    f'```text\n{text.equation}\n```',
    '\n'.join(_bullet(key, x) for key, x in bullets.items()),
  ]


def _source(source, lines):
  """Returns the paragraph and the list of differences from a source."""
  where = f'The defaults of {_linked(source.where)} ({source.sure})'
  if not lines:
    return [_wrapped(f'{where} are ours too.')]
  return [
    _wrapped(f'{where} are ours too, apart from these points:'),
    '\n'.join(_wrapped(f'- {line}', subsequent_indent='  ') for line in lines),
  ]


def _bullet(key, text):
  return _wrapped(f'- **{key}:** {text}', subsequent_indent='  ')


def _wrapped(text, subsequent_indent=''):
  return textwrap.fill(
    text,
    width=79,
    subsequent_indent=subsequent_indent,
    break_long_words=False,
    break_on_hyphens=False,
  )


def _linked(text):
  """Returns the text with links for arXiv ids, none of which a line breaks."""
  return re.sub(
    r'\barXiv (\d{4}\.\d{5})', r'[arXiv:\1](https://arxiv.org/abs/\1)', text
  )


def _settings(flat):
  """Returns `key=value` for every option, as on the command line."""
  return ', '.join(f'`{key}={value}`' for key, value in flat.items())


def _options(key, name, base, defaults):
  """Returns the options of a choice, with their defaults."""
  kind, _, leaf = key.rpartition('.')
  if leaf == 'name':
    values = defaults[kind][name]
  elif leaf == 'names':
    values = base[kind][name]
  else:
    return {}
  return {'Options': f'{_settings(values)}.'} if values else {}


def _needs(built):
  needs = ['a value model' if built.uses_values else 'no value model']
  if built.advantage.name in estimator_needs.GROUPS:
    needs.append('several trajectories of a question')
  needs += [f'`{name}` in the loss' for name in sorted(built.needs)]
  return ', '.join(needs)


def _summary(table, texts, sources):
  """Returns the table of the algorithms, one line each."""
  parts = (*(kind for kind in texts.TITLES if kind != 'kl'), 'KL')
  head = ('algorithm', *parts, 'source', 'how sure', 'differs from source in')
  rows: list[tuple[str, ...]] = [head]
  for name, algorithm in table.items():
    ratio = [algorithm['ratio']['level']]
    if algorithm['ratio']['gradient'] == 'token':
      ratio.append('token gradient')
    if algorithm['ratio']['normalize'] != 'none':
      ratio.append(algorithm['ratio']['normalize'])
    kl = algorithm['kl']
    used = f'{kl["estimator"]} in the {kl["where"]}'
    cells = (
      f'`{name}`',
      ', '.join(ratio),
      algorithm['bounds']['name'],
      algorithm['objective']['name'],
      ', '.join(algorithm['correction']['names']) or 'none',
      algorithm['aggregate']['name'],
      algorithm['advantage']['name'],
      'none' if kl['where'] == 'nowhere' else used,
      *_provenance(name, texts.ALGORITHMS[name], texts, sources),
    )
    rows.append(cells)
  return _table(rows)


def _provenance(name, text, texts, sources):
  """Returns source, certainty and differing keys of an algorithm as cells."""
  paper = re.search(r'arXiv \d{4}\.\d{5}', text.source)
  sure = next(phrase for phrase in texts.SURE if text.sure.startswith(phrase))
  differing = '—'
  if name in sources.SOURCES:
    keys = [f'`{key.partition(".")[2]}`' for key in sources.differences(name)]
    differing = ', '.join(keys) or 'nothing'
  source = paper.group() if paper else text.source.rstrip('.')
  return _linked(source), sure.rstrip('.'), differing


def _every_option(base):
  """Returns the table of all options: key, default and allowed values."""
  rows = [('option', 'default', 'allowed')]
  rule_of_key = rules(base)
  for key, value in settings.flatten(base).items():
    rule = rule_of_key[key]
    if rule.names:
      allowed = ', '.join(f'`{name}`' for name in rule.names)
    else:
      allowed = rule.allowed
    rows.append((f'`{key}`', f'`{value}`', allowed))
  return _table(rows)


def _table(rows):
  head, *body = [f'| {" | ".join(row)} |' for row in rows]
  return '\n'.join([head, '|' + ' --- |' * len(rows[0]), *body])
