"""Explains config keys by the comments of the files that define them.

The keys of `algorithm` are defined in `configs/algorithms.py`, all others in
`configs/base.py` and the files beside it that it calls.
"""

import ast
from collections.abc import Iterator
import io
import pathlib
import textwrap
import tokenize
import types
from typing import Any
from typing import NamedTuple

from stppo_jax import exits
from stppo_jax import settings
from stppo_jax.configs import algorithms
from stppo_jax.configs import base

HINT = '--help=KEY explains a config key or section, --helpfull all of them.'


class Entry(NamedTuple):
  """A key or a section of the configuration.

  Attributes:
    key: its dotted name.
    comment: its comment as one line; '' where it has none.
    default: 'key = value' of a key, the name of a section.
    is_key: whether it is a key.
  """

  key: str
  comment: str
  default: str
  is_key: bool


def describe(name: str = '') -> str:
  """Returns config keys as text, each with its default and its comment.

  Args:
    name: a key, a section, or the last part of one; '' = all keys.

  Raises:
    Misconfigured: there is no such key.
  """
  name = name.removeprefix('config.')
  found = entries()
  keys = [e.key for e in found if e.is_key]
  chosen = {key for key in keys if not name or f'.{name}.' in f'.{key}.'}
  if not chosen:
    parts = {part for key in keys for part in key.split('.')}
    hint = settings.nearest(name, sorted({*keys, *parts}))
    raise exits.Misconfigured(
      f'--help={name}: no such config key' + (f'; {hint}' if hint else '')
    )
  lines = []
  for entry in found:
    around = not entry.is_key and entry.comment
    if entry.key in chosen or (
      around and any(key.startswith(f'{entry.key}.') for key in chosen)
    ):
      lines.append(entry.default)
      lines += textwrap.wrap(
        entry.comment, 80, initial_indent='    ', subsequent_indent='    '
      )
  return '\n'.join(lines)


def entries() -> list[Entry]:
  """Returns all sections and keys, in the order of the files."""
  config = settings.flatten(base.get_config())
  found = []
  for key, comment in _comments(base, 'get_config'):
    found.append(_entry(key, comment, config))
    if key == 'algorithm':
      found += _of_algorithm(config)
  return found


def _of_algorithm(config: dict[str, Any]) -> Iterator[Entry]:
  """Yields the sections and keys of `algorithm`.

  The options of every choice are among them, not only those of the default.
  """
  of_choices = dict(_comments(algorithms, 'DEFAULTS'))
  for name, comment in _comments(algorithms, '_TOKEN_PPO'):
    kind = name.partition('.')[0]
    key = f'algorithm.{name}'
    if kind not in algorithms.DEFAULTS:
      yield _entry(key, comment, config)
    elif name == kind:
      yield _entry(key, of_choices[kind], config)
      choices = algorithms.DEFAULTS[kind]
      yield _entry(f'{key}.name', ' | '.join(choices), config)
      for choice, options in choices.items():
        for option, value in options.items():
          path = f'{kind}.{choice}'
          comment = of_choices[f'{path}.{option}'] or of_choices[path]
          comment = f'With {choice}' + (f': {comment}' if comment else '.')
          yield _entry(f'{key}.{option}', comment, {f'{key}.{option}': value})


def _entry(key: str, comment: str, values: dict[str, Any]) -> Entry:
  is_key = key in values
  return Entry(
    key, comment, f'{key} = {values[key]!r}' if is_key else key, is_key
  )


def _comments(module: types.ModuleType, name: str) -> Iterator[tuple[str, str]]:
  """Yields each dotted key of a dict literal, with its comment.

  A comment stands above its key or behind it.

  Args:
    module: the module of the literal.
    name: a variable that is the literal, or a function that contains it.
  """
  assert module.__file__ is not None
  text = pathlib.Path(module.__file__).read_text(encoding='utf-8')
  tree = ast.parse(text)
  behind, above = {}, {}
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.COMMENT:
      (line, column), comment = token.start, token.string.lstrip('# ')
      is_alone = not token.line[:column].strip()
      (above if is_alone else behind)[line] = comment
  named = {
    target.id: node.value
    for node in tree.body
    if isinstance(node, ast.Assign)
    for target in node.targets
    if isinstance(target, ast.Name)
  } | {
    node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)
  }

  def comment_of(line: int) -> str:
    first = line
    while first - 1 in above:
      first -= 1
    lines = [above[number] for number in range(first, line)]
    return ' '.join([*lines, behind[line]] if line in behind else lines)

  def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
      other = getattr(module, getattr(node.func.value, 'id', ''), None)
      is_file = isinstance(other, types.ModuleType)
      if is_file and other.__package__ == module.__package__:
        for key, comment in _comments(other, node.func.attr):
          yield f'{prefix}{key}', comment
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
      node = named[node.func.id] if node.func.id in named else node
    if isinstance(node, ast.FunctionDef):
      # The first one is the outermost.
      dicts = (x for x in ast.walk(node) if isinstance(x, ast.Dict))
      node = next(dicts, node)
    if isinstance(node, ast.Dict):
      for key, value in zip(node.keys, node.values):
        if isinstance(key, ast.Constant):
          yield f'{prefix}{key.value}', comment_of(key.lineno)
          yield from walk(value, f'{prefix}{key.value}.')

  yield from walk(named[name], '')
