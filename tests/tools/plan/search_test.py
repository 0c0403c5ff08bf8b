"""The advice of a plan goes on where the compiler needs more than it says."""

import pytest

from stppo_jax import exits
from stppo_jax.configs import quickstart
from stppo_jax.parallel import topology
from stppo_jax.tools.plan import plan as plan_lib
from stppo_jax.tools.plan import search

_CONFIG = quickstart.get_config('st_ppo').lock()


def _planner(config):
  return plan_lib.make(
    config,
    length=config.env.max_length,
    loss_fraction=0.5,
    programs=(),
    topology=topology.find('cpu:8'),
    gib=0.0,
  )


@pytest.fixture(scope='module')
def needs():
  return _planner(_CONFIG).total


def test_a_run_that_fits_by_the_estimate_alone_gets_a_change(needs):
  tried = search.advise(_CONFIG, _planner, memory=2 * needs)
  assert tried is not None and tried.plan is not None
  assert tried.changes and tried.plan.total < needs


def test_a_change_that_is_refused_is_no_advice(needs):
  def planner(other):
    if other.rollout.slots != _CONFIG.rollout.slots:
      raise exits.Misconfigured('no')
    return _planner(other)

  tried = search.advise(_CONFIG, planner, memory=2 * needs)
  assert tried is not None and tried.changes
  assert 'rollout.slots' not in tried.changes


def test_nothing_that_fits_is_nothing():
  assert search.advise(_CONFIG, _planner, memory=1.0) is None
