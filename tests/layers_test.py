"""Who may import whom, and the one home of each dependency.

The imports of every file are read with `ast`, those inside functions too, and
compared with two tables. Planted violations prove that the tables bite.
"""

import ast
from collections.abc import Iterator
import pathlib
import textwrap

import pytest

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_PACKAGE = 'stppo_jax'
# What the package must not import, or only as a table allows.
_OF_THE_REPOSITORY = (_PACKAGE, 'configs', 'launch', 'benchmarks', 'tests')
_TEXT = ('types', 'envs', 'retrieval', 'data')
_DEVICE = ('types', 'batch', 'rl', 'parallel', 'models', 'sampling', 'rollout')
_ALL = tuple(dict.fromkeys(_TEXT + _DEVICE)) + (
  'settings',
  'streams',
  'buckets',
  'learner',
  'records',
  'training',
  'analysis',
)

# Layer -> the modules of ours it may import; a name covers all that is below.
OURS = {
  'types': (),
  'settings': (),
  'streams': (),
  'buckets': (),
  'http': ('http',),
  'batch': ('types',),
  'rl': ('batch', 'rl'),
  'envs': _TEXT,
  'retrieval': _TEXT + ('http', 'models.hf.weight_files'),
  'data': _TEXT + ('buckets',),
  'parallel': ('parallel',),
  'models': ('types', 'settings', 'batch', 'parallel', 'models'),
  'sampling': ('types', 'http', 'batch', 'parallel', 'models', 'sampling'),
  'rollout': ('types', 'batch', 'envs', 'retrieval.protocol', 'rollout'),
  'learner': ('types', 'batch', 'rl', 'parallel', 'models', 'learner'),
  'records': (
    'types',
    'streams',
    'buckets',
    'batch',
    'envs.protocol',
    'records',
  ),
  'report': ('settings', 'streams', 'envs.protocol', 'records', 'report'),
  'training': _ALL,
  'analysis': _ALL,
  # Not each other: what they share is in `commands.flags`.
  'commands': _ALL + ('http', 'report', 'commands.flags', 'configs'),
  '__main__': (
    'settings',
    'streams',
    'commands',
    'training.stopping.interruption',
    '__version__',
  ),
  'configs': (
    'settings',
    'buckets',
    'rl.algorithm',
    'rl.estimator_needs',
    'envs',
    'retrieval.address',
    'retrieval.dialects',
    'sampling.lane_rules',
    'data.kinds',
    'data.layout',
    'data.mixtures',
    'configs',
  ),
}

# Dependency -> the only places that may import it.
_JAX_LAYERS = _DEVICE[1:] + (
  'learner',
  'records.checkpoints.checkpoint',
  'records.checkpoints.fingerprint',
  'records.checkpoints.leaves',
  'records.checkpoints.orbax_parts',
  'records.checkpoints.verification',
  'training',
  'analysis',
  'commands',
)
HOMES = {
  'jax': _JAX_LAYERS + ('retrieval.indexes.dense', 'retrieval.indexes.encoder'),
  'jaxlib': (),
  'flax': ('models', 'sampling', 'learner', 'retrieval.indexes.encoder'),
  'optax': ('learner.optimizer',),
  'orbax': ('records.checkpoints',),
  'chex': _JAX_LAYERS,
  'transformers': ('sampling.tokenizer', 'models.hf'),
  'tokenizers': ('sampling.tokenizer', 'retrieval.indexes.encoder'),
  'tensorflow': (),
  'tensorflow_datasets': ('data.built',),
  'fsspec': ('buckets',),
  'pyarrow': ('data.tables',),
  'aiohttp': ('http',),
  'requests': (),
  'httpx': (),
  'http.client': (),
  'http.server': (),
  'urllib.request': (),
  'bm25s': ('retrieval',),
  'prometheus_client': ('http',),
  'mcp': ('envs.mcp_tools',),
  'mcp_types': ('envs.mcp_tools',),
  'textworld': ('envs.text_games',),
  'ml_collections': ('configs', 'commands'),
  'matplotlib': (
    'records.sinks.plots',
    'report.figures',
    'analysis.ablation.figures',
  ),
  'tensorboardX': ('records.sinks.tensorboard',),
  'wandb': ('records.sinks.trackers',),
  'trackio': ('records.sinks.trackers',),
  'rich': ('records',),
  'packaging': ('analysis.machine',),
  'absl': ('training', 'analysis', 'commands'),
}

# The maths neither reads nor writes nor logs.
_IO = (
  'asyncio http io json logging os pathlib shutil socket subprocess sys '
  'tempfile threading urllib'
).split()
FORBIDDEN = {'rl': _IO, 'batch': _IO, 'types': _IO, 'settings': _IO}


