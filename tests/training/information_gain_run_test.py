"""Runs whose turns are rewarded for what their observations tell the policy."""

import pytest

from tests.training import runs


@pytest.mark.slow
def test_gains_are_rewards_of_the_first_step(tmp_path):
  means = []
  for weight in (0.0, 1e4):
    folder = tmp_path / str(weight)
    flags = {'num_steps': 1, 'evaluate__every': 0}
    flags |= {'env__rewards__information_gain': weight}
    assert runs.train(folder, algorithm='turn_rloo', **flags) == 0
    (line,) = runs.metrics(folder)
    means.append(line['critic/rewards/mean'])
  # The same dialogues, by a policy that has learned little and knows nothing.
  assert 0 < abs(means[1] - means[0]) < 1e4
