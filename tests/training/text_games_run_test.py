"""A policy learns to play text games from rewards."""

import numpy as np
import pytest

from stppo_jax import __main__
from tests.training import runs


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
