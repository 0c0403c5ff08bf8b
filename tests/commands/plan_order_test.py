"""Plans for eight devices of a CPU put runs in the order of their step times.

The seconds of such a plan are good for comparing configs only: the limits of a
CPU are a guess.
"""

import pytest

from stppo_jax.parallel import topology
from stppo_jax.tools.plan import plan
from tests.training import runs

# The second one only makes more updates, the third one also decodes and
# annotates longer. Steps differ by more than what a busy machine adds to them.
_CHANGES = {
  'small': {},
  'more epochs': {'updates__num_epochs': 6},
  'larger': {
    'updates__num_epochs': 6,
    'model__intermediate_size': 1024,
    'model__num_layers': 6,
  },
}


def _changes(name):
  sizes = {
    'model__hidden_size': 128,
    'model__intermediate_size': 256,
    'model__num_layers': 2,
    'evaluate__every': 0,
    'checkpoint__every': 100,
    'sft__before_training': False,
  }
  return {**sizes, **_CHANGES[name]}


def _planned(name):
  config = runs.config(**_changes(name))
  made = plan.make(
    config, length=128, loss_fraction=0.125, topology=topology.find('cpu:8')
  )
  return made.seconds[1]


def _measured(name, workdir):
  """Returns the seconds of the fastest step, of those after the first."""
  assert runs.train(workdir, **_changes(name)) == 0
  lines = [x for x in runs.metrics(workdir) if 'timing_s/step' in x]
  assert len(lines) == runs.STEPS
  return min(line['timing_s/step'] for line in lines[1:])


@pytest.mark.slow
def test_plans_and_measurements_have_one_order(tmp_path):
  planned = [_planned(name) for name in _CHANGES]
  measured = [_measured(name, tmp_path / name) for name in _CHANGES]
  for shorter, longer in zip(planned, planned[1:]):
    assert longer > 1.3 * shorter, planned
  assert measured == sorted(measured), (planned, measured)
