"""Shows trajectory records as text for a terminal.

The text of models and passages can contain anything, even commands to the
terminal. So every control character and every invisible character is shown as
an escape sequence.
"""

from collections.abc import Mapping, Sequence
import io
from typing import Any, TypeVar

import rich.console
import rich.text

from stppo_jax import streams

T = TypeVar('T')

# Role -> (style, mark at the start of each line). Without colours, only the
# marks show the roles.
_ROLES = {
  'question': ('bold', '?'),
  'prompt': ('dim', '.'),
  'policy': ('cyan', '>'),
  'observation': ('yellow', '<'),
  'outcome': ('bold green', '='),
  'failure': ('bold red', '='),
}
LEGEND = '  '.join(
  f'{mark} {role}' for role, (_, mark) in _ROLES.items() if role != 'failure'
)


def render(record: Mapping[str, Any], *, colour: bool) -> str:
  """Returns a dialogue as text; a mark before each line shows its role.

  Args:
    record: a record of `trajectory_metrics.record`.
    colour: whether to write ANSI colours. Marks are written in any case.

  Returns:
    Text without control characters other than line breaks and colours.
  """
  passages = [
    ('question', record['question']),
    ('question', 'golden: ' + ' | '.join(record['golden_answers'])),
    ('prompt', record['prompt']),
  ]
  for turn in record['turns']:
    passages.append(('policy', f'{turn["text"]}\n[{turn["action"]}]'))
    if turn['observation']:
      passages.append(('observation', turn['observation']))
  # A reward is a score times its weight. Rewards of 0 are left out, because
  # they say nothing.
  rewards = {name: x for name, x in record['rewards'].items() if x}
  total, terms = sum(rewards.values()), _numbers(rewards)
  outcome = f'{record["status"]}: {_numbers(record["scores"])}; '
  outcome += f'reward {total:.3g}' + (f' ({terms})' if terms else '')
  passages.append(('outcome' if total > 0 else 'failure', outcome))
  return _page(passages, colour=colour)


def _numbers(numbers: Mapping[str, float]) -> str:
  return ', '.join(f'{name} {x:.3g}' for name, x in numbers.items())


def render_reply(record: Mapping[str, Any], *, colour: bool) -> str:
  """Returns the reply of a policy to a question that a person has asked.

  Args:
    record: a record of `tools/evaluation.py`, which has the key `answer`.
    colour: whether to write ANSI colours. Marks are written in any case.

  Returns:
    The turns, the observations and the answer, escaped as in `render`.
  """
  passages = []
  for turn in record['turns']:
    passages.append(('policy', turn['text']))
    if turn['observation']:
      passages.append(('observation', turn['observation']))
  if record['answer'] is None:
    passages.append(('failure', f'no answer: {record["status"]}'))
  else:
    passages.append(('outcome', record['answer']))
  return _page(passages, colour=colour)


def _page(passages: Sequence[tuple[str, str]], *, colour: bool) -> str:
  """Returns the text of (role, text) pairs, with a mark before each line."""
  page = rich.text.Text()
  for role, text in passages:
    style, mark = _ROLES[role]
    for line in streams.escape(text).strip('\n').split('\n'):
      page.append(f'{mark} {line}'.rstrip() + '\n', style=style)
  if not colour:
    return page.plain
  file = io.StringIO()
  console = rich.console.Console(
    file=file,
    force_terminal=True,
    color_system='standard',
    highlight=False,
    no_color=False,
  )
  # Without `soft_wrap`, long lines would be broken, and the text after a break
  # would have no mark.
  console.print(page, end='', soft_wrap=True)
  return file.getvalue()


def spread(items: Sequence[T], count: int) -> Sequence[T]:
  """Returns at most `count` of the items, at equal distances."""
  return items[:: max(len(items) // max(count, 1), 1)][:count]
