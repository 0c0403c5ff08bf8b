"""The advice of a plan goes on where the compiler needs more than it says."""

from stppo_jax.analysis import plan as plan_lib
from stppo_jax.analysis import plan_search
from stppo_jax.configs import quickstart
from stppo_jax.parallel import topology


def _planner(config):
  return plan_lib.make(
    config,
    length=config.env.max_length,
    loss_fraction=0.5,
    programs=(),
    topology=topology.find('cpu:8'),
    memory=0.0,
  )


def test_a_run_that_fits_by_the_estimate_alone_gets_a_change():
  config = quickstart.get_config('st_ppo').lock()
  needs = _planner(config).total
  tried = plan_search.advise(config, _planner, memory=2 * needs)
  assert tried is not None and tried.plan is not None
  assert tried.changes and tried.plan.total < needs


def test_nothing_that_fits_is_nothing():
  config = quickstart.get_config('st_ppo').lock()
  assert plan_search.advise(config, _planner, memory=1.0) is None
