"""The document of the algorithms: from the table to Markdown.

Defaults, differences and choices are read from the table and from the option
blocks of `rl/`; the words come from outside. So the document cannot disagree
with the code: a test compares the file with what is made here.
"""

from collections.abc import Mapping
import inspect
import re
import textwrap
from typing import Any

from stppo_jax import settings
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import options

Row = Mapping[str, Mapping[str, Any]]

# What each key of a choice asks; the document's order.
QUESTIONS = {
  'ratio.level': 'Which tokens share one ratio?',
  'ratio.gradient': 'Where does its gradient go?',
  'ratio.reduce': 'How does a segment become one number?',
  'ratio.normalize': 'What is done to the log-ratio before?',
  'bounds.name': 'What interval of the ratio is trusted?',
  'objective.name': 'What happens outside it?',
  'correction.names': 'How much is each term believed? Several multiply.',
  'correction.clipping_bias.norm': 'What is measured and divided?',
  'correction.clipping_bias.scope': 'Over what is rho formed?',
  'correction.clipping_bias.level': 'Which ratio is w?',
  'correction.clipping_bias.applies_to': 'Which losses are scaled?',
  'correction.tis.level': 'What is k the ratio of?',
  'correction.tis.truncated': 'What is truncated?',
  'correction.mis.level': 'What is k the ratio of?',
  'aggregate.name': 'How do tokens become a scalar?',
  'advantage.name': 'How good was what the policy did?',
  'advantage.steps': 'What is a step of GAE?',
  'advantage.observation_tokens': 'Are observations steps?',
  'advantage.whiten': 'Over which tokens are advantages whitened?',
  'advantage.normalize': 'What are differences divided by?',
  'kl.where': 'Where does the divergence from the reference enter?',
  'kl.estimator': 'How is it estimated?',
  'kl.controller': 'Who sets its coefficient?',
}


def rules(row: Row) -> dict[str, Any]:
  """Every option of a row to its rule."""
  return dict(options.rules(algorithm_lib.Algorithm, row))


def choices() -> dict[str, list[str]]:
  """Every option that is a name, or names, to its choices.

  Blocks of one kind share their keys: `advantage.whiten` is of all estimators.
  """
  found: dict[str, list[str]] = {}
  for key, rule in options.rules(algorithm_lib.Algorithm):
    if hasattr(rule, 'names'):
      names = found.setdefault(key, [])
      names += [name for name in rule.names if name not in names]
  return found


def differences(row: Row, base: Row) -> dict[str, Any]:
  """The leaves of a row that differ from those of another.

  Of a block with another name all options are given.
  """
  changed = {}
  for kind, block in row.items():
    other = settings.flatten(base[kind], f'{kind}.')
    named = 'name' in block and block['name'] != base[kind]['name']
    for key, value in settings.flatten(block, f'{kind}.').items():
      if named or other[key] != value:
        changed[key] = value
  return changed


def markdown(
  rows: Mapping[str, Row],
  blocks: Mapping[str, Mapping[str, Mapping[str, Any]]],
  groups: frozenset[str],
  preference: Mapping[str, Any],
  texts: Any,
) -> str:
  """The whole document.

  Args:
    rows: the table, the row that others are compared with first.
    blocks: the defaults of named blocks, by kind and name.
    groups: the advantage estimators that compare trajectories.
    preference: the defaults of the preference losses.
    texts: has `ROWS`, `PREFERENCES` and `CHOICES` of descriptions, `SURE` and
      `PREAMBLE`; see `docs/texts`.

  Raises:
    KeyError: a row or a choice is not described.
  """
  base_name, *_ = rows
  base = rows[base_name]
  parts = [
    '# Algorithms',
    '<!-- Made by `make docs` from configs/. Edits here are lost. -->',
    texts.PREAMBLE.INTRODUCTION,
    '## Notation',
    texts.PREAMBLE.NOTATION,
    '## How sure',
    texts.PREAMBLE.HOW_SURE,
    '\n'.join(_bullet(phrase[:-1], x) for phrase, x in texts.SURE.items()),
    "## The paper's setting",
    *map(_wrapped, _linked(texts.PREAMBLE.PAPER_SETTING).split('\n\n')),
    '## The rows',
    _summary(rows),
  ]
  for name, row in rows.items():
    built = algorithm_lib.build_algorithm(row)
    facts = {'Needs': f'{_needs(built, groups)}.'}
    if name != base_name:
      differs = _settings(differences(row, base)) or 'nothing'
      facts = {f'Differs from `{base_name}`': f'{differs}.', **facts}
    parts += _entry(name, texts.ROWS[name], facts)
  parts += [
    '## Preference losses',
    'Offline, on pairs of trajectories, by `python -m stppo_jax prefer`. The\n'
    'options are keys under `--config.preference.`.',
  ]
  numbers = {key: preference[key] for key in ('beta', 'alpha')}
  for name, text in texts.PREFERENCES.items():
    used = {key: x for key, x in numbers.items() if key in text.equation}
    parts += _entry(name, text, {'Options': f'{_settings(used)}.'})
  parts += ['## The choices', 'Every option of a row that is a name.']
  for key, question in QUESTIONS.items():
    parts += [f'### {key}', question]
    for name in choices()[key]:
      facts = _options(key, name, base, blocks)
      parts += _entry(name, texts.CHOICES[key][name], facts, level=4)
  parts += [f'## Every option of `{base_name}`', _every_option(base)]
  return '\n\n'.join(part.strip('\n') for part in parts) + '\n'


