"""The archive of a run has what its workers need, and they can unpack it."""

import io
import os
import subprocess
import sys
import tarfile

import pytest
import yaml

from launch import source as source_lib
from launch import submit
from tests import processes
from tests.launch import schemas
from tests.training import runs

_MINE = """
import helpers
from stppo_jax.configs import quickstart

def get_config(algorithm='st_ppo'):
  config = quickstart.get_config(algorithm)
  config.num_steps = helpers.STEPS
  config.env.reward_function = 'rewards:brief'
  config.env.prompt_template = 'prompts/mine.txt'
  return config
"""
_REWARDS = """
import helpers

def brief(question, texts, scores):
  return scores['em'] * helpers.STEPS
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
  """Returns the folder of a user, which is no clone, with a config."""
  folder = tmp_path / 'here'
  (folder / 'prompts').mkdir(parents=True)
  (folder / 'mine.py').write_text(_MINE)
  (folder / 'helpers.py').write_text('STEPS = 7\n')
  (folder / 'rewards.py').write_text(_REWARDS)
  (folder / 'diary.py').write_text('PRIVATE = 1\n')
  prompt = runs.REPO / 'configs' / 'prompts' / 'quickstart.txt'
  (folder / 'prompts' / 'mine.txt').write_text(prompt.read_text())
  return folder


_JOBSET = [
  *('jobset', '--image=i', '--accelerator=tpu-v6e-slice', '--topology=4x4'),
  '--workdir=gs://lab/run',
]


@pytest.mark.slow
def test_the_config_of_a_user_runs_from_what_has_travelled(here, tmp_path):
  """The pod's own command unpacks the archive that kubectl is given."""
  kubectl = tmp_path / 'bin' / 'kubectl'
  kubectl.parent.mkdir()
  kubectl.write_text(f'#!/bin/sh\ncat >{tmp_path}/given\n')
  kubectl.chmod(0o755)
  done = subprocess.run(
    [sys.executable, '-m', 'launch.submit', *_JOBSET, '--config=mine.py'],
    cwd=here,
    env=os.environ
    | {'PYTHONPATH': str(runs.REPO), 'PATH': f'{kubectl.parent}:/usr/bin:/bin'},
  )
  assert done.returncode == 0
  config_map, jobset = yaml.safe_load_all((tmp_path / 'given').read_text())
  (tmp_path / 'source.tar.bz2').write_bytes(schemas.archive(config_map))
  job = jobset['spec']['replicatedJobs'][0]['template']['spec']
  (container,) = job['template']['spec']['containers']
  _, _, text, _ = container['command']
  folder = tmp_path / 'worker'
  text = text.replace('/tmp/source', str(folder)).replace(
    '/source/', f'{tmp_path}/'
  )
  text = text.replace('/opt/stppo_jax', str(runs.REPO))
  text, _, end = text.rpartition('exec bash ')
  assert end == 'launch/run.sh "$@"\n'
  subprocess.run(['bash', '-euc', text], check=True)
  names = {str(x.relative_to(folder)) for x in folder.glob('*')}
  assert {'mine.py', 'helpers.py', 'rewards.py', 'prompts'} < names
  assert 'diary.py' not in names and 'tests' not in names
  environment = {x: y for x, y in os.environ.items() if x != 'PYTHONPATH'}
  words = '-m', 'stppo_jax', 'config', *container['args'][:1]
  done = processes.python(*words, cwd=folder, env=environment)
  assert done.returncode == 0, done.stderr
  assert 'num_steps = 7' in done.stdout
  # It is found in the image, through the link.
  assert f"model.path = '{folder}/" in done.stdout
  assert (folder / 'stppo_jax' / 'assets' / 'quickstart').is_dir()


def test_equal_sources_have_one_name_and_others_another(here, monkeypatch):
  monkeypatch.chdir(here)
  first, again = (
    source_lib.pack('mine.py', {}, assets=False) for _ in range(2)
  )
  assert first == again
  (here / 'mine.py').write_text(_MINE + '\n')
  assert source_lib.pack('mine.py', {}, assets=False).name != first.name
  with tarfile.open(fileobj=io.BytesIO(first.data)) as archive:
    names = archive.getnames()
    diff = archive.extractfile('source.diff')
    assert diff is not None
    commit = diff.read().split()[0].decode()
  assert len(names) == len(set(names))
  assert not any(x.startswith('/') or '..' in x for x in names)
  words = ['git', '-C', runs.REPO, 'rev-parse', 'HEAD']
  head = subprocess.run(words, capture_output=True, text=True)
  assert head.returncode or commit == head.stdout.strip()


def test_it_is_unpacked_once(here, tmp_path, monkeypatch):
  monkeypatch.chdir(here)
  paths = {'env.prompt_template': 'prompts/mine.txt'}
  source = source_lib.pack('mine.py', paths, assets=False)
  folder = source_lib.unpack(source, tmp_path / 'sources')
  assert (folder / 'prompts' / 'mine.txt').exists()
  assert os.access(folder / 'launch' / 'run.sh', os.X_OK)
  assert (folder / 'stppo_jax' / 'configs' / 'base.py').is_file()
  (folder / 'mine.py').write_text('kept')
  assert source_lib.unpack(source, tmp_path / 'sources') == folder
  assert (folder / 'mine.py').read_text() == 'kept'


@pytest.mark.parametrize(
  ('path', 'is_good'),
  [
    ('/shared/qwen', True),
    ('gs://lab/qwen', True),
    ('assets/quickstart', True),
    ('Qwen/Qwen2.5-0.5B', True),
    ('models/small/qwen', False),
    ('../qwen', False),
  ],
)
def test_paths_of_workers_are_checked_for_form(path, is_good, capsys):
  words = [*_JOBSET, '--config=quickstart', f'--config.model.path={path}']
  assert submit.main([*words, '--dry_run']) == (0 if is_good else 2)
  err = capsys.readouterr().err
  assert is_good or err.startswith(f'--config.model.path={path}: must be')


def test_a_config_elsewhere_travels_under_its_name(tmp_path, capsys):
  path = tmp_path / 'elsewhere.py'
  path.write_text(
    'from stppo_jax.configs import quickstart\n'
    'get_config = quickstart.get_config\n'
  )
  words = [*_JOBSET, f'--config={path}:gspo', '--dry_run']
  assert submit.main(words) == 0
  assert '"--config=elsewhere.py:gspo"' in capsys.readouterr().out
  source = source_lib.pack(f'{path}:gspo', {}, assets=False)
  with tarfile.open(fileobj=io.BytesIO(source.data)) as archive:
    assert 'elsewhere.py' in archive.getnames()
