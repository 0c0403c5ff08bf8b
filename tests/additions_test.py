"""The table of additions in docs/architecture.md, each made in a copy and used.

Every addition says which lines it inserts into which files. The files that
differ afterwards, with those that are generated, are the ones that the table
names, and a program in the changed copy uses what was added.
"""

import os
import pathlib
import shutil
import textwrap

import pytest

from tests import additions
from tests import additions_to_rl
from tests import processes

_ROOT = pathlib.Path(__file__).resolve().parent.parent


# What a person runs after it, in the process of the program.
_GENERATE = """
import runpy
runpy.run_path('docs/make_algorithms.py', run_name='__main__')
runpy.run_module('tests.configs.resolved', run_name='__main__')
"""
_OF_ALGORITHMS = {
  'configs/algorithms.py',
  'docs/texts/algorithms.md',
  'README.md',
  # Generated.
  'docs/algorithms.md',
  'tests/configs/golden/algorithms.txt',
}


def _copy(root: pathlib.Path) -> None:
  for name in ('stppo_jax', 'configs', 'studies', 'docs', 'tests'):
    shutil.copytree(_ROOT / name, root / name, symlinks=True)
  shutil.copy2(_ROOT / 'README.md', root)
  (root / 'assets').symlink_to(_ROOT / 'assets')


def _changed(root: pathlib.Path) -> set[str]:
  """Returns the files that differ from the repository's."""
  found = set()
  for path in (
    x for end in ('py', 'md', 'txt') for x in root.rglob(f'*.{end}')
  ):
    name = path.relative_to(root)
    if name.parts[:2] == ('stppo_jax', 'configs'):
      continue  # a link
    if name.parts[0].startswith('.'):
      continue  # such as .pytest_cache
    original = _ROOT / name
    if not original.exists() or original.read_bytes() != path.read_bytes():
      found.add(str(name))
  return found


def _run(program: str, root: pathlib.Path) -> str:
  """Returns the output of a Python program in the copy."""
  environment = dict(PYTHONPATH=str(root), JAX_NUM_CPU_DEVICES='1')
  done = processes.python('-c', program, cwd=root, env=os.environ | environment)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def _add(root, *chosen) -> None:
  """Makes additions in a copy, and runs the programs that use them."""
  _copy(root)
  program = ''
  for addition in chosen:
    for insertion in addition.insertions:
      path = _ROOT / insertion.path
      if path.exists() and insertion.code in path.read_text('utf-8'):
        pytest.skip('this repository has it: a page was followed')
      insertion.apply(root)
    program += textwrap.dedent(addition.program)
  if any(addition.documented for addition in chosen):
    program = _GENERATE + program
  assert _run(program + "\nprint('used')\n", root).endswith('used\n')


@pytest.mark.parametrize(
  ('addition', 'axis', 'files'),
  [
    (additions_to_rl.ALGORITHM, '', ''),
    *(
      pytest.param(*row, marks=pytest.mark.slow)
      for row in (
        (
          *(additions_to_rl.CLIP_RULE, 'bounds'),
          'configs/defaults.py stppo_jax/rl/bounds.py tests/rl/loss_twin.py '
          'tests/rl/bounds_test.py',
        ),
        (
          *(additions_to_rl.OBJECTIVE, 'objective'),
          'configs/defaults.py stppo_jax/rl/objectives.py '
          'tests/rl/loss_twin.py tests/rl/objectives_test.py',
        ),
        (
          *(additions_to_rl.CORRECTION, 'correction'),
          'stppo_jax/rl/corrections.py tests/rl/loss_twin.py '
          # The last one is generated: its options are keys.
          'tests/rl/corrections_test.py tests/configs/golden/base.txt',
        ),
        (
          *(additions_to_rl.ESTIMATOR, 'advantage'),
          'configs/defaults.py stppo_jax/rl/group_advantages.py '
          'stppo_jax/rl/estimator_needs.py tests/rl/group_advantages_test.py',
        ),
      )
    ),
  ],
  ids=['algorithm', 'clip_rule', 'objective', 'correction', 'estimator'],
)
def test_an_addition_touches_these_files_and_works(
  addition, axis, files, tmp_path
):
  _add(tmp_path, addition)
  pages = {f'docs/texts/{axis}.md', f'docs/choices/{axis}.md'} if axis else {}
  assert _changed(tmp_path) == _OF_ALGORITHMS.union(files.split(), pages)


def test_other_additions_touch_these_files_and_work(tmp_path):
  """None of them needs a generated page or record."""
  chosen = additions.MODEL, additions.ENVIRONMENT, additions.DIALECT
  _add(tmp_path, *chosen, additions.KEY)
  assert _changed(tmp_path) == {
    *('configs/base.py', 'configs/schema.py', 'stppo_jax/commands/config.py'),
    *('stppo_jax/envs/guess.py', 'stppo_jax/envs/environments.py'),
    'stppo_jax/retrieval/dialects.py',
    *('stppo_jax/models/hf/families.py', 'stppo_jax/models/hf/fields.py'),
    *('tests/golden/make_models.py', 'tests/models/family_parity_test.py'),
    'docs/models.md',
  }
