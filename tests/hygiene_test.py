"""The package has no unsafe loading, no hidden defaults and no dead code.

Read from the syntax tree, so that a docstring may speak of what it avoids.
"""

import ast
import collections
from collections.abc import Iterator
import importlib.util
import itertools
import pathlib
import re

import pytest

from stppo_jax import settings
from stppo_jax.configs import base

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_FOLDERS = ('stppo_jax', 'configs', 'studies', 'docs', 'benchmarks', 'launch')
_UNSAFE_MODULES = ('pickle', 'cPickle', 'cloudpickle', 'dill', 'joblib')
_UNSAFE_MODULES += ('marshal', 'shelve')
_UNSAFE_CALLS = ('eval', 'exec', '__import__')
# Module and functions of it that run code or a shell.
_UNSAFE_FUNCTIONS = {
  'os': ('system', 'popen'),
  'subprocess': ('getoutput', 'getstatusoutput'),
  'torch': ('load',),
  'yaml': ('load', 'load_all', 'unsafe_load', 'full_load'),
  'pandas': ('read_pickle',),
}
# They run a module that is named at run time.
_RUNS_MODULES = ('import_module', 'exec_module', 'run_module', 'run_path')
# Where that is justified: the name is the user's own, or one of a fixed list.
_MAY_RUN_MODULES = (
  'stppo_jax/__init__.py',  # the package itself, as a console script
  'stppo_jax/__main__.py',  # a file of commands/
  'stppo_jax/commands/flags/config_file.py',  # --config, a program of the user
  'stppo_jax/envs/gymnasium.py',  # env.gymnasium.make
  'stppo_jax/envs/reward_function.py',  # env.reward_function
  'stppo_jax/retrieval/indexes/faiss_index.py',  # faiss, which is optional
)
_UNSAFE_OPTIONS = ('shell', 'allow_pickle', 'trust_remote_code')
_NEW_CODE = 'code by name; say in _MAY_RUN_MODULES whose it is'
_ATTICS = ('utils', 'util', 'helpers', 'common', 'misc')
_MAX_LINES = 400
# A first line that begins so is no sentence: it says of what, not what.
_FRAGMENT = re.compile(
  '(Of|Those|What|Whose|Where|As|Which|Nothing|Beside|Under) '
)
# An argument whose description begins so lacks its noun.
_FRAGMENT_OF_ARGUMENT = re.compile(r'\s+[\w, ]+: (of|those|that of|as) ')
_HAS_DOCSTRING = (
  *(ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef),
)
# In backticks, but the name of no file.
_DOTTED = re.compile(r'`([a-z_]+)\.(?!(?:py|jsonl?)\b)(\w+)(?:\(\))?`')
_PATH = re.compile(
  r'(?<![\w/.{:*-])((?:[\w-]+/)+[\w-]+\.(?:py|md|yml|in|txt))\b(?!\S*\()'
)


def findings(nodes: list[ast.AST]) -> Iterator[str]:
  """One line for each thing that must not be in a module of these nodes."""
  for node in nodes:
    for problem in _problems(node):
      yield f'{node.lineno}: {problem}'


def _problems(node: ast.AST) -> Iterator[str]:
  if isinstance(node, ast.Import):
    modules = [alias.name for alias in node.names]
  elif isinstance(node, ast.ImportFrom):
    modules = [node.module or '']
  else:
    modules = []
  for module in modules:
    if module.split('.')[0] in _UNSAFE_MODULES:
      yield f'import {module}'
  if isinstance(node, ast.Call):
    yield from _call_problems(node)
  if isinstance(node, ast.ExceptHandler):
    if node.type is None:
      yield 'bare except'
    elif _last_name(node.type) in ('Exception', 'BaseException'):
      if all(_is_silence(statement) for statement in node.body):
        yield 'except Exception that hides the error'


def _call_problems(call: ast.Call) -> Iterator[str]:
  function = call.func
  if isinstance(function, ast.Name) and function.id in _UNSAFE_CALLS:
    yield f'{function.id}()'
  if isinstance(function, ast.Attribute):
    if function.attr == 'default_backend':
      yield 'default_backend(): ask the mesh (parallel/mesh.py: platform)'
    if function.attr == 'get' and 'config' in _names(function.value):
      yield 'config.get(): a hidden default'
    module = _last_name(function.value)
    # The one option of torch.load with which it runs no code.
    is_safe = any(
      option.arg == 'weights_only'
      and isinstance(option.value, ast.Constant)
      and option.value.value is True
      for option in call.keywords
    )
    if function.attr in _UNSAFE_FUNCTIONS.get(module, ()) and not is_safe:
      yield f'{module}.{function.attr}()'
    if function.attr in _RUNS_MODULES:
      yield f'{function.attr}(): {_NEW_CODE}'
  for option in call.keywords:
    if option.arg in _UNSAFE_OPTIONS:
      value = option.value
      if not (isinstance(value, ast.Constant) and value.value is False):
        yield f'{option.arg}=True'


