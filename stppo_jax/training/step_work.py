"""Collects the sizes from which `roofline` computes the work of a step."""

from collections.abc import Mapping
import math

import jax
import jax.numpy as jnp

from stppo_jax.learner import learner as learner_lib
from stppo_jax.models import roofline
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import publish
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.tools.plan import memory as plan_memory
from stppo_jax.training.checks import batch_sizes


def build(
  config,
  learner: learner_lib.Learner,
  placement: publish.Placement | None,
  engine: Mapping[str, int],
  *,
  length: int,
  losses: int,
) -> roofline.Work:
  """Returns the sizes of a step.

  Args:
    config: the config of the run.
    learner: its learner.
    placement: the devices that decode; None with a remote engine.
    engine: the bytes of the engine on a device, see `plan_memory.engine_sizes`.
    length: the tokens of a row.
    losses: the tokens of a row that are trained on.
  """
  rollout, updates = config.rollout, config.updates
  shape = learner.policy.config
  algorithm = algorithm_lib.build_algorithm(config.algorithm)
  values = config.model.value_backbone if algorithm.uses_values else 'none'
  weights = sum(
    x.size for x in jax.tree.leaves(learner.policy.abstract_params['layers'])
  )
  trained = weights
  if config.model.lora.rank:
    state, _ = learner.abstract_start()
    trained = sum(x.size for x in jax.tree.leaves(state.policy.params))
  steps = rows = 0.0
  hosts = 1
  if placement is not None:
    hosts = mesh_lib.num_hosts(placement.training)
    slots = batch_sizes.num_slots(config, hosts)
    waves = math.ceil(rollout.trajectories_per_step / hosts / slots)
    rows = slots / placement.mesh.shape['data']
    steps = float(waves * losses)
  return roofline.Work(
    shape=shape,
    axes=dict(learner.mesh.shape),
    trajectories=rollout.trajectories_per_step,
    group_size=rollout.group_size,
    minibatch=updates.minibatch_size,
    microbatch=updates.microbatch_size or updates.minibatch_size,
    updates=updates.num_epochs
    * (rollout.trajectories_per_step // updates.minibatch_size),
    length=length,
    losses=losses,
    values=values,
    adapters=config.model.lora.rank > 0,
    statistics=algorithm.uses_minibatch_statistics,
    weights=weights,
    trained=trained,
    itemsize=jnp.dtype(shape.dtype).itemsize,
    decode_steps=steps,
    decode_rows=rows,
    engine_weights=engine.get(plan_memory.WEIGHTS, 0),
    engine_cache=engine.get(plan_memory.CACHE, 0),
    engine_length=config.env.max_length,
    engine_tensor=placement.tensor if placement is not None else 0,
    collectors=0 if placement is None else len(placement.collecting) * hosts,
  )
