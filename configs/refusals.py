"""Makes relations, which are rules that concern several keys of a config.

A relation is a tuple of keys, and a function of their values that yields
errors, one line each.
"""

from collections.abc import Callable, Iterator

Relation = tuple[tuple[str, ...], Callable[..., Iterator[str]]]


def refuse(*keys: str, when: Callable[..., object], because: str) -> Relation:
  """Returns a relation that refuses some combinations of values.

  Args:
    *keys: the keys. An error begins with the first key and its value.
    when: a function that takes the values and returns whether to refuse them.
    because: the rest of the error, in which {1} is the value of the second key.
  """

  def relation(*values) -> Iterator[str]:
    if when(*values):
      yield f'{keys[0]}={values[0]}: {because.format(*values)}'

  return keys, relation


def is_multiple(key: str, of: str) -> Relation:
  """Returns the relation that one key must be a multiple of another key."""
  return refuse(
    key,
    of,
    when=lambda number, divisor: number % divisor,
    because=f'must be a multiple of {of}={{1}}',
  )