def _names(node: ast.AST) -> set[str]:
  """The parts of a dotted name: {'self', 'config'} of `self.config`."""
  names = set()
  while isinstance(node, ast.Attribute):
    names.add(node.attr)
    node = node.value
  if isinstance(node, ast.Name):
    names.add(node.id)
  return names


def _last_name(node: ast.AST) -> str:
  if isinstance(node, ast.Attribute):
    return node.attr
  return node.id if isinstance(node, ast.Name) else ''


def _is_silence(statement: ast.stmt) -> bool:
  """pass, continue, ..., or a returned constant: the error leaves no trace."""
  if isinstance(statement, ast.Return):
    return statement.value is None or isinstance(statement.value, ast.Constant)
  if isinstance(statement, ast.Expr):
    return isinstance(statement.value, ast.Constant)
  return isinstance(statement, ast.Pass | ast.Continue)


def fragments(nodes: list[ast.AST]) -> Iterator[str]:
  """One line for each fragment in a docstring.

  A fragment is a first line that is no sentence, or the description of an
  argument that does not begin with a noun.
  """
  for node in nodes:
    if isinstance(node, _HAS_DOCSTRING):
      lines = (ast.get_docstring(node) or '').split('\n')
      found = [line for line in lines[:1] if _FRAGMENT.match(line)]
      found += [line for line in lines[1:] if _FRAGMENT_OF_ARGUMENT.match(line)]
      for line in found:
        yield f'{getattr(node, "lineno", 1)}: {line.strip()}'


def missing_files(text: str, root: pathlib.Path) -> Iterator[str]:
  """One line for each path in a text that leads to no file under `root`.

  A path may begin at the root, in the package or among the tests.
  """
  places = [root / name for name in ('', 'stppo_jax', 'tests', 'docs')]
  for number, line in enumerate(text.splitlines(), 1):
    for path in _PATH.findall(line):
      if not any((place / path).exists() for place in places):
        yield f'{number}: {path}'


def dotted_names(
  source: str, nodes: list[ast.AST]
) -> Iterator[tuple[int, str, str]]:
  """(line, a, b) of each `a.b` in backticks, unless `a` may be an object.

  A name that the code of the same file has may be one, if it is not imported
  from a package.
  """
  used = {n.id for n in nodes if isinstance(n, ast.Name)}
  used |= {n.attr for n in nodes if isinstance(n, ast.Attribute)}
  used |= {n.arg for n in nodes if isinstance(n, ast.arg)}
  imports = (n for n in nodes if isinstance(n, ast.ImportFrom))
  used -= {x.name for n in imports for x in n.names if not x.asname}
  for number, line in enumerate(source.splitlines(), 1):
    for owner, name in _DOTTED.findall(line):
      if owner not in used:
        yield number, owner, name


def _defined(nodes: list[ast.AST]) -> Iterator[str]:
  for node in nodes:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      yield node.id


def _nodes(source: str) -> list[ast.AST]:
  return list(ast.walk(ast.parse(source)))


def _files() -> list[pathlib.Path]:
  return [
    path
    for folder in _FOLDERS
    for path in sorted((_ROOT / folder).rglob('*.py'))
  ]


@pytest.fixture(scope='module')
def found():
  """Returns the lines about the tree by function; each file is parsed once."""
  lines, dotted = collections.defaultdict(list), []
  # What modules define, what folders hold, and the config's keys.
  known = collections.defaultdict(set)
  known['gigpo'] = {'step_advantage_w'}  # of another program
  for key in [*settings.flatten(base.get_config()), 'algorithm.ratio.gradient']:
    for owner, name in itertools.pairwise(key.split('.')):
      known[owner].add(name)
  for path in _files():
    name, source = str(path.relative_to(_ROOT)), path.read_text('utf-8')
    nodes = _nodes(source)
    for find in (findings, fragments):
      lines[find] += [f'{name}:{line}' for line in find(nodes)]
    dotted += [(name, *x) for x in dotted_names(source, nodes)]
    known[path.parent.name].add(path.stem)
    known[path.stem].update(_defined(nodes))
  lines[dotted_names] = [
    f'{file}:{number}: {owner}.{name}'
    for file, number, owner, name in dotted
    if name not in known.get(owner, ())
    and importlib.util.find_spec(owner) is None
  ]
  return lines


def test_the_tree_is_clean(found):
  new_code = [x for x in found[findings] if _NEW_CODE in x]
  run_modules = {line.partition(':')[0] for line in new_code}
  assert run_modules == set(_MAY_RUN_MODULES), new_code
  others = [x for x in found[findings] if x not in new_code]
  assert not others, '\n'.join(others)


@pytest.mark.parametrize('kind', [fragments, dotted_names])
def test_comments_speak_in_sentences_of_what_exists(found, kind):
  assert not found[kind], '\n'.join(found[kind])


def test_a_dotted_name_of_no_object_is_found():
  source = "def f(state):\n  'See `loop.train` and `state.x`.'\n"
  assert list(dotted_names(source, _nodes(source))) == [(2, 'loop', 'train')]


