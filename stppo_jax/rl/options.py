"""Rules of option blocks: what a row of data may hold, checked all at once.

A block is a dataclass whose fields are made by `choice`, `choices`, `number`
or `nested`; the fields' names are the options' names. Numbers become leaves
of the pytree, names become static metadata.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import math
import numbers
import typing

Block = typing.Any  # a dataclass, or a dict: name -> dataclass


@dataclasses.dataclass(frozen=True)
class _Choice:
  """One of some names."""

  names: tuple[str, ...]

  def problem(self, value) -> str | None:
    if isinstance(value, str) and value in self.names:
      return None
    return 'must be one of ' + ', '.join(self.names)

  def build(self, value):
    return str(value)


@dataclasses.dataclass(frozen=True)
class _Choices:
  """Some of some names, each at most once."""

  names: tuple[str, ...]
  at_least: int

  def problem(self, value) -> str | None:
    if (
      isinstance(value, (tuple, list))
      and all(isinstance(v, str) and v in self.names for v in value)
      and len(set(value)) == len(value) >= self.at_least
    ):
      return None
    few = 'any' if not self.at_least else f'at least {self.at_least}'
    return f'must be a tuple of {few} of ' + ', '.join(self.names)

  def build(self, value):
    return tuple(str(v) for v in value)


@dataclasses.dataclass(frozen=True)
class _Number:
  """A number in an interval."""

  above: float | None
  at_most: float
  infinite: bool

  def problem(self, value) -> str | None:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
      low_enough = value <= self.at_most
      high_enough = value >= 0 if self.above is None else value > self.above
      finite = self.infinite or math.isfinite(value)
      if low_enough and high_enough and finite:  # nan is neither
        return None
    kind = 'a number' if self.infinite else 'a finite number'
    least = '>= 0' if self.above is None else f'> {self.above:g}'
    most = f' and <= {self.at_most:g}' if self.at_most < math.inf else ''
    infinite = ' (inf is allowed)' if self.infinite else ''
    return f'must be {kind} {least}{most}{infinite}'

  def build(self, value):
    return float(value)


def _static(rule):
  return dataclasses.field(metadata={'static': True, 'rule': rule})


def choice(names: Iterable[str]) -> typing.Any:
  """A field that holds one of these names (the keys of a table)."""
  return _static(_Choice(tuple(names)))


def choices(names: Iterable[str], *, at_least: int = 0) -> typing.Any:
  """A field that holds some of these names, each at most once."""
  return _static(_Choices(tuple(names), at_least))


def number(
  *,
  above: float | None = None,
  at_most: float = math.inf,
  infinite: bool = False,
) -> typing.Any:
  """A field that holds a number >= 0, or > `above` where that is given."""
  return dataclasses.field(metadata={'rule': _Number(above, at_most, infinite)})


def nested(block: Block) -> typing.Any:
  """A field that holds another block."""
  return dataclasses.field(metadata={'block': block})


def _is_mapping(value):
  # A ConfigDict speaks like a Mapping without being one.
  return isinstance(value, Mapping) or (
    hasattr(value, 'keys') and hasattr(value, '__getitem__')
  )


def _chosen(block: Block, values) -> type | None:
  """The dataclass of a block; None if its name is not in the table."""
  if not isinstance(block, dict):
    return block
  name = values['name'] if 'name' in values.keys() else None
  return block[name] if isinstance(name, str) and name in block else None


def check(block: Block, values: typing.Any, key: str) -> list[str]:
  """All problems of a block's values, one line each.

  Args:
    block: a dataclass, or a table of dataclasses by the option `name`.
    values: the mapping to be checked.
    key: the dotted key of the block, for the messages.
  """
  if not _is_mapping(values):
    return [f'{key}={values!r}: must be a block of options']
  cls = _chosen(block, values)
  if cls is None:
    names = ', '.join(block)
    if 'name' not in values.keys():
      return [f'{key}.name: missing; must be one of {names}']
    return [f'{key}.name={values["name"]!r}: must be one of {names}']
  return list(_check_fields(cls, values, key))


def _check_fields(cls, values, key) -> Iterator[str]:
  fields = {field.name: field for field in dataclasses.fields(cls)}
  clean = True
  for name in values.keys():
    if name not in fields:
      known = ', '.join(fields)
      yield f'{key}.{name}: unknown option; the options are {known}'
  for name, field in fields.items():
    dotted = f'{key}.{name}'
    if name not in values.keys():
      problems = [f'{dotted}: missing']
    elif 'block' in field.metadata:
      problems = check(field.metadata['block'], values[name], dotted)
    else:
      problem = field.metadata['rule'].problem(values[name])
      problems = [f'{dotted}={values[name]!r}: {problem}'] if problem else []
    clean = clean and not problems
    yield from problems
  if clean and hasattr(cls, 'conflicts'):
    found = cls.conflicts(**{name: values[name] for name in fields})
    for name, value, rule in found:
      yield f'{key}.{name}={value!r}: must be {rule}'


def build(block: Block, values: typing.Any) -> typing.Any:
  """The dataclass of values that `check` found no problem in."""
  cls = _chosen(block, values)
  return cls(
    **{
      field.name: (
        build(field.metadata['block'], values[field.name])
        if 'block' in field.metadata
        else field.metadata['rule'].build(values[field.name])
      )
      for field in dataclasses.fields(cls)
    }
  )