def violations(root: pathlib.Path) -> list[str]:
  """One line for each import under `root` that a table does not allow."""
  files = sorted((root / _PACKAGE).rglob('*.py'))
  files += sorted((root / 'configs').rglob('*.py'))
  lines = []
  for path in files:
    parts = path.relative_to(root).with_suffix('').parts
    if parts[-1] == '__init__':
      parts = parts[:-1]
    if parts == (_PACKAGE,):
      name, layer = '', ''
    elif parts[0] == _PACKAGE:
      name, layer = '.'.join(parts[1:]), parts[1]
    else:
      name, layer = '.'.join(parts), 'configs'
    where = path.relative_to(root)
    if layer and layer not in OURS:
      lines.append(f'{where}: no such layer: {layer}; one of {sorted(OURS)}')
      continue
    for lineno, target in _imports(path):
      problem = _problem(name, layer, target)
      if problem:
        lines.append(f'{where}:{lineno}: {problem}')
  return lines


def _imports(path: pathlib.Path) -> Iterator[tuple[int, str]]:
  """(line, dotted name) of every import; `from a import b` gives `a.b`."""
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield node.lineno, alias.name
    elif isinstance(node, ast.ImportFrom):
      if node.level:
        yield node.lineno, '.' * node.level  # named below as relative
        continue
      for alias in node.names:
        yield node.lineno, f'{node.module}.{alias.name}'


def _problem(name: str, layer: str, target: str) -> str:
  """Why the module `name` of `layer` may not import `target`, or ''."""
  if target.startswith('.'):
    return 'relative import; write the whole name'
  own = target.removeprefix(_PACKAGE + '.')
  if own != target or target.split('.')[0] in _OF_THE_REPOSITORY:
    if not layer or not _covered(own, OURS[layer]):
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


def page_rows() -> list[str]:
  """Returns the table of docs/architecture.md, as it follows from OURS."""
  rows = []
  for layer, allowed in OURS.items():
    others = [n for n in allowed if n != layer and layer not in n.split('.')]
    words = [f'`{n}`' for n in others]
    if set(_ALL) <= set(allowed):
      above = [f'`{n}`' for n in ('commands', 'configs', 'http', 'report')]
      above = [n for n in above if n not in words and n != f'`{layer}`']
      words = ['every room' + ' but '[: 5 * bool(above)] + ', '.join(above)]
    rows.append(f'| `{layer}` | {", ".join(words) or "nothing"} |')
  return rows


def test_the_architecture_page_has_the_table():
  page = _ROOT / 'docs' / 'architecture.md'
  expected = '\n'.join(page_rows())
  message = f'docs/architecture.md needs this table:\n{expected}'
  assert expected in page.read_text(encoding='utf-8'), message


def test_the_tree_keeps_its_layers():
  found = violations(_ROOT)
  assert not found, '\n'.join(found)


@pytest.mark.parametrize(
  ('path', 'source', 'expected'),
  [
    ('types.py', 'import jax', 'jax may be imported only by'),
    ('types.py', 'import stppo_jax.batch', 'types may not import'),
    ('batch.py', 'from stppo_jax import rl', 'batch may not import'),
    ('rl/losses.py', 'import optax', 'optax may be imported only by'),
    ('rl/losses.py', 'import flax.nnx', 'flax may be imported only by'),
    ('rl/losses.py', 'import logging', 'no input or output: logging'),
    (
      'rl/losses.py',
      'from stppo_jax.models import heads',
      'rl may not import stppo_jax.models.heads',
    ),
    ('envs/search.py', 'import jax.numpy as jnp', 'jax may be imported'),
    ('envs/search.py', 'from jax import numpy', 'jax may be imported'),
    ('envs/search.py', 'import aiohttp', 'aiohttp may be imported only'),
    ('retrieval/client.py', 'import jax', 'jax may be imported only by'),
    ('data/readers.py', 'from stppo_jax import batch', 'data may not'),
    ('parallel/mesh.py', 'from stppo_jax import types', 'parallel may not'),
    ('models/moe.py', 'from stppo_jax.rl import masking', 'models may not'),
    ('models/moe.py', 'import transformers', 'transformers may be'),
    ('sampling/engine.py', 'import stppo_jax.envs.search', 'sampling may'),
    ('rollout/pack.py', 'from stppo_jax.models import heads', 'rollout may'),
    ('rollout/pack.py', 'from stppo_jax.training import loop', 'rollout'),
    ('training/loop.py', 'from stppo_jax.commands import train', 'training'),
    ('training/loop.py', 'import orbax.checkpoint as ocp', 'orbax may be'),
    ('training/loop.py', 'import ml_collections', 'ml_collections may be'),
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


def test_allowed_imports_pass(tmp_path):
  _plant(
    tmp_path,
    'records/checkpoints/checkpoint.py',
    """
      import json
      import jax
      import orbax.checkpoint as ocp
      from stppo_jax import batch
      from stppo_jax import types
      """,
  )
  _plant(
    tmp_path, 'retrieval/indexes/dense.py', 'import jax\nimport urllib.parse'
  )
  _plant(
    tmp_path,
    'commands/train.py',
    'from stppo_jax.commands.flags import config_keys\nimport configs',
  )
  assert violations(tmp_path) == []


def _plant(root, path, source):
  target = root / _PACKAGE / path
  target.parent.mkdir(parents=True, exist_ok=True)
  target.write_text(textwrap.dedent(source), encoding='utf-8')
