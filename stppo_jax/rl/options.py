"""Dataclasses of an algorithm's options, with rules for their values.

A function that can be chosen by name takes its options as keyword arguments.
The dataclass of these options stands beside the function, and a table maps the
name to the function and the dataclass:

    @options.dataclass
    class Fixed(options.Named):
      clip_low: float = options.number()
      clip_high: float = options.number()

    BOUNDS = {'fixed': options.Choice(fixed, Fixed), ...}

Every field is made by `one_of`, `some_of`, `number`, `count` or `section`,
which attach the rule for its values. Numbers are leaves of a jax pytree, so
that changing a number does not recompile. Names and counts are static. `check`
finds all problems of a mapping of options at once, and `build` turns the
mapping into the dataclass.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import math
import numbers
import typing
from typing import Any, ClassVar

import jax


@typing.dataclass_transform(frozen_default=True)
def dataclass(cls):
  """Makes a class of options a frozen dataclass and a jax pytree."""
  cls = dataclasses.dataclass(frozen=True)(cls)
  return jax.tree_util.register_dataclass(cls)


class Options:
  """Base class of all dataclasses of options."""

  # A subclass may define this static method. It takes all options as keyword
  # arguments. For each option that contradicts other options, it yields
  # (option, value, rule in words).
  conflicts: ClassVar[Callable[..., Iterator[tuple[str, Any, str]]] | None] = (
    None
  )

  def arguments(self) -> dict[str, Any]:
    """Returns the options as keyword arguments, without the choice's `name`."""
    return {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(typing.cast(Any, self))
      if field.name != 'name'
    }


@dataclass
class Named(Options):
  """The name of a choice from a table; base class of the choice's options.

  Functions without options use this class itself.

  Attributes:
    name: the key of the table.
  """

  # This field has no rule of its own. Its valid names are the keys of the
  # table, and one class may serve several tables.
  name: str = dataclasses.field(metadata={'static': True})


class Choice(typing.NamedTuple):
  """An entry of a table: a function that can be chosen, with its needs.

  Attributes:
    function: the function, which takes its options as keyword arguments.
    options: the dataclass of its options.
    statistics: a second function, which forms the statistics of the whole
      minibatch that `function` needs. None: `function` needs only its
      microbatch.
    needs_statistics: function of the options that returns whether `function`
      needs the statistics under these options.
    arrays: the names of the batch arrays that `function` reads, apart from the
      arrays that every loss reads.
    metrics: the names of the metrics whose numbers `function` uses. These
      metrics must be finite.
  """

  function: Callable[..., Any]
  options: type[Options] = Named
  statistics: Callable[..., Any] | None = None
  needs_statistics: Callable[[Any], bool] = lambda options: True
  arrays: frozenset[str] = frozenset()
  metrics: tuple[str, ...] = ()

  def uses_statistics(self, options: Options) -> bool:
    """Returns whether statistics of the whole minibatch must be formed."""
    return self.statistics is not None and self.needs_statistics(options)


Table = Mapping[str, Choice]
# A section of the configuration holds the options of one dataclass, or of one
# choice in a table. The section's option `name` then names the choice.
Section = type[Options] | Table


class OptionRule(typing.NamedTuple):
  """The rule of an option.

  Attributes:
    holds: function that returns whether a value satisfies the rule.
    allowed: the rule in words that follow "must be".
    build: function that turns a valid value into the type that is stored.
    names: the names that may be chosen; () for numbers.
  """

  holds: Callable[[Any], bool]
  allowed: str
  build: Callable[[Any], Any]
  names: tuple[str, ...] = ()


def _one_of(names: tuple[str, ...]) -> OptionRule:
  holds = lambda value: isinstance(value, str) and value in names
  return OptionRule(holds, 'one of ' + ', '.join(names), str, names)


def one_of(names: Iterable[str]) -> Any:
  """Returns a field that holds one of several names, such as a table's keys."""
  return _static(_one_of(tuple(names)))


def some_of(names: Iterable[str], *, at_least: int = 0) -> Any:
  """Returns a field that holds a tuple of distinct names.

  Args:
    names: the names that the tuple may hold.
    at_least: the smallest allowed number of names in the tuple.
  """
  names = tuple(names)

  def holds(value):
    return (
      isinstance(value, (tuple, list))
      and all(isinstance(v, str) and v in names for v in value)
      and len(set(value)) == len(value) >= at_least
    )

  few = f'at least {at_least}' if at_least else 'any'
  allowed = f'a tuple of {few} of ' + ', '.join(names)
  build = lambda value: tuple(str(v) for v in value)
  return _static(OptionRule(holds, allowed, build, names))


def number(
  *,
  above: float | None = None,
  at_most: float = math.inf,
  infinite: bool = False,
) -> Any:
  """Returns a field that holds a number.

  Args:
    above: the number must be greater than this limit; None: the number must be
      0 or greater.
    at_most: the greatest number allowed.
    infinite: whether infinity is allowed.
  """

  def holds(value):
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
      return False
    value = float(value)
    high_enough = value >= 0 if above is None else value > above
    finite = infinite or math.isfinite(value)
    return high_enough and value <= at_most and finite  # false for NaN

  kind = 'a number' if infinite else 'a finite number'
  least = '>= 0' if above is None else f'> {above:g}'
  most = f' and <= {at_most:g}' if at_most < math.inf else ''
  allowed = f'{kind} {least}{most}{" (inf is allowed)" if infinite else ""}'
  return dataclasses.field(metadata={'rule': OptionRule(holds, allowed, float)})


