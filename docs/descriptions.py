"""Reads the descriptions of every algorithm and of every choice.

The descriptions are Markdown files in `docs/texts`, with a section for each
algorithm or choice. A section has an indented equation and a list. The list
says where the equation is from, how well it is established, and when to use the
algorithm or choice. The generated pages take the descriptions from this module,
and the default options from the table of algorithms.
"""

import pathlib
import re
import textwrap
from typing import NamedTuple

FOLDER = pathlib.Path(__file__).parent / 'texts'
# The sections of an algorithm. The pages of their choices have this order, too.
AXES = (
  *('ratio', 'bounds', 'objective', 'correction', 'aggregate'),
  *('advantage', 'kl'),
)


class Description(NamedTuple):
  """The description of an algorithm or of a choice.

  Attributes:
    equation: plain text, shown as code. The equation of a choice contains the
      name of every option that is a number.
    source: the papers, with arXiv ids that become links, or the code.
    sure: how well the equation is established. The text begins with a key of
      `SURE`; further sentences may say what the key does not cover.
    when: when to use the algorithm or choice.
    elsewhere: the names that other codebases use, as far as they are certain.
  """

  equation: str
  source: str
  sure: str
  when: str
  elsewhere: str


def sections(text: str, mark: str) -> dict[str, str]:
  """Returns the text below each heading that begins with a mark such as `##`.

  If a heading has several names, such as `grpo, gspo`, each name gets the text.
  """
  _, *parts = re.split(rf'^{mark} (.+)\n', text, flags=re.MULTILINE)
  return {
    name: body.strip('\n')
    for heading, body in zip(parts[::2], parts[1::2], strict=True)
    for name in heading.split(', ')
  }


def bullets(text: str) -> dict[str, str]:
  """Returns the text of each item of a list, by the bold words at its start."""
  found = re.findall(
    r'^- \*\*(.+?):\*\*\s(.+?)(?=^- |\Z)', text, re.MULTILINE | re.DOTALL
  )
  return {key: ' '.join(words.split()) for key, words in found}


def read(name: str) -> str:
  """Returns the text of a file of descriptions."""
  return (FOLDER / f'{name}.md').read_text(encoding='utf-8')


def _described(text: str, mark: str) -> dict[str, Description]:
  """Returns the descriptions under the headings with a mark, by name."""
  described = {}
  for name, section in sections(text, mark).items():
    equation, _, _ = section.partition('\n\n- **')
    facts = {'Elsewhere': '—', **bullets(section)}
    missing = {'Source', 'How sure', 'When'} - facts.keys()
    if missing:
      raise ValueError(f'the description of {name} lacks {sorted(missing)}')
    described[name] = Description(
      textwrap.dedent(equation),
      facts['Source'],
      facts['How sure'],
      facts['When'],
      facts['Elsewhere'],
    )
  return described


# The general paragraphs of the pages.
INTRODUCTION = read('overview').partition('\n')[2].partition('\n## ')[0]
PARAGRAPHS = sections(read('overview'), '##')
# Phrase with which `sure` begins -> what this phrase means.
SURE = {
  f'{phrase}.': meaning
  for phrase, meaning in bullets(PARAGRAPHS['How sure']).items()
}
ALGORITHMS = _described(read('algorithms'), '##')
PREFERENCES = _described(read('preferences'), '##')
# Axis -> the title of its page.
TITLES = {axis: read(axis).partition('\n')[0][2:] for axis in AXES}
_OPTIONS = {
  key: section
  for axis in AXES
  for key, section in sections(read(axis), '##').items()
}
# Option whose value is a name -> the question that it answers.
QUESTIONS = {key: text.partition('\n')[0] for key, text in _OPTIONS.items()}
# Option -> its choices, described.
CHOICES = {key: _described(text, '###') for key, text in _OPTIONS.items()}
