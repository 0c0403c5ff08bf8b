"""A policy learns to play text games from rewards."""

import re
import shlex

import numpy as np
import pytest

from stppo_jax import __main__
from studies import game_critic
from tests.training import runs

# What makes the commands of the study short.
_FEW = [
  '--config.sft.num_steps=2',
  '--config.sft.clean_steps=1',
  '--config.sft.batch_size=8',
  '--config.evaluate.num_questions=8',
  '--config.data.games.count=16',
  '--config.rollout.trajectories_per_step=8',
  '--config.updates.minibatch_size=8',
]
_FEW_STEPS = [
  '--config.num_steps=1',
  '--config.policy_optimizer.warmup_updates=0',
]


@pytest.mark.slow
def test_training_raises_the_share_of_solved_games(tmp_path):
  pytest.importorskip('textworld')
  flags = [f'--config={runs.REPO}/configs/textworld.py:st_ppo']
  flags += ['--config.num_steps=12', '--config.evaluate.every=12']
  assert __main__.main(['train', *flags, f'--workdir={tmp_path}']) == 0
  lines = runs.metrics(tmp_path)
  key = 'val/solved/games'
  assert lines[-1][key] > lines[0][key] > 0.1
  solved = [line['score/solved/mean'] for line in lines[1:]]
  assert np.mean(solved[-3:]) > np.mean(solved[:3]) + 0.1


@pytest.mark.slow
def test_the_critic_of_the_study_is_handed_from_run_to_run(
  tmp_path, monkeypatch
):
  pytest.importorskip('textworld')
  monkeypatch.chdir(tmp_path)
  text = game_critic.__doc__.replace('\\\n', ' ')
  commands = re.findall(r'^ +python -m stppo_jax (.+)$', text, re.MULTILINE)
  assert len(commands) == 5
  for command in commands:
    words = shlex.split(command.replace('studies/', f'{runs.REPO}/studies/'))
    few = _FEW if words[0] == 'sft' else [*_FEW, *_FEW_STEPS]
    assert __main__.main([*words, *few]) == 0, command
  started, warm, learned = (
    runs.weights(tmp_path / 'runs' / name)
    for name in ('game_start', 'game_critic_3', 'game_policy')
  )
  assert started == warm != learned
  means = [
    next(
      line['critic/values/mean']
      for line in runs.metrics(tmp_path / 'runs' / name)
      if 'critic/values/mean' in line
    )
    for name in (*(f'game_critic_{n}' for n in (1, 2, 3)), 'game_policy')
  ]
  # A new critic says .5 everywhere.
  assert means[0] == 0.5 and 0.5 not in means[1:]