def _entry(name, text, facts, *, level=3):
  """Heading, equation and the list of what there is to know."""
  bullets = {
    'Source': _linked(text.source),
    'How sure': text.sure,
    **facts,
    'When': text.when,
    'Elsewhere': text.elsewhere,
  }
  return [
    f'{"#" * level} `{name}`',
    f'```text\n{inspect.cleandoc(text.equation)}\n```',
    '\n'.join(_bullet(key, x) for key, x in bullets.items()),
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
  """`arXiv 2511.20718` as a link, without the space, where lines break."""
  return re.sub(
    r'\barXiv (\d{4}\.\d{5})', r'[arXiv:\1](https://arxiv.org/abs/\1)', text
  )


def _settings(flat):
  """`key=value`, as on the command line."""
  return ', '.join(f'`{key}={value}`' for key, value in flat.items())


def _options(key, name, base, blocks):
  """The numbers that a choice brings, with their defaults."""
  kind, _, leaf = key.rpartition('.')
  if leaf == 'name':
    values = blocks[kind][name]
  elif leaf == 'names':
    values = base[kind][name]
  else:
    return {}
  return {'Options': f'{_settings(values)}.'} if values else {}


def _needs(built, groups):
  estimator = built.advantage.name
  needs = ['a value model' if built.uses_values else 'no value model']
  if estimator in groups:
    needs.append('several trajectories of a question')
  needs += [f'`{name}` in the loss' for name in sorted(built.needs)]
  return ', '.join(needs)


def _summary(rows):
  """One line a row."""
  lines = [
    '| row | ratio | bounds | objective | correction | aggregate | advantage '
    '| KL |',
    '| --- | --- | --- | --- | --- | --- | --- | --- |',
  ]
  for name, row in rows.items():
    ratio = [row['ratio']['level']]
    if row['ratio']['gradient'] == 'token':
      ratio.append('token gradient')
    if row['ratio']['normalize'] != 'none':
      ratio.append(row['ratio']['normalize'])
    kl = row['kl']
    used = f'{kl["estimator"]} in the {kl["where"]}'
    cells = [
      f'`{name}`',
      ', '.join(ratio),
      row['bounds']['name'],
      row['objective']['name'],
      ', '.join(row['correction']['names']) or 'none',
      row['aggregate']['name'],
      row['advantage']['name'],
      'none' if kl['where'] == 'nowhere' else used,
    ]
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join(lines)


def _every_option(base):
  """Key, default and what is allowed."""
  lines = ['| option | default | allowed |', '| --- | --- | --- |']
  known = rules(base)
  for key, value in settings.flatten(base).items():
    if hasattr(known[key], 'names'):
      allowed = ', '.join(f'`{name}`' for name in known[key].names)
    else:
      allowed = known[key].problem(None).removeprefix('must be ')
    lines.append(f'| `{key}` | `{value}` | {allowed} |')
  return '\n'.join(lines)
