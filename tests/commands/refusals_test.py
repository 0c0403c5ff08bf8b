"""Commands refuse in one line, with exit code 2, and write nothing."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.training import runs


def test_a_folder_that_a_tracker_has_left_is_no_package(
  tmp_path, monkeypatch, refused
):
  (tmp_path / 'trackio').mkdir()
  monkeypatch.syspath_prepend(tmp_path)
  flags = runs.flags(writer__trackers='trackio')
  workdir = tmp_path / 'run'
  line = refused('train', *flags, f'--workdir={workdir}')
  assert "pip install '.[trackio]'" in line and not workdir.exists()


def _mounted(folder, options, *command):
  """Returns a process in whose eyes a file system is mounted on a folder.

  Its standard output ends with what the folder holds, and its exit code.
  """
  folder.mkdir(exist_ok=True)
  place = shlex.quote(str(folder))
  shell = f'mount -t tmpfs -o {options} tmpfs {place} && {{ "$@"; code=$?; '
  shell += f'ls -A {place}; exit $code; }}'
  start = ['unshare', '--mount', '--map-root-user', 'sh', '-c', shell, 'sh']
  if subprocess.run([*start, 'true'], capture_output=True).returncode:
    pytest.skip('this user cannot mount')
  return subprocess.run(
    [*start, sys.executable, '-m', 'stppo_jax', *map(str, command)],
    cwd=runs.REPO,
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.slow
def test_a_mount_that_is_read_only(finished, tmp_path):
  place = tmp_path / 'mount'
  out = place / 'x'
  for command in (
    ['evaluate', f'--checkpoint={finished}', f'--out={out}'],
    ['ablate', '--config=studies/collapse.py', f'--workdir={out}'],
  ):
    process = _mounted(place, 'ro', *command)
    assert (process.returncode, process.stdout) == (2, '')
    assert process.stderr == f'{out}: Read-only file system\n'


@pytest.mark.slow
def test_a_report_on_a_full_disk_leaves_nothing(finished, tmp_path):
  place = tmp_path / 'mount'
  for form in ('html', 'md'):
    flags = [f'--format={form}', f'--out={place}/r.{form}']
    process = _mounted(place, 'size=16k', 'report', finished, *flags)
    assert (process.returncode, process.stdout) == (75, '')
    assert process.stderr.startswith(f'{place}/')
    assert process.stderr.endswith(': No space left on device\n')


def test_a_table_whose_third_line_is_wrong(tmp_path, refused):
  file = tmp_path / 'q.csv'
  flags = [f'--root={tmp_path}/data', f'--from_files=test:{file}']
  for text, place in (
    ('Who?,Ada\nWhat?,x,y\n', ':3: expected 2 columns\n'),
    ('\n"Who\nis?",Ada\nWhat?,x,y\n', ':5: expected 2 columns\n'),
    ('Who?,Ada\n"What?,x\n', ':3: unexpected end of data\n'),
    ('Who?,Ada\n"Wh"at?,x\n', ":3: ',' expected after '\"'\n"),
  ):
    file.write_text(f'Question,Answer\n{text}')
    line = refused('data', 'build', 'bamboogle', *flags)
    assert line == f'{file}{place}'
    assert not (tmp_path / 'data').exists()


@pytest.mark.slow
def test_an_evaluation_of_many_samples_ends_at_a_signal(finished):
  flags = [f'--checkpoint={finished}', '--samples=10000']
  process = runs.start('evaluate', *flags)
  lines = iter(process.stderr.readline, '')
  assert next(line for line in lines if ' dialogues' in line)
  process.send_signal(signal.SIGTERM)
  _, err = process.communicate(timeout=30)
  assert process.returncode == 75
  assert 'SIGTERM: ending; ' in err


@pytest.mark.parametrize(
  ('changes', 'expected'),
  [
    ({'logprobs_BL': [[-1.0, 0.5]]}, 'logprobs_BL: above 0; 1 entries, the fi'),
    ({'loss_mask_BL': [[0, 0]]}, 'loss_mask_BL: 0 everywhere, so there is no'),
  ],
)
def test_a_batch_that_no_policy_can_have_made(
  tmp_path, refused, changes, expected
):
  file = tmp_path / 'batch.npz'
  one = np.ones((1, 2), np.int32)
  arrays = {
    'turn_ids_BL': one,
    'loss_mask_BL': one,
    'logprobs_BL': -1.0 * one,
    'old_logprobs_BL': -1.0 * one,
    'advantages_BL': 1.0 * one,
    'entropy_BL': 1.0 * one,
  }
  np.savez(file, **(arrays | changes))
  flags = [f'--batch={file}', '--algorithms=token_ppo,turn_ppo']
  line = refused('lab', 'compare', *flags)
  assert line.startswith(f'--batch={file}: {expected}')


@pytest.mark.slow
def test_a_terminal_that_knows_ascii_only(finished, tmp_path):
  run = shutil.copytree(finished, tmp_path / 'run')
  (record, *_) = runs.trajectories(run, runs.STEPS)
  record['question'] = 'Où est Évian?'
  path = run / f'trajectories-{runs.STEPS:06d}.jsonl'
  path.write_text(json.dumps(record) + '\n')
  process = subprocess.run(
    [sys.executable, '-m', 'stppo_jax', 'view', str(run), '--number=1'],
    env=dict(os.environ, PYTHONIOENCODING='ascii'),
    cwd=runs.REPO,
    capture_output=True,
    check=False,
  )
  assert (process.returncode, process.stderr) == (0, b'')
  assert b'O\\xf9 est \\xc9vian?' in process.stdout
