"""The installed package runs from anywhere, beside modules of its user.

What `pip install .` would install is copied: the package, with the data files
that pyproject.toml lists. (Building would download setuptools.)
"""

import os
import pathlib
import shutil
import sys
import tomllib

import pytest

import stppo_jax
from tests import processes

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_PROJECT = tomllib.loads((_ROOT / 'pyproject.toml').read_text('utf-8'))
_SETUPTOOLS = _PROJECT['tool']['setuptools']
_MINE = """
from configs import sizes
from stppo_jax.configs import quickstart


def get_config(algorithm='st_ppo'):
  config = quickstart.get_config(algorithm)
  config.num_steps = sizes.STEPS
  return config
"""


@pytest.fixture(scope='module')
def site(tmp_path_factory):
  """Returns a folder into which the package was installed."""
  site = tmp_path_factory.mktemp('site')
  kept = {}
  for package, patterns in _SETUPTOOLS['package-data'].items():
    folder = _ROOT / package.replace('.', '/')
    kept[folder] = {path for p in patterns for path in folder.glob(p)}
  packages = [x.rstrip('*') for x in _SETUPTOOLS['packages']['find']['include']]
  for package in packages:
    for folder, _, names in os.walk(_ROOT / package, followlinks=True):
      for path in (pathlib.Path(folder, name) for name in names):
        is_data = any(path in files for files in kept.values())
        if path.suffix == '.py' or is_data:
          target = site / path.relative_to(_ROOT)
          target.parent.mkdir(parents=True, exist_ok=True)
          shutil.copy(path, target)
  return site


# By launcher, what it needs beside a config.
_SUBMIT = {
  'local': '--workdir=run',
  'slurm': '--workdir=/shared/run --partition=gpu',
  'tpu': (
    '--workdir=gs://lab/run --project=the-lab --zone=us-west4-a '
    '--accelerator=v5litepod-16'
  ),
  'jobset': (
    '--workdir=gs://lab/run --image=i --topology=4x4 '
    '--accelerator=tpu-v6e-slice'
  ),
}


def _stppo(site, *arguments, cwd):
  """Runs the console script as its installer would write it."""
  module, _, function = _PROJECT['project']['scripts']['stppo'].partition(':')
  script = cwd.parent / 'stppo'
  script.write_text(
    f'import sys\nfrom {module} import {function}\nsys.exit({function}())\n',
    encoding='utf-8',
  )
  environment = os.environ | {'PYTHONPATH': str(site)}
  done = processes.python(script, *arguments, cwd=cwd, env=environment)
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_shipped_configs_and_those_of_the_user_are_found(site, tmp_path):
  folder = tmp_path / 'elsewhere'
  (folder / 'configs').mkdir(parents=True)
  (folder / 'configs' / '__init__.py').touch()
  (folder / 'configs' / 'sizes.py').write_text('STEPS = 7\n')
  (folder / 'configs' / 'mine.py').write_text(_MINE)
  # It begins with a config that is shipped.
  output = _stppo(site, 'config', '--config=configs/mine.py', cwd=folder)
  assert f"model.path = '{site}/stppo_jax/assets/quickstart'" in output
  assert 'num_steps = 7' in output
  version = _stppo(site, '--version', cwd=folder)
  assert version == f'stppo_jax {stppo_jax.__version__}\n'


@pytest.mark.parametrize(
  'launcher',
  [
    pytest.param(name, marks=() if name == 'tpu' else pytest.mark.slow)
    for name in _SUBMIT
  ],
)
def test_a_dry_run_needs_no_clone_no_tool_and_no_file_of_the_workers(
  site, tmp_path, launcher
):
  """It does not load jax, which takes longer than all the rest."""
  (tmp_path / 'mine.py').write_text(_MINE.replace('from configs ', ''))
  (tmp_path / 'sizes.py').write_text('STEPS = 7\n')
  words = [
    'launch.submit',
    launcher,
    '--config=mine.py',
    *_SUBMIT[launcher].split(),
  ]
  flags = ['--config.data.name=jsonl', '--config.data.root=/nowhere/data']
  flags += ['--config.data.train=a.jsonl', '--config.data.corpus=b.jsonl']
  flags += ['--config.model.path=gs://lab/qwen']
  if launcher == 'local':  # its files are here
    flags = []
  code = (
    'import runpy, sys\n'
    f'sys.argv = {[*words, *flags, "--dry_run"]}\n'
    'try:\n'
    "  runpy.run_module('launch.submit', run_name='__main__', alter_sys=True)\n"
    'except SystemExit as error:\n'
    "  assert 'jax' not in sys.modules\n"
    '  sys.exit(error.code)\n'
  )
  environment = {'PYTHONPATH': str(site), 'PATH': ''}
  done = processes.python('-c', code, cwd=tmp_path, env=environment)
  assert done.returncode == 0, done.stderr
  assert str(_ROOT) not in done.stdout.replace(sys.executable, '')
  if launcher != 'local':
    assert '--config=mine.py' in done.stdout
    assert 'source-' in done.stdout


@pytest.mark.slow
def test_the_quickstart_runs_from_anywhere_and_keeps_its_programs(
  site, tmp_path, monkeypatch
):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'caches'))
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR')
  folder = tmp_path / 'elsewhere'
  folder.mkdir()
  flags = ['--config=quickstart', '--workdir=run', '--config.num_steps=1']
  flags += ['--config.evaluate.every=0']
  assert 'done.' in _stppo(site, 'train', *flags, cwd=folder)
  assert any((folder / 'run' / 'compiled').iterdir())
  assert not (tmp_path / 'caches' / 'stppo_jax').exists()
