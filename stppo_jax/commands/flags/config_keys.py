"""Explains config keys by the comments of the files that define them.

The keys of `algorithm` are defined in `configs/algorithms.py` and
`configs/defaults.py`. All other keys are defined in `configs/base.py` and in
the files of the same folder whose functions `base.py` calls.
"""

import ast
from collections.abc import Iterator
import pathlib
import textwrap
import types

from stppo_jax import exits
from stppo_jax import settings
from stppo_jax.configs import algorithms
from stppo_jax.configs import base
from stppo_jax.configs import defaults
from stppo_jax.configs import schema

HINT = '--help=KEY explains a config key or section, --helpfull all of them.'


def describe(name: str = '') -> str:
  """Returns config keys as text, each with its default and its comment.

  Args:
    name: a key, a section, or consecutive parts of a key, such as `slots` of
      `rollout.slots`; '' for all keys.

  Raises:
    Misconfigured: if there is no such key.
  """
  name = name.removeprefix('config.')
  found = list(_entries())
  keys = [key for key, _, line in found if line]
  chosen = {key for key in keys if not name or f'.{name}.' in f'.{key}.'}
  if not chosen:
    parts = {part for key in keys for part in key.split('.')}
    hint = settings.nearest(name, sorted({*keys, *parts}))
    if new := schema.successor(name):
      hint = f'it is now {new}'
    elif name in schema.GONE:
      hint = f'it is gone: {schema.GONE[name]}'
    raise exits.Misconfigured(
      f'--help={name}: no such config key' + (f'; {hint}' if hint else '')
    )
  lines = []
  for key, comment, line in found:
    # The comment of a section explains the keys of the section, too. So the
    # comment is shown even if only some of these keys are shown.
    around = not line and comment
    if key in chosen or (
      around and any(name.startswith(f'{key}.') for name in chosen)
    ):
      lines.append(line or key)
      lines += textwrap.wrap(
        comment, 80, initial_indent='    ', subsequent_indent='    '
      )
  return '\n'.join(lines)


def _entries() -> Iterator[tuple[str, str, str]]:
  """Yields name, comment and `key = default` of each section and key.

  Sections and keys are in the order of the files. A section has '' in place of
  `key = default`.
  """
  lines = {key: f'{key} = {value!r}' for key, value in base.values().items()}
  for key, comment in _comments(base, 'get_config'):
    yield key, comment, lines.get(key, '')
    if key == 'algorithm':
      yield from _of_algorithm(lines)


def _of_algorithm(lines: dict[str, str]) -> Iterator[tuple[str, str, str]]:
  """Yields the sections and keys of `algorithm`, as `_entries` does.

  The keys are the options of every choice, not only of the default choice.
  """
  of_choices = dict(_comments(defaults, 'DEFAULTS'))
  for name, comment in _comments(algorithms, '_TOKEN_PPO'):
    kind = name.partition('.')[0]
    key = f'algorithm.{name}'
    if kind not in defaults.DEFAULTS:
      yield key, comment, lines.get(key, '')
    elif name == kind:
      yield key, of_choices[kind], ''
      choices = defaults.DEFAULTS[kind]
      yield f'{key}.name', ' | '.join(choices), lines[f'{key}.name']
      for choice, options in choices.items():
        for option, value in options.items():
          path = f'{kind}.{choice}'
          comment = of_choices[f'{path}.{option}'] or of_choices[path]
          comment = f'With {choice}' + (f': {comment}' if comment else '.')
          yield f'{key}.{option}', comment, f'{key}.{option} = {value!r}'


def _comments(module: types.ModuleType, name: str) -> Iterator[tuple[str, str]]:
  """Yields each dotted key of a dict literal, with its comment.

  A comment stands above its key or behind it.

  Args:
    module: the module that contains the literal.
    name: the name of a variable that is the literal, or of a function that
      contains the literal.
  """
  assert module.__file__ is not None
  text = pathlib.Path(module.__file__).read_text(encoding='utf-8')
  lines = text.splitlines()
  # The functions and variables of the module by their names.
  named: dict[str, ast.AST] = {}
  for node in ast.parse(text).body:
    if isinstance(node, ast.FunctionDef):
      named[node.name] = node
    elif isinstance(node, ast.Assign):
      named[ast.unparse(node.targets[0])] = node.value

  def comment_of(number: int) -> str:
    first = number
    while lines[first - 1].lstrip().startswith('#'):
      first -= 1
    found = [line.lstrip(' #') for line in lines[first:number]]
    _, _, behind = lines[number].partition('  # ')
    return ' '.join(filter(None, [*found, behind]))

  # In the literal, a section may be a call of a function of `module`, or of
  # another file in the same folder. Then the keys and comments of the section
  # are read from the function.
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
      # `ast.walk` yields the outermost dict first.
      dicts = (x for x in ast.walk(node) if isinstance(x, ast.Dict))
      node = next(dicts, node)
    if isinstance(node, ast.Dict):
      for key, value in zip(node.keys, node.values):
        if isinstance(key, ast.Constant):
          yield f'{prefix}{key.value}', comment_of(key.lineno - 1)
          yield from walk(value, f'{prefix}{key.value}.')

  yield from walk(named[name], '')