def test_files_that_are_named_exist():
  pages = [_ROOT / f'{x}.md' for x in ('README', 'CONTRIBUTING', 'SECURITY')]
  pages += [_ROOT / 'Makefile', *sorted((_ROOT / 'docs').rglob('*.*'))]
  found = [
    f'{path.relative_to(_ROOT)}:{line}'
    for path in _files()
    + [p for p in pages if p.suffix not in ('.pyc', '.png', '.gz')]
    for line in missing_files(path.read_text(encoding='utf-8'), _ROOT)
  ]
  assert not found, '\n'.join(found)


def test_what_needs_torch_is_marked():
  """`make test-torch` runs the marked ones."""
  found = []
  for path in sorted((_ROOT / 'tests').rglob('*_test.py')):
    source = path.read_text(encoding='utf-8')
    nodes = _nodes(source) if 'torch' in source else []
    skips = [
      node
      for node in nodes
      if isinstance(node, ast.Call)
      and _last_name(node.func) == 'importorskip'
      and node.args[0].value == 'torch'
    ]
    names = [_names(node) for node in nodes if isinstance(node, ast.Attribute)]
    if len(skips) != names.count({'pytest', 'mark', 'torch'}):
      found.append(str(path.relative_to(_ROOT)))
  assert not found


def test_files_are_small_and_rooms_can_be_looked_over():
  found, rooms = [], collections.Counter()
  for path in _files():
    name = path.relative_to(_ROOT)
    rooms[name.parent.as_posix()] += path.name != '__init__.py'
    if path.stem in _ATTICS:
      found.append(f'{name}: an attic; name the idea')
    lines = len(path.read_text(encoding='utf-8').splitlines())
    if lines > _MAX_LINES:
      found.append(f'{name}: {lines} > {_MAX_LINES} lines')
  most = {'models': 20, 'rl': 23, 'learner': 17, 'training': 18}
  most |= {'commands': 22, 'sampling': 17}
  package = {x: n for x, n in rooms.items() if x.startswith('stppo_jax/')}
  assert len(package) > 20
  for room, number in package.items():
    if number > most.get(room.removeprefix('stppo_jax/'), 16):
      found.append(f'{room}: {number} files')
  assert not found, '\n'.join(found)


@pytest.mark.parametrize(
  ('source', 'expected'),
  [
    ('import pickle', 'import pickle'),
    ('def f():\n  import cloudpickle', 'import cloudpickle'),
    ('eval(text)', 'eval()'),
    ('os.system(text)', 'os.system()'),
    ('jax.default_backend()', 'ask the mesh'),
    ('yaml.load(text)', 'yaml.load()'),
    ('torch.load(file)', 'torch.load()'),
    ('torch.load(file, weights_only=False)', 'torch.load()'),
    ('importlib.import_module(name)', 'import_module(): code by name'),
    ('subprocess.run(text, shell=True)', 'shell=True'),
    ('load(path, trust_remote_code=True)', 'trust_remote_code=True'),
    ('config.get("seed", 0)', 'config.get()'),
    ('try:\n  f()\nexcept Exception:\n  pass', 'hides the error'),
    ('try:\n  f()\nexcept:\n  raise', 'bare except'),
    (
      'def f():\n  try:\n    g()\n  except Exception as e:\n    return ""',
      'hides the error',
    ),
    ('ast.literal_eval(text); model.eval(); rows.get("a")', ''),
    ('np.load(path, allow_pickle=False)\n"""No pickle, no eval()."""', ''),
    ('try:\n  f()\nexcept OSError:\n  pass', ''),
  ],
)
def test_planted_lines_are_found(source, expected):
  found = list(findings(_nodes(source)))
  assert len(found) == bool(expected), found
  assert not expected or expected in found[0]


@pytest.mark.parametrize(
  ('docstring', 'expected'),
  [
    ('Of the batch.', 1),
    ('What a run leaves.', 1),
    ('Returns what a run leaves.', 0),
    ('Offers a slot.', 0),
    ('Calls.\n\n  Args:\n    driver: of the slots.', 1),
    ('Calls.\n\n  Args:\n    values, masks: as for `f`.', 1),
    ('Calls.\n\n  Args:\n    driver: offers the slots.', 0),
  ],
)
def test_a_fragment_is_found(docstring, expected):
  source = f'def f():\n  """{docstring}\n\n  Of no concern.\n  """'
  assert len(list(fragments(_nodes(source)))) == expected


def test_a_path_to_no_file_is_found(tmp_path):
  (tmp_path / 'stppo_jax' / 'rl').mkdir(parents=True)
  (tmp_path / 'stppo_jax' / 'rl' / 'losses.py').touch()
  text = 'See rl/losses.py,\nstppo_jax/rl/losses.py and `rl/loss.py`.'
  assert list(missing_files(text, tmp_path)) == ['2: rl/loss.py']
