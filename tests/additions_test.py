"""The table of additions in docs/architecture.md, each made in a copy and used.

Every addition says which lines it inserts into which files. The files that
differ afterwards, with those that `make docs` writes, are the ones that the
table names, and a program in the changed copy uses what was added.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
from typing import NamedTuple

import pytest

from tests import adding_an_algorithm_test
from tests import adding_an_environment_test

_ROOT = pathlib.Path(__file__).resolve().parent.parent


class Insertion(NamedTuple):
  """Code that goes behind a line of a file; a new file if there is no line.

  It is indented like the line, or one level more if the line opens a table.
  """

  path: str
  line: str
  code: str

  def apply(self, root: pathlib.Path) -> None:
    path = root / self.path
    code = textwrap.dedent(self.code).lstrip('\n')
    if not self.line:
      assert not path.exists(), f'{self.path} exists already'
      path.write_text(code, encoding='utf-8')
      return
    lines = path.read_text(encoding='utf-8').splitlines(keepends=True)
    (found,) = [i for i, x in enumerate(lines) if x.strip() == self.line]
    line = lines[found]
    indent = len(line) - len(line.lstrip()) + 2 * line.endswith('{\n')
    lines.insert(found + 1, textwrap.indent(code, ' ' * indent))
    path.write_text(''.join(lines), encoding='utf-8')


class Addition(NamedTuple):
  """Code that a person inserts, and a program that uses it.

  Attributes:
    insertions: the code that a person writes.
    program: a program that raises unless the addition works.
    documented: whether `make docs` has to be run.
  """

  insertions: tuple[
    Insertion | adding_an_algorithm_test.Step | adding_an_environment_test.Step,
    ...,
  ]
  program: str
  documented: bool = False


# As `make docs`, in the process of the program.
_MAKE_DOCS = """
import runpy
runpy.run_path('docs/make_algorithms.py', run_name='__main__')
"""
_ALGORITHM = Addition(
  (
    Insertion(
      'configs/algorithms.py',
      'ALGORITHMS = {',
      """
        'turn_cispo': _algorithm(
          ratio={'level': 'turn'},
          objective=choice('objective', 'detached'),
          **_GROUP,
          **_NO_KL,
        ),
      """,
    ),
    Insertion(
      'docs/texts/algorithms.py',
      'ALGORITHMS = {',
      """
        'turn_cispo': entry.Description(
          'loss = mean over policy tokens of -A sg(r_k) l',
          'Nobody: made by a test.',
          entry.OURS,
          'A test uses it.',
        ),
      """,
    ),
    Insertion(
      'README.md',
      '| PPO | token | yes | `token_ppo`, `s_ppo`, `bilevel_ppo` |',
      '| Turn CISPO | turn | no | `turn_cispo` |\n',
    ),
  ),
  """
  from stppo_jax.commands.flags import configuration
  from stppo_jax.rl import algorithm

  config = configuration.parse(
    ['--config=configs/quickstart.py:turn_cispo'], workdir=False
  ).config
  built = algorithm.build_algorithm(config.algorithm.to_dict())
  assert not built.uses_values and built.objective.name == 'detached'
  assert config.rollout.group_size == 8
  """,
  documented=True,
)

_CLIP_RULE = Addition(
  tuple(adding_an_algorithm_test.steps()),
  """
  from stppo_jax.commands.flags import configuration
  from stppo_jax.rl import algorithm

  config = configuration.parse(
    ['--config=configs/quickstart.py:log_ppo'], workdir=False
  ).config
  built = algorithm.build_algorithm(config.algorithm.to_dict())
  assert built.bounds.name == 'logarithmic'
  assert config.algorithm.bounds.width == 0.2
  """,
  documented=True,
)

_ENVIRONMENT = Addition(
  tuple(adding_an_environment_test.steps('stppo_jax')),
  """
  from stppo_jax import types
  from stppo_jax.commands.flags import configuration
  from stppo_jax.envs import environments
  from tests.rollout import dialogues

  flags = ['--config=configs/base.py', '--config.env.name=guess']
  flags.append('--config.env.max_turns=2')
  config = configuration.parse(flags, workdir=False).config
  kind = environments.find(config.env.name)
  say = lambda *texts: [f'<answer>{text}</answer>' for text in texts]
  trajectories = dialogues.collect_scripts(
    [say('5', '9', '7'), say('x', '8', '8')],
    kind.from_options(config.env.to_dict(), None),
    [types.Question('1', 'Below ten.', ('7',), 'numbers')],
    group_size=2,
    max_length=300,
  )
  assert [t.rewards['guessed'] for t in trajectories] == [1.0, 0.0]
  hints = [dialogues.Letters().decode(turn.observation_ids)
           for turn in trajectories[0].turns]
  assert hints == ['\\nIt is larger.\\n', '\\nIt is smaller.\\n', '']
  assert trajectories[1].turns[0].action == 'invalid'
  assert kind.statistics(trajectories) == {'env/number_of_guesses': 3.0}
  """,
)

_DIALECT = Addition(
  (
    Insertion(
      'stppo_jax/retrieval/dialects.py',
      'DIALECTS: Mapping[str, Dialect] = {',
      """
        'find': dataclasses.replace(
          _SEARCH_R1, path='/find', queries='find', topk='at_most', scores=''
        ),
      """,
    ),
  ),
  """
  import json
  from stppo_jax.commands.flags import configuration
  from stppo_jax.retrieval import dialects

  flags = ['--config=configs/base.py', '--config.retrieval.dialect=find']
  flags.append('--config.retrieval.url=http://localhost:1')
  config = configuration.parse(flags, workdir=False).config
  dialect = dialects.DIALECTS[config.retrieval.dialect]
  assert dialect.body(['lake 7'], 2) == {'find': ['lake 7'], 'at_most': 2}
  document = {'id': '7', 'contents': '"Lake 7"\\nIt is 7 km long.'}
  reply = json.dumps({'result': [[{'document': document, 'score': 0.5}]]})
  ((passage,),) = dialect.read(reply.encode(), 1)
  assert (passage.title, passage.score) == ('Lake 7', 0.5)
  """,
)

_MODEL = Addition(
  (
    Insertion(
      'stppo_jax/models/config.py',
      'ARCHITECTURES: Mapping[str, _Architecture] = {',
      "'plain_moe': _Architecture('PlainMoe', False, False, True),\n",
    ),
  ),
  """
  from stppo_jax.models import config as model_config
  from stppo_jax.models.hf import names

  hf = {
    'model_type': 'plain_moe',
    'vocab_size': 16,
    'hidden_size': 8,
    'intermediate_size': 16,
    'num_hidden_layers': 1,
    'num_attention_heads': 2,
    'num_experts': 4,
    'num_experts_per_tok': 2,
    'moe_intermediate_size': 8,
  }
  config = model_config.ModelConfig.from_hf(
    hf, dtype='float32', remat='none', scan_unroll=1
  )
  assert hf.items() <= config.to_hf().items()
  tensors = {entry.hf_name for entry in names.entries(config)}
  assert 'model.layers.0.mlp.experts.3.up_proj.weight' in tensors
  assert 'model.layers.0.self_attn.q_norm.weight' not in tensors
  """,
)

_KEY = Addition(
  (
    Insertion(
      'configs/base.py',
      "'name': 'search',  # a key of ENVIRONMENTS in envs/environments.py",
      "'greeting': '',  # printed before the configuration\n",
    ),
    Insertion(
      'configs/schema.py',
      "'env.name': _one_of(*environments.ENVIRONMENTS),",
      "'env.greeting': settings.Rule(str.islower, 'lower case'),\n",
    ),
    Insertion(
      'stppo_jax/commands/config.py',
      'arguments = configuration.parse(argv, workdir=False)',
      'print(arguments.config.env.greeting)\n',
    ),
  ),
  """
  import contextlib
  import io
  from stppo_jax.commands import config
  from stppo_jax.commands.flags import configuration

  flags = ['--config=configs/base.py', '--config.env.greeting=hello']
  with contextlib.redirect_stdout(io.StringIO()) as output:
    config.main(flags)
  lines = output.getvalue().splitlines()
  assert lines[0] == 'hello' and "env.greeting = 'hello'" in lines
  try:
    config.main([*flags, '--config.env.greeting=GOOD'])
  except configuration.ConfigurationError as error:
    assert 'env.greeting' in str(error) and 'lower case' in str(error)
  else:
    raise AssertionError('the rule was not checked')
  """,
)


def _copy(root: pathlib.Path) -> None:
  for name in ('stppo_jax', 'configs', 'docs', 'tests'):
    shutil.copytree(_ROOT / name, root / name, symlinks=True)
  shutil.copy2(_ROOT / 'README.md', root)
  (root / 'assets').symlink_to(_ROOT / 'assets')


def _changed(root: pathlib.Path) -> set[str]:
  """Returns the files that differ from the repository's."""
  found = set()
  for path in [*root.rglob('*.py'), *root.rglob('*.md')]:
    name = path.relative_to(root)
    if name.parts[:2] == ('stppo_jax', 'configs'):
      continue  # a link
    original = _ROOT / name
    if not original.exists() or original.read_bytes() != path.read_bytes():
      found.add(str(name))
  return found