def count() -> Any:
  """Returns a field that holds a static integer, 0 or greater.

  Every new value compiles the program anew.
  """
  is_integer = lambda x: isinstance(x, int) and not isinstance(x, bool)
  holds = lambda value: is_integer(value) and value >= 0
  return _static(OptionRule(holds, 'an integer >= 0', int))


def section(options: Section) -> Any:
  """Returns a field for options of a dataclass, or of a choice in a table."""
  return dataclasses.field(metadata={'rule': options})


def selection(name: str, table: Table) -> Any:
  """Returns a dataclass of options for choosing several entries of a table.

  Args:
    name: the name of the class.
    table: the choices.

  Returns:
    A class with the field `names`, which holds the chosen keys of the table,
    and with one field per key of the table. Such a field holds the options of
    the choice, whether it is chosen or not.
  """
  fields: list[tuple[str, type, Any]] = [('names', tuple, some_of(table))]
  fields += [(k, x.options, section(x.options)) for k, x in table.items()]
  cls = dataclasses.make_dataclass(name, fields, bases=(Options,), frozen=True)
  return jax.tree_util.register_dataclass(cls)


def _static(rule):
  return dataclasses.field(metadata={'static': True, 'rule': rule})


def _chosen(section: Section, values: Any) -> type[Options]:
  """Returns the dataclass of a section's options.

  If the section is a table, `values` names the choice.
  """
  if isinstance(section, Mapping):
    return section[values['name']].options
  return section


def _entries(
  section: Section, cls: type[Options]
) -> dict[str, OptionRule | Section]:
  """Maps every option of a class to its rule, or to its section of options."""
  fields = dataclasses.fields(typing.cast(Any, cls))
  entries: dict[str, Any] = {x.name: x.metadata.get('rule') for x in fields}
  if isinstance(section, Mapping):
    entries['name'] = _one_of(tuple(section))
  return entries


def check(section: Section, values: Any, key: str) -> list[str]:
  """Returns all problems of the values of a section.

  Args:
    section: a dataclass of options, or a table of choices.
    values: the mapping of options to values that is checked.
    key: the dotted key of the section, for the messages.

  Returns:
    One line per problem, such as `key.clip_low=-1: must be ...`.
  """
  if not hasattr(values, 'keys'):  # a ConfigDict is no `Mapping`
    return [f'{key}={values!r}: must be a section of options']
  if isinstance(section, Mapping):
    names = ', '.join(section)
    if 'name' not in values.keys():
      return [f'{key}.name: missing; must be one of {names}']
    name = values['name']
    if not isinstance(name, str) or name not in section:
      return [f'{key}.name={name!r}: must be one of {names}']
  return list(_check_options(section, values, key))


def _check_options(section, values, key) -> Iterator[str]:
  cls = _chosen(section, values)
  entries = _entries(section, cls)
  clean = True
  for name in values.keys():
    if name not in entries:
      known = ', '.join(entries)
      yield f'{key}.{name}: unknown option; the options are {known}'
  for name, entry in entries.items():
    dotted = f'{key}.{name}'
    if name not in values.keys():
      problems = [f'{dotted}: missing']
    elif isinstance(entry, OptionRule):
      line = f'{dotted}={values[name]!r}: must be {entry.allowed}'
      problems = [] if entry.holds(values[name]) else [line]
    else:
      problems = check(entry, values[name], dotted)
    clean = clean and not problems
    yield from problems
  # Conflicts are looked for only if every option is valid by itself, because
  # `conflicts` computes with the values.
  if clean and cls.conflicts is not None:
    conflicts = cls.conflicts(**{name: values[name] for name in entries})
    for name, value, rule in conflicts:
      yield f'{key}.{name}={value!r}: must be {rule}'


def build(section: Section, values: Any) -> Any:
  """Returns the dataclass that a mapping of options describes.

  Args:
    section: a dataclass of options, or a table of choices.
    values: the mapping, in which `check` finds no problem.
  """
  cls = _chosen(section, values)
  options = {
    name: entry.build(values[name])
    if isinstance(entry, OptionRule)
    else build(entry, values[name])
    for name, entry in _entries(section, cls).items()
  }
  return cls(**options)


def rules(
  section: Section, values: Any = None
) -> Iterator[tuple[str, OptionRule]]:
  """Yields the dotted key of every option, with its rule.

  Args:
    section: a dataclass of options, or a table of choices.
    values: values of the section, which name the choices. None yields the
      options of all choices of a table. Then a key that several choices have in
      common may come several times.
  """
  if values is None and isinstance(section, Mapping):
    classes = dict.fromkeys(choice.options for choice in section.values())
  else:
    classes = [_chosen(section, values)]
  for cls in classes:
    for name, entry in _entries(section, cls).items():
      if isinstance(entry, OptionRule):
        yield name, entry
      else:
        inner = None if values is None else values[name]
        for key, rule in rules(entry, inner):
          yield f'{name}.{key}', rule
