"""Who may import whom, and the one home of each dependency.

The imports of every file are read with `ast`, those inside functions too, and
compared with two tables: of the rooms, in docs/architecture.md, and of the
dependencies. A name in a table that no file makes use of fails as well, so the
tables show the tree as it is. Planted violations prove that they bite.
"""

import ast
from collections.abc import Iterator
import functools
import pathlib
import re
import textwrap

import pytest

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_PACKAGE = 'stppo_jax'
# What the package must not import, or only as a table allows.
_OF_THE_REPOSITORY = (_PACKAGE, 'configs', 'launch', 'benchmarks', 'tests')


def _table() -> dict[str, tuple[str, ...]]:
  """Returns the table of docs/architecture.md: what each room may import.

  These are rooms, or modules of rooms. They all stand above it, so no rooms
  import each other.
  """
  page = (_ROOT / 'docs' / 'architecture.md').read_text('utf-8')
  table = page.partition('| room | may import |')[2].partition('\n\n')[0]
  found: dict[str, tuple[str, ...]] = {}
  for room, words in re.findall(r'^\| `(\w+)` \| (.*) \|$', table, re.M):
    names = tuple(re.findall(r'`([\w.]+)`', words))
    if words.startswith('every room above'):  # but for those that are named
      names = tuple(x for x in found if x not in names)
    found[room] = names
  return found


OURS = _table()

# Modules of a room that import no other of it, but those of this folder.
SEPARATE = {'commands': 'commands.flags'}

# Dependency -> the only places that may import it.
HOMES = {
  'jax': (
    'batch keys rl parallel models retrieval.indexes.dense '
    'retrieval.indexes.encoder sampling workdir.agreement workdir.run_monitor '
    'records.checkpoints rollout learner training tools'
  ),
  'jaxlib': '',
  'flax': 'models retrieval.indexes.encoder',
  'optax': 'learner.optimizer',
  'orbax': 'records.checkpoints',
  'etils': 'records.checkpoints',
  'chex': 'rl models.modules',
  'transformers': 'sampling.tokenizer',
  'tokenizers': 'sampling.tokenizer retrieval.indexes.encoder',
  'tensorflow': '',
  'tensorflow_datasets': 'data.tfds_store',
  'fsspec': 'buckets records.checkpoints',
  'huggingface_hub': 'hub',
  'torch': 'tools.torch_files',
  'gcsfs': 'records.checkpoints',
  'pyarrow': 'data.tables',
  'aiohttp': 'http',
  'requests': '',
  'httpx': '',
  'http.client': 'data.building',
  'http.server': '',
  'urllib.request': 'data.building',
  'bm25s': 'retrieval.indexes.bm25',
  'mcp': 'envs.mcp_tools',
  'mcp_types': 'envs.mcp_tools',
  'textworld': 'envs.text_games',
  'ml_collections': 'configs.base workdir.recorded_config commands.flags',
  'matplotlib': (
    'records.plots tools.report.figures tools.ablation.figures '
    'tools.lab.pictures'
  ),
  'tensorboardX': 'records.tensorboard',
  'wandb': 'records.trackers',
  'trackio': 'records.trackers',
  'rich': 'records',
  'packaging': 'tools.machine',
  'absl': 'tools.serving commands',
  'safetensors': 'models.hf.safetensors_file tools.torch_files',
}
HOMES = {name: tuple(homes.split()) for name, homes in HOMES.items()}

# The maths neither reads nor writes nor logs.
_IO = (
  'asyncio http io json logging os pathlib shutil socket subprocess sys '
  'tempfile threading urllib'
).split()
FORBIDDEN = {'rl': _IO, 'batch': _IO, 'types': _IO, 'settings': _IO}


def violations(root: pathlib.Path) -> list[str]:
  """Returns a line for each import under `root` that a table does not allow."""
  lines = []
  for path, name, layer in _modules(root):
    where = path.relative_to(root)
    if layer and layer not in OURS:
      lines.append(f'{where}: no such layer: {layer}; one of {sorted(OURS)}')
      continue
    for lineno, target in _imports(path):
      problem = _problem(name, layer, target)
      if problem:
        lines.append(f'{where}:{lineno}: {problem}')
  return lines


def unused(root: pathlib.Path) -> list[str]:
  """Returns a line for each name in a table of which no file makes use."""
  arrows = [
    (name, layer, target)
    for path, name, layer in _modules(root)
    for _, target in _imports(path)
  ]
  lines = []
  for room, others in OURS.items():
    targets = [_own(t) for _, layer, t in arrows if layer == room]
    for other in others:
      if not any(_covered(target, (other,)) for target in targets):
        lines.append(f'{room} imports nothing of {other}')
  for dependency, homes in HOMES.items():
    users = [name for name, _, t in arrows if _covered(t, (dependency,))]
    for home in homes:
      if not any(_covered(user, (home,)) for user in users):
        lines.append(f'{home} does not import {dependency}')
  return lines


def circles(root: pathlib.Path) -> dict[str, set[str]]:
  """Returns the folders on a circle of imports, and what they import on it."""
  modules = {name: path for path, name, _ in _modules(root)}

  def folder(name):
    # A module beside the rooms is a room of its own.
    above = modules[name].relative_to(root).parent
    return name if above.name == _PACKAGE else str(above)

  graph: dict[str, set[str]] = {}
  for name, path in modules.items():
    found = graph.setdefault(folder(name), set())
    for _, target in _imports(path):
      own = _own(target)
      for imported in (own, own.rpartition('.')[0]):
        if imported in modules and folder(imported) != folder(name):
          found.add(folder(imported))
          break
  size = None
  while size != len(graph):
    # What imports none of the others, or is imported by none, is on no circle.
    size = len(graph)
    imported = set().union(*graph.values())
    graph = {x: graph[x] & graph.keys() for x in graph.keys() & imported}
    graph = {x: found for x, found in graph.items() if found}
  return graph


