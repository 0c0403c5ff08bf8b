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

from stppo_jax import __main__
from tests.training import runs


def _refused(capsys, *command):
  """Returns the line with which a command is refused."""
  assert __main__.main(list(map(str, command))) == 2
  out, err = capsys.readouterr()
  assert out == '' and err.count('\n') == 1, err
  return err


def test_a_filter_that_no_dialogue_can_pass(finished, capsys):
  line = _refused(capsys, 'view', finished, '--status=complete')
  assert 'completed' in line and 'truncated_length' in line
  line = _refused(capsys, 'view', finished, '--least=2', '--most=1')
  assert line == '--least=2: must not be above --most=1\n'
  line = _refused(capsys, 'view', finished, '--searches=-1')
  assert line.startswith('--searches=-1: must be a non-negative')


def test_a_folder_that_a_tracker_has_left_is_no_package(
  tmp_path, monkeypatch, capsys
):
  (tmp_path / 'trackio').mkdir()
  monkeypatch.syspath_prepend(tmp_path)
  flags = runs.flags(writer__trackers='trackio')
  workdir = tmp_path / 'run'
  line = _refused(capsys, 'train', *flags, f'--workdir={workdir}')
  assert "pip install '.[trackio]'" in line and not workdir.exists()


def test_the_steps_of_the_supervised_start_have_a_key_of_their_own(
  tmp_path, capsys
):
  flags = [*runs.flags(num_steps=7), f'--workdir={tmp_path / "run"}']
  line = _refused(capsys, 'sft', *flags)
  assert line == (
    '--config.num_steps=7: sft does not use it; set sft.num_steps\n'
  )
  assert not (tmp_path / 'run').exists()


def test_a_question_behind_the_last_one(tmp_path, capsys):
  file = tmp_path / 'q.jsonl'
  file.write_text('{"question": "Who?", "answers": ["Ada"]}\n')
  line = _refused(capsys, 'data', 'show', file, '--start=1')
  assert line.endswith(f'--start=1: {file} has 1 questions\n')


def test_a_report_that_is_named_like_the_other_form(finished, tmp_path, capsys):
  out = tmp_path / 't.html'
  line = _refused(capsys, 'report', finished, '--format=md', f'--out={out}')
  assert line == f'--out={out}: must not end in .html with --format=md\n'
  assert not out.exists()


@pytest.mark.parametrize(
  'command',
  [
    'report {run} --out=/proc/x.html',
    'export --workdir={run} --out=/proc/x',
    f'ablate --config={runs.REPO}/studies/collapse.py --workdir=/proc/x',
  ],
)
def test_a_folder_in_which_the_superuser_cannot_write(
  finished, capsys, command
):
  line = _refused(capsys, *command.format(run=finished).split())
  assert '/proc' in line and 'No such file or directory' in line


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


def test_a_table_whose_third_line_is_wrong(tmp_path, capsys):
  file = tmp_path / 'q.csv'
  flags = [f'--root={tmp_path}/data', f'--from_files=test:{file}']
  for text, place in (
    ('Who?,Ada\nWhat?,x,y\n', ':3: expected 2 columns\n'),
    ('\n"Who\nis?",Ada\nWhat?,x,y\n', ':5: expected 2 columns\n'),
    ('Who?,Ada\n"What?,x\n', ':3: unexpected end of data\n'),
    ('Who?,Ada\n"Wh"at?,x\n', ":3: ',' expected after '\"'\n"),
  ):
    file.write_text(f'Question,Answer\n{text}')
    line = _refused(capsys, 'data', 'build', 'bamboogle', *flags)
    assert line == f'{file}{place}'
    assert not (tmp_path / 'data').exists()


@pytest.mark.parametrize(
  ('command', 'expected'),
  [
    (
      'config --config={run}',
      '--config={run}: is a folder; choices: configs/base.py, configs/',
    ),
    ('checkpoint list {run}/no', '{run}/no: no such folder\n'),
    ('doctor foo', 'doctor foo: unknown command; choices: retriever\n'),
    (
      'report http://127.0.0.1:9/run --out={run}/r.html',
      'http://127.0.0.1:9/run: Cannot connect to host 127.0.0.1:9 ',
    ),
  ],
)
def test_what_is_named_is_something_else(finished, capsys, command, expected):
  line = _refused(capsys, *command.format(run=finished).split())
  assert line.startswith(expected.format(run=finished))


def test_a_folder_below_a_file(finished, tmp_path, capsys):
  (tmp_path / 'file').touch()
  out = tmp_path / 'file' / 'x'
  line = _refused(capsys, 'export', f'--workdir={finished}', f'--out={out}')
  assert line == f'--out={out}: {tmp_path}/file exists and is not a folder\n'


def test_more_samples_than_anyone_can_wait_for(capsys):
  flags = [f'--checkpoint={runs.REPO}/assets/quickstart']
  line = _refused(capsys, 'evaluate', *flags, '--samples=99999999999')
  assert line.startswith('--samples=99999999999: must be')


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
  tmp_path, capsys, changes, expected
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
  line = _refused(capsys, 'lab', 'compare', *flags)
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
