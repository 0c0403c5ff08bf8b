"""Searches for config changes that make a run fit, and for the best mesh.

A run fits if it does not need more memory than a device has.
"""

from collections.abc import Callable, Iterator, Mapping
import functools
import math
from typing import Any, NamedTuple

from stppo_jax import exits
from stppo_jax.parallel import memory as memory_lib
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import topology as topology_lib
from stppo_jax.tools.plan import plan as plan_lib

# A function that returns the plan of a config. Its option `programs` names the
# programs to compile.
Planner = Callable[..., plan_lib.Plan]
Changes = Mapping[str, Any]


class MeshCandidate(NamedTuple):
  """Changed settings of a run, and the plan of the run with them.

  Attributes:
    changes: the config keys that are changed, and their new values.
    plan: the plan with these settings; None if the settings are refused.
    problem: the reason why the settings are refused; '' if they are valid.
  """

  changes: Changes
  plan: plan_lib.Plan | None
  problem: str = ''


def changed(config, changes: Changes) -> Any:
  """Returns a copy of a config with changed values."""
  copy = config.copy_and_resolve_references()
  with copy.unlocked():
    copy.update_from_flattened_dict(dict(changes))
  return copy.lock()


def sweep_meshes(
  config, topology: topology_lib.Topology, planner: Planner
) -> list[MeshCandidate]:
  """Returns the plans of all meshes, the best first.

  Plans that fit in memory come before other plans, and are sorted by their
  time. `updates.microbatch_size` changes with the mesh, so that each device
  keeps its number of rows in a forward pass.

  Args:
    config: the config of a run. One axis of its mesh may have the size -1. The
      axis `expert` keeps its size, since few models have experts.
    topology: the devices.
    planner: a function that returns the plan of a config.

  Raises:
    Misconfigured: the devices do not fill whole hosts; the message is one line.
  """
  with exits.as_misconfigured():
    learning, _ = mesh_lib.divide(
      topology_lib.virtual(topology), config.mesh.collect_fraction
    )
  num_devices = len(learning)
  updates = config.updates
  expert = max(config.mesh.expert, 1)
  num_devices //= expert
  mesh = {axis: config.mesh[axis] for axis in ('data', 'fsdp', 'tensor')}
  microbatch = updates.microbatch_size or updates.minibatch_size
  rest = num_devices // math.prod(x for x in mesh.values() if x != -1)
  data, fsdp = (rest if mesh[a] == -1 else mesh[a] for a in ('data', 'fsdp'))
  rows = max(microbatch // max(data * fsdp * expert, 1), 1)
  found = []
  for data, fsdp, tensor in _factors(num_devices):
    changes = {
      'mesh.data': data,
      'mesh.fsdp': fsdp,
      'mesh.tensor': tensor,
      'updates.microbatch_size': min(
        rows * data * fsdp * expert, updates.minibatch_size
      ),
    }
    found.append(_tried(config, changes, planner))
  return sorted(found, key=_rank)


def advise(config, planner: Planner, memory: float) -> MeshCandidate | None:
  """Returns changes with which a run fits in memory; None if none are found.

  Changes are added one after the other, first the changes that cost the least
  time. A change that turns out not to be needed is dropped again.

  Args:
    config: the config of a run that does not fit, either by the estimate or by
      the compiler. Compiled programs may need more memory than the estimate.
    planner: a function that returns the plan of a config.
    memory: the bytes of a device's memory that the run may use.
  """
  changes: Changes = {}
  best = planner(config)
  for key, value in _candidates(config, best):
    tried = _tried(config, {**changes, key: value}, planner)
    # A change that saves almost nothing would only make the advice longer.
    if tried.plan is not None and tried.plan.total < 0.99 * best.total:
      changes, best = tried.changes, tried.plan
    if changes and best.total <= memory:
      break
  else:
    return None
  # A later change may have made an earlier one unnecessary.
  for key in list(changes):
    fewer = {k: x for k, x in changes.items() if k != key}
    tried = _tried(config, fewer, planner)
    if fewer and tried.plan is not None and tried.plan.total <= memory:
      changes, best = tried.changes, tried.plan
  return MeshCandidate(changes, best)


def advice(
  config, planner: Planner, memory: float, *, compiler: Planner | None = None
) -> str:
  """Returns a sentence about changes with which a run fits in memory.

  Args:
    config: the config of a run that does not fit.
    planner: a function that returns the plan of a config without compiling
      programs.
    memory: the bytes of a device's memory.
    compiler: a function that returns the plan of a config with compiled
      programs. This plan has to fit too. None to rely on the estimate.
  """
  limit = memory
  # If the compiled programs need more memory than the estimate, the second try
  # searches with a lower limit.
  for _ in range(2):
    tried = advise(config, planner, limit)
    if tried is None or tried.plan is None:
      break
    flags = ' '.join(f'--config.{k}={x}' for k, x in tried.changes.items())
    if compiler is None:
      needs = memory_lib.gib(tried.plan.total)
      return f'by the estimate, the run fits in {needs} with {flags}'
    compiled = compiler(changed(config, tried.changes))
    if compiled.fits:
      return (
        f'compiled, the run fits in {memory_lib.gib(compiled.total)} with '
        f'{flags}'
      )
    # The limit falls by at least a tenth of the memory. Otherwise the second
    # try might find the same changes again.
    limit -= max(compiled.total - memory, 0.1 * memory)
  return 'no config was found that fits; use more devices'


def _candidates(config, plan: plan_lib.Plan) -> Iterator[tuple[str, Any]]:
  """Yields changes that save memory; the cheapest in time come first."""
  updates, rollout = config.updates, config.rollout
  shards = math.prod(plan.axes[axis] for axis in mesh_lib.BATCH_AXES)
  # `rollout.slots` = 0 means as many slots as fit in memory.
  if rollout.engine == 'local' and rollout.slots:
    for part in (2, 4, 8):
      if rollout.slots % part == 0:
        yield 'rollout.slots', rollout.slots // part
  if updates.remat != 'full':
    yield 'updates.remat', 'full'
  microbatch = updates.microbatch_size or updates.minibatch_size
  while microbatch % 2 == 0 and microbatch > shards:
    microbatch //= 2
    yield 'updates.microbatch_size', microbatch
  if config.model.dtype != 'bfloat16' and plan.topology.platform != 'cpu':
    yield 'model.dtype', 'bfloat16'
  if updates.head_chunk == 0 or updates.head_chunk > 1024:
    yield 'updates.head_chunk', 1024
  if plan.axes['data'] > 1:
    yield 'mesh.data', 1
  if not config.model.lora.rank:
    yield 'model.reference_memory', 'host'
  if rollout.engine == 'local':
    tensor = 2 * (rollout.tensor or plan.axes['tensor'])
    while tensor <= plan.topology.per_host:
      yield 'rollout.tensor', tensor
      tensor *= 2


def _tried(config, changes: Changes, planner: Planner) -> MeshCandidate:
  """Returns the plan of a changed config, or the reason for its refusal."""
  changes = dict(changes)
  if changes.get('mesh.data') == 1 and 'mesh.fsdp' not in changes:
    changes['mesh.fsdp'] = -1  # fsdp gets the devices of the axis data
  try:
    return MeshCandidate(changes, planner(changed(config, changes)))
  except exits.Misconfigured as error:
    return MeshCandidate(changes, None, str(error).partition('\n')[0])


def _factors(number: int) -> Iterator[tuple[int, int, int]]:
  """Yields all triples of positive integers whose product is `number`."""
  divisors = [n for n in range(1, number + 1) if number % n == 0]
  for a in divisors:
    for b in divisors:
      if number % (a * b) == 0:
        yield a, b, number // (a * b)


def _rank(tried: MeshCandidate) -> tuple:
  """Returns the sort key of a mesh candidate.

  Plans that fit come first, sorted by time. Plans that do not fit follow,
  sorted by memory. Refused settings come last.
  """
  if tried.plan is None:
    return 2, 0.0
  plan = tried.plan
  return (0, plan.seconds[1]) if plan.fits else (1, plan.total)


def advice_at_start(config, limit: int) -> str:
  """Returns a sentence about changes with which a run would fit in memory.

  Args:
    config: the config of the run, which is refused because it does not fit.
    limit: the bytes of a device's memory.
  """
  # The plan assumes the worst case, in which all tokens of a row carry loss.
  planner = functools.partial(
    plan_lib.make,
    length=config.env.max_length,
    loss_fraction=1.0,
    gib=limit / memory_lib.GIB,
  )
  return advice(config, planner, limit)
