"""A run with a reward function of the user, from its start to its end."""

import pytest

from tests.training import runs

_MODULE = """
import pathlib

calls = 0


def turns(question, texts, scores):
  global calls
  calls += 1
  # Fails in the second step, after the trial call and the 16 of the first.
  if calls > 17 and not pathlib.Path('mended').exists():
    raise RuntimeError('not mended')
  return len(texts)
"""


@pytest.mark.slow
def test_a_run_is_rewarded_saved_when_the_function_fails_and_resumed(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'turn_rewards.py').write_text(_MODULE, encoding='utf-8')
  changes = {
    'num_steps': 2,
    'env__reward_function': 'turn_rewards:turns',
    'env__rewards__exact_match': 0.0,
    'evaluate__every': 0,
    'checkpoint__every': 100,
  }
  workdir = tmp_path / 'run'
  assert runs.train(workdir, **changes) == 2
  error = capsys.readouterr().err
  assert 'env.reward_function=turn_rewards:turns: ' in error
  assert 'RuntimeError: not mended' in error and 'Traceback' not in error
  assert [line['step'] for line in runs.metrics(workdir)] == [1]

  (tmp_path / 'mended').touch()
  assert runs.train(workdir, **changes) == 0
  lines = runs.metrics(workdir)
  assert [line['step'] for line in lines] == [1, 2]
  for line in lines:
    assert line['reward/function/mean'] == line['num_turns/mean'] > 0
    assert line['critic/score/mean'] == line['num_turns/mean']
