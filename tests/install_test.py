"""The installed package runs from anywhere, beside modules of its user.

What `pip install .` would install is copied: the package, with the data files
that pyproject.toml lists. (Building would download setuptools.)
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tomllib

import pytest

import stppo_jax

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
  for folder, _, names in os.walk(_ROOT / 'stppo_jax', followlinks=True):
    for path in (pathlib.Path(folder, name) for name in names):
      if path.suffix == '.py' or any(path in files for files in kept.values()):
        target = site / path.relative_to(_ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
  return site


def _stppo(site, *arguments, cwd):
  """Runs the console script as its installer would write it."""
  module, _, function = _PROJECT['project']['scripts']['stppo'].partition(':')
  script = cwd.parent / 'stppo'
  script.write_text(
    f'import sys\nfrom {module} import {function}\nsys.exit({function}())\n',
    encoding='utf-8',
  )
  done = subprocess.run(
    [sys.executable, str(script), *arguments],
    cwd=cwd,
    env=os.environ | {'PYTHONPATH': str(site)},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_shipped_configs_and_those_of_the_user_are_found(site, tmp_path):
  folder = tmp_path / 'elsewhere'
  (folder / 'configs').mkdir(parents=True)
  (folder / 'configs' / '__init__.py').touch()
  (folder / 'configs' / 'sizes.py').write_text('STEPS = 7\n')
  (folder / 'configs' / 'mine.py').write_text(_MINE)
  output = _stppo(site, 'config', '--config=quickstart:gspo', cwd=folder)
  assert f"model.path = '{site}/stppo_jax/assets/quickstart'" in output
  output = _stppo(site, 'config', '--config=configs/mine.py', cwd=folder)
  assert 'num_steps = 7' in output
  version = _stppo(site, '--version', cwd=folder)
  assert version == f'stppo_jax {stppo_jax.__version__}\n'


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
