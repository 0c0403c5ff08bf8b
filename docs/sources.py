"""Reads the defaults of the sources of the algorithms, and why ours differ.

`docs/texts/sources.md` has a table for each algorithm: what its paper or its
code uses where `ALGORITHMS` and `base.py` have a default. Every default that
differs has a reason there, and is a line of `docs/algorithms.md`. An algorithm
without a table is our version of its method, with no source to compare with.
"""

import ast
from collections.abc import Mapping
import re
from typing import Any, NamedTuple

from docs import descriptions
from stppo_jax import settings
from stppo_jax.configs import base


class Source(NamedTuple):
  """The values that a source uses.

  Attributes:
    where: the paper, or the file of its code.
    sure: how the values are known.
    values: what the source says, by the key of the config.
    why: for every key whose default differs, why it does.
    notes: differences that no key expresses, as sentences.
  """

  where: str
  sure: str
  values: Mapping[str, Any]
  why: Mapping[str, str]
  notes: tuple[str, ...]


def _source(text: str) -> Source:
  """Returns the source that a section describes."""
  provenance, _, rest = text.partition('\n\n')
  where, _, sure = ' '.join(provenance.split()).rpartition(' (')
  rows = re.findall(r'^\| `(.+?)` \| `(.+?)` \| (.*?) ?\|$', rest, re.MULTILINE)
  notes = re.findall(r'^- (.+?)(?=^- |\Z)', rest, re.MULTILINE | re.DOTALL)
  return Source(
    where,
    sure.rstrip(')'),
    {key: _value(value) for key, value, _ in rows},
    {key: reason for key, _, reason in rows if reason},
    tuple(' '.join(note.split()) for note in notes),
  )


def _value(text: str) -> Any:
  """Returns a number, or the text if it is a name."""
  try:
    return ast.literal_eval(text)
  except ValueError:
    return text


SOURCES = {
  name: _source(text)
  for name, text in descriptions.sections(
    descriptions.read('sources'), '##'
  ).items()
}


def differences(name: str) -> dict[str, tuple[Any, Any]]:
  """Returns the keys of an algorithm that differ from its source.

  Each key has our value and the value of the source.
  """
  ours = settings.flatten(base.get_config(name))
  return {
    key: (ours.get(key), theirs)
    for key, theirs in SOURCES[name].values.items()
    if ours.get(key) != theirs
  }


def lines(name: str) -> list[str]:
  """Returns a sentence or two about each of these differences.

  Raises:
    KeyError: a difference has no reason.
  """
  source = SOURCES[name]
  compared = [
    f'`{key}` is `{_text(ours)}` here and `{_text(theirs)}` there. '
    f'{source.why[key]}'
    for key, (ours, theirs) in differences(name).items()
  ]
  return [*compared, *source.notes]


def _text(value: Any) -> str:
  return f'{value:g}' if isinstance(value, float) else str(value)
