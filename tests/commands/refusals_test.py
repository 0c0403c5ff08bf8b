"""What commands are asked in vain: one line, exit code 2, nothing written."""

import os
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


def test_a_folder_that_a_tracker_has_left_is_no_package(
  tmp_path, monkeypatch, capsys
):
  (tmp_path / 'trackio').mkdir()
  monkeypatch.syspath_prepend(tmp_path)
  flags = runs.flags(writer__trackers='trackio')
  workdir = tmp_path / 'run'
  line = _refused(capsys, 'train', *flags, f'--workdir={workdir}')
  assert "pip install '.[trackio]'" in line and not workdir.exists()


def test_a_question_behind_the_last_one(tmp_path, capsys):
  file = tmp_path / 'q.jsonl'
  file.write_text('{"question": "Who?", "answers": ["Ada"]}\n')
  line = _refused(capsys, 'data', 'show', file, '--start=1')
  assert line.endswith(f'--start=1: {file} has 1 questions\n')


def test_a_report_that_is_named_like_the_other_form(finished, tmp_path, capsys):
  out = tmp_path / 't.html'
  line = _refused(capsys, 'report', finished, '--format=md', f'--out={out}')
  assert line.startswith(f'--out={out}: must not end in .html')
  assert not out.exists()


def test_a_folder_below_a_file(finished, tmp_path, capsys):
  (tmp_path / 'file').touch()
  out = tmp_path / 'file' / 'x'
  line = _refused(capsys, 'export', f'--workdir={finished}', f'--out={out}')
  assert line == f'--out={out}: {tmp_path}/file exists and is not a folder\n'


def test_more_samples_than_anyone_can_wait_for(capsys):
  flags = [f'--checkpoint={runs.REPO}/assets/quickstart']
  line = _refused(capsys, 'evaluate', *flags, '--samples=99999999999')
  assert line.startswith('--samples=99999999999: must be')


def test_a_log_probability_above_0(tmp_path, capsys):
  file = tmp_path / 'batch.npz'
  one = np.ones((1, 2), np.int32)
  logprobs = np.array([[-1.0, 0.5]])
  np.savez(
    file,
    turn_ids_BL=one,
    loss_mask_BL=one,
    logprobs_BL=logprobs,
    old_logprobs_BL=-1.0 * one,
    advantages_BL=1.0 * one,
    entropy_BL=1.0 * one,
  )
  line = _refused(
    capsys, 'lab', 'score', f'--batch={file}', '--algorithm=token_ppo'
  )
  assert 'logprobs_BL: above 0' in line and '[0, 1]' in line


@pytest.mark.slow
def test_a_terminal_that_knows_ascii_only(finished):
  process = subprocess.run(
    [sys.executable, '-m', 'stppo_jax', 'view', str(finished), '--number=1'],
    env=dict(os.environ, PYTHONIOENCODING='ascii'),
    cwd=runs.REPO,
    capture_output=True,
    check=False,
  )
  assert (process.returncode, process.stderr) == (0, b'')
