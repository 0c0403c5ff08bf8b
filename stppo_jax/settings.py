"""Nested settings: their dotted keys, and rules for their values."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple


class Rule(NamedTuple):
  """A rule that a value must satisfy, and its description.

  Attributes:
    holds: function that returns whether a value satisfies the rule.
    allowed: the rule in words, to follow "must be".
  """

  holds: Callable[[Any], bool]
  allowed: str


def flatten(section: Any, prefix: str = '') -> dict[str, Any]:
  """Returns dotted key to value of all values in a section.

  Args:
    section: a mapping, or a ConfigDict (which is not a `Mapping`); some of its
      values may be such sections again.
    prefix: precedes every key.
  """
  flat = {}
  for key, value in section.items():
    if hasattr(value, 'items'):
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[f'{prefix}{key}'] = value
  return flat
