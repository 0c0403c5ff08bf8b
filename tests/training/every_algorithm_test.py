"""A killed run of any algorithm resumes as the same run, bit for bit."""

import pytest

from stppo_jax.configs import algorithms
from tests.training import runs

_STEPS = 8


# Two processes trace the programs of each algorithm, which takes long; runs of
# st_ppo that end anywhere are resumed in `interruption_run_test.py`.
@pytest.mark.slow
@pytest.mark.parametrize(
  ('algorithm', 'changes'),
  [
    *((name, {}) for name in algorithms.ALGORITHMS),
    (
      'st_ppo',
      {
        'policy_optimizer__name': 'adamw_bfloat16',
        'value_optimizer__name': 'adafactor',
      },
    ),
    ('turn_ppo', {'policy_optimizer__name': 'muon'}),
  ],
)
def test_four_steps_a_kill_and_four_steps_are_eight_steps(
  tmp_path, algorithm, changes
):
  changes = {'num_steps': _STEPS, 'evaluate__every': 0, **changes}
  changes['algorithm'] = algorithm
  killed, whole = tmp_path / 'killed', tmp_path / 'whole'
  runs.kill_at('updated', '5', *runs.flags(**changes), f'--workdir={killed}')
  assert [line['step'] for line in runs.metrics(killed)] == [1, 2, 3, 4]
  for folder in (killed, whole):
    assert runs.train(folder, **changes) == 0
  runs.assert_same_files(killed, whole, num_steps=_STEPS)
