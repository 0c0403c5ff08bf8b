"""A trajectory record as text that a person can read in a terminal.

Model and passage text can hold anything, terminal commands too; every
control or invisible character is shown as its escape.
"""

from collections.abc import Mapping
import io
import sys
from typing import Any
from typing import TextIO
import unicodedata

import rich.console
import rich.text

# Role -> (style, mark at the start of each line). The marks carry the roles
# where there is no colour.
_ROLES = {
  'question': ('bold', '?'),
  'prompt': ('dim', '.'),
  'policy': ('cyan', '>'),
  'observation': ('yellow', '<'),
  'outcome': ('bold green', '='),
  'failure': ('bold red', '='),
}
# Control, invisible (bidirectional overrides!), surrogates, private use,
# line and paragraph separators.
_HIDDEN = ('Cc', 'Cf', 'Cs', 'Co', 'Cn', 'Zl', 'Zp')


def escape(text: str) -> str:
  """The text with all but line breaks of the unprintable as escapes."""
  return ''.join(
    char
    if char == '\n' or unicodedata.category(char) not in _HIDDEN
    else char.encode('unicode_escape', 'surrogatepass').decode()
    for char in text
  )


def render(record: Mapping[str, Any], *, colour: bool) -> str:
  """The dialogue, a block for each role.

  Args:
    record: question, golden_answers, prompt, turns (each with text,
      observation, action), rewards (name to number) and status.
    colour: whether to write ANSI colours; roles have marks in any case.

  Returns:
    Text without any control character but line breaks (and colours).
  """
  blocks = [
    ('question', record['question']),
    ('question', 'golden: ' + ' | '.join(record['golden_answers'])),
    ('prompt', record['prompt']),
  ]
  for turn in record['turns']:
    blocks.append(('policy', f'{turn["text"]}\n[{turn["action"]}]'))
    if turn['observation']:
      blocks.append(('observation', turn['observation']))
  rewards = record['rewards']
  parts = ', '.join(f'{name} {value:.3g}' for name, value in rewards.items())
  outcome = f'{record["status"]}: reward {sum(rewards.values()):.3g} ({parts})'
  blocks.append(
    ('outcome' if sum(rewards.values()) > 0 else 'failure', outcome)
  )
  page = rich.text.Text()
  for role, text in blocks:
    style, mark = _ROLES[role]
    for line in escape(text).strip('\n').split('\n'):
      page.append(f'{mark} {line}'.rstrip() + '\n', style=style)
  return _ansi(page) if colour else page.plain


def show(record: Mapping[str, Any], stream: TextIO = sys.stdout) -> None:
  """Prints the dialogue, in colour where the stream is a terminal."""
  stream.write(render(record, colour=stream.isatty()) + '\n')


def _ansi(page: rich.text.Text) -> str:
  console = rich.console.Console(
    file=io.StringIO(),
    force_terminal=True,
    color_system='standard',
    highlight=False,
    no_color=False,
  )
  console.print(page, end='', soft_wrap=True)
  return console.file.getvalue()