def _run(program: str, root: pathlib.Path) -> str:
  """Returns the output of a Python program in the copy."""
  done = subprocess.run(
    [sys.executable, '-c', program],
    cwd=root,
    env=dict(os.environ, PYTHONPATH=str(root), JAX_NUM_CPU_DEVICES='1'),
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.mark.parametrize(
  ('addition', 'files'),
  [
    (
      _ALGORITHM,
      {
        'configs/algorithms.py',
        'docs/texts/algorithms.py',
        'README.md',
        # Written by `make docs`.
        'docs/algorithms.md',
      },
    ),
    (
      _CLIP_RULE,
      {
        'stppo_jax/rl/bounds.py',
        'configs/algorithms.py',
        'docs/texts/policy.py',
        'docs/texts/algorithms.py',
        'tests/rl/loss_twin.py',
        'tests/rl/bounds_test.py',
        'README.md',
        # Written by `make docs`.
        'docs/algorithms.md',
        'docs/choices/bounds.md',
      },
    ),
    (
      _ENVIRONMENT,
      {'stppo_jax/envs/guess.py', 'stppo_jax/envs/environments.py'},
    ),
    (_DIALECT, {'stppo_jax/retrieval/dialects.py'}),
    (_MODEL, {'stppo_jax/models/config.py'}),
    (
      _KEY,
      {
        'configs/base.py',
        'configs/schema.py',
        'stppo_jax/commands/config.py',
      },
    ),
  ],
  ids=['algorithm', 'clip_rule', 'environment', 'dialect', 'model', 'key'],
)
def test_an_addition_touches_these_files_and_works(addition, files, tmp_path):
  _copy(tmp_path)
  for insertion in addition.insertions:
    insertion.apply(tmp_path)
  program = textwrap.dedent(addition.program) + "\nprint('used')\n"
  if addition.documented:
    program = _MAKE_DOCS + program
  assert _run(program, tmp_path).endswith('used\n')
  assert _changed(tmp_path) == files