def _modules(root: pathlib.Path) -> Iterator[tuple[pathlib.Path, str, str]]:
  """Yields the file, the name without the package, and the room of modules."""
  files = sorted((root / _PACKAGE).rglob('*.py'))
  for path in files + sorted((root / 'configs').rglob('*.py')):
    parts = path.relative_to(root).with_suffix('').parts
    if parts[-1] == '__init__':
      parts = parts[:-1]
    if parts[0] == _PACKAGE:
      parts = parts[1:]
    yield path, '.'.join(parts), parts[0] if parts else ''


def _own(target: str) -> str:
  return target.removeprefix(_PACKAGE + '.')


@functools.cache  # three tests look at the whole tree
def _imports(path: pathlib.Path) -> list[tuple[int, str]]:
  """(line, dotted name) of every import; `from a import b` gives `a.b`."""
  found = []
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Import):
      found += [(node.lineno, alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level:
      found.append((node.lineno, '.' * node.level))  # named below as relative
    elif isinstance(node, ast.ImportFrom):
      found += [(node.lineno, f'{node.module}.{x.name}') for x in node.names]
  return found


def _problem(name: str, layer: str, target: str) -> str:
  """Why the module `name` of `layer` may not import `target`, or ''."""
  if target.startswith('.'):
    return 'relative import; write the whole name'
  own = _own(target)
  if own != target or target.split('.')[0] in _OF_THE_REPOSITORY:
    if not layer or not _covered(
      own, (SEPARATE.get(layer, layer), *OURS[layer])
    ):
      return f'{layer or _PACKAGE} may not import {target}'
    return ''
  for dependency, homes in HOMES.items():
    if _covered(target, (dependency,)) and not _covered(name, homes):
      return f'{dependency} may be imported only by {list(homes)}'
  if layer in FORBIDDEN and _covered(target, FORBIDDEN[layer]):
    return f'{layer} does no input or output: {target}'
  return ''


def _covered(name: str, prefixes) -> bool:
  return any(name == p or name.startswith(p + '.') for p in prefixes)


def test_the_tree_is_as_the_tables_say():
  found = [*violations(_ROOT), *unused(_ROOT)]
  assert not found, '\n'.join(found)
  assert circles(_ROOT) == {}


def test_a_room_imports_only_what_stands_above_it():
  rooms = list(OURS)
  for number, (room, others) in enumerate(OURS.items()):
    for other in others:
      above = other.split('.')[0]
      assert above in [*rooms[:number], '__version__'], (room, other)


@pytest.mark.parametrize(
  ('path', 'source', 'expected'),
  [
    ('types.py', 'import jax', 'jax may be imported only by'),
    ('batch.py', 'from stppo_jax import rl', 'batch may not import'),
    ('rl/losses.py', 'import flax.nnx', 'flax may be imported only by'),
    ('rl/losses.py', 'import logging', 'no input or output: logging'),
    ('envs/search.py', 'from jax import numpy', 'jax may be imported'),
    ('sampling/engine.py', 'import stppo_jax.envs.search', 'sampling may'),
    ('training/loop.py', 'from stppo_jax.commands import train', 'training'),
    ('training/loop.py', 'import orbax.checkpoint as ocp', 'orbax may be'),
    ('training/loop.py', 'from configs import base', 'training may not'),
    ('commands/sft.py', 'from stppo_jax.commands import train', 'commands'),
    ('commands/train.py', 'from launch import submit', 'commands may not'),
    ('rl/losses.py', 'from . import masking', 'relative import'),
    ('helpers/text.py', 'import re', 'no such layer: helpers'),
    ('__init__.py', 'from stppo_jax import types', 'may not import'),
    (
      'envs/search.py',
      'def late():\n  from stppo_jax.rl import losses',
      'envs may not import stppo_jax.rl.losses',
    ),
  ],
)
def test_a_planted_violation_is_named(tmp_path, path, source, expected):
  _plant(tmp_path, path, source)
  (line,) = violations(tmp_path)
  assert line.startswith(f'{_PACKAGE}/{path}:') and expected in line


def test_a_planted_circle_is_named(tmp_path):
  _plant(tmp_path, 'rl/losses.py', 'from stppo_jax.models import heads')
  _plant(tmp_path, 'models/heads.py', 'from stppo_jax.models.hf import load')
  _plant(tmp_path, 'models/hf/load.py', 'from stppo_jax.models import heads')
  assert circles(tmp_path) == {
    'stppo_jax/models': {'stppo_jax/models/hf'},
    'stppo_jax/models/hf': {'stppo_jax/models'},
  }


def test_an_arrow_and_a_home_without_a_file_are_named(tmp_path):
  _plant(tmp_path, 'rl/losses.py', 'import jax\nfrom stppo_jax import batch')
  found = unused(tmp_path)
  assert 'parallel imports nothing of exits' in found
  assert 'parallel does not import jax' in found
  assert not {'rl imports nothing of batch', 'rl does not import jax'} & {
    *found
  }


def _plant(root, path, source):
  target = root / _PACKAGE / path
  target.parent.mkdir(parents=True, exist_ok=True)
  target.write_text(textwrap.dedent(source), encoding='utf-8')
