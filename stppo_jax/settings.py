"""Nested settings: their dotted keys, and rules that their values must keep."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple


class Rule(NamedTuple):
  """A rule that a value must keep, with its words.

  Attributes:
    holds: whether a value keeps the rule.
    allowed: the rule in words, to follow "must be".
  """

  holds: Callable[[Any], bool]
  allowed: str


def flatten(section: Any, prefix: str = '') -> dict[str, Any]:
  """Returns dotted key to value of all values in a section.

  Args:
    section: a mapping or a ConfigDict, which is none; some of its values may be
      such sections again.
    prefix: precedes every key.
  """
  flat = {}
  for key, value in section.items():
    if hasattr(value, 'items'):
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[f'{prefix}{key}'] = value
  return flat
