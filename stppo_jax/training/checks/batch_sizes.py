"""Checks that the sizes of batches fit the hosts and the devices of a run."""

import math

import jax

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import config as model_config
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import publish as publish_lib
from stppo_jax.sampling import lane_rules


def check(
  config,
  shape: model_config.ModelConfig,
  mesh: jax.sharding.Mesh,
  placement: publish_lib.Placement | None,
) -> None:
  """Checks that devices divide every size, and that lanes may be used.

  Args:
    config: the config of a run.
    shape: the policy's shape.
    mesh: the mesh of training.
    placement: the devices that decode, if the engine is local.

  Raises:
    ValueError: a size that they do not divide; one line for each.
  """
  rollout, updates = config.rollout, config.updates
  trained = {
    'rollout.trajectories_per_step': rollout.trajectories_per_step,
    'updates.minibatch_size': updates.minibatch_size,
    'updates.microbatch_size': updates.microbatch_size,
    'sft.batch_size': config.sft.batch_size,
  }
  shards = math.prod(mesh.shape[axis] for axis in mesh_lib.BATCH_AXES)
  lines = {
    key: f'{key}={size}: must be a multiple of the {shards} devices of the '
    'axes data and fsdp'
    for key, size in trained.items()
    if size % shards
  }
  hosts = mesh_lib.num_hosts(mesh)
  if rollout.trajectories_per_step % (hosts * rollout.group_size):
    lines['hosts'] = (
      f'rollout.trajectories_per_step={rollout.trajectories_per_step}: must '
      f'give each of the {hosts} hosts as many groups of '
      f'rollout.group_size={rollout.group_size}'
    )
  if hosts > 1 and rollout.engine == 'remote':
    lines['engine'] = f'rollout.engine=remote: must be local on {hosts} hosts'
  if hosts > 1 and config.retrieval.record:
    lines['record'] = (
      f"retrieval.record={config.retrieval.record}: must be '' on {hosts} "
      'hosts, which would write the same file'
    )
  if placement is not None:
    slots = 'slots' if rollout.slots else 'trajectories_per_step'
    shards = cache_lib.row_shards(shape, placement.mesh)
    if num_slots(config, hosts) % shards:
      lines[f'rollout.{slots}'] = (
        f'rollout.{slots}={rollout[slots]}: must be a multiple of {shards}: '
        'the engine divides slots over so many devices of this host'
      )
    problem = lane_rules.devices_problem(rollout.lanes, placement.mesh.size)
    if problem:
      lines['rollout.lanes'] = f'rollout.lanes={rollout.lanes}: {problem}'
  if lines:
    raise ValueError('\n'.join(lines.values()))


def num_slots(config, hosts: int) -> int:
  """Returns the number of trajectories that each host decodes at once."""
  rollout = config.rollout
  return rollout.slots or rollout.trajectories_per_step // hosts
