"""Compiles the programs of a run for the devices of a plan."""

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import dataclasses
import functools
import os
from typing import Any, NamedTuple

from stppo_jax import batch as batch_lib
from stppo_jax.envs import environments
from stppo_jax.learner import learner as learner_lib
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import publish as publish_lib
from stppo_jax.parallel import topology as topology_lib
from stppo_jax.sampling import lowering
from stppo_jax.sampling import stops
from stppo_jax.tools.plan import hlo
from stppo_jax.tools.plan import hlo_cost
from stppo_jax.tools.plan import lowering as learner_lowering
from stppo_jax.training import engines

# The largest number of programs that are compiled at the same time. The
# compiler for TPU takes up to 3 GB of memory for each program.
_MOST_AT_ONCE = 4


@dataclasses.dataclass(frozen=True)
class Subject:
  """The sizes and devices of a run, from which its programs are lowered.

  Attributes:
    config: the config of a run.
    learner: the learner of the run.
    placement: the devices that decode; None with rollout.engine=remote.
    packed: the shapes of a packed batch of a step.
  """

  config: Any
  learner: learner_lib.Learner
  placement: publish_lib.Placement | None
  packed: batch_lib.TokenBatch

  @functools.cached_property
  def engine(self) -> lowering.Lowering:
    """Returns an object that lowers the programs of the engine of a host."""
    assert self.placement is not None
    state, _ = self.learner.abstract_start()
    environment = environments.find(self.config.env.name)
    return lowering.Lowering(
      self.learner.decoded,
      placement=self.placement,
      options=engines.options(self.config, self.placement.hosts),
      num_states=stops.num_states(environment.stop_strings),
      trained=engines.decoded_weights(state.policy.params),
      base=state.frozen or None,
    )


class Cost(NamedTuple):
  """The memory, traffic and work of a compiled program on one device.

  Attributes:
    arguments: the bytes of the arguments, as the compiler lays them out.
    results: the bytes of the results, without results that are written over a
      donated argument.
    counted: the names in `memory.Held` of some of the program's arrays. A plan
      already counts these arrays, because the run holds them.
    in_place: the bytes of the results that are written over donated arguments.
    peak: the largest number of bytes that the program needs at a time, with its
      arguments.
    accessed: the bytes that are read from the device's memory or written to it,
      see `hlo_cost.accessed`; 0 on other platforms than TPU.
    axes: the size of each axis of the mesh on which the program runs.
    collectives: the collective operations.
    operations: the multiplications and additions of the matrix products.
    seconds: the time that the compiler for TPU estimates for the kernels, which
      is good for comparing programs; 0 on other platforms.
    problem: the reason why the program does not fit in memory; '' if it fits.
      If it does not fit, all numbers are 0.
  """

  arguments: int = 0
  results: int = 0
  counted: frozenset[str] = frozenset()
  in_place: int = 0
  peak: int = 0
  accessed: int = 0
  axes: Mapping[str, int] = {}
  collectives: tuple[hlo_cost.Collective, ...] = ()
  operations: int = 0
  seconds: float = 0.0
  problem: str = ''

  def beside(self, sizes: Mapping[str, int]) -> int:
    """Returns the bytes at the peak without the arrays in `counted`.

    Args:
      sizes: the bytes of the arrays that the run holds, such as weights and
        moments, by name; see `memory.Held`.
    """
    counted = sum(size for name, size in sizes.items() if name in self.counted)
    return max(self.peak - counted, 0)

  @property
  def sent(self) -> list[dict[str, Any]]:
    """Returns the bytes that a device sends, by collective and mesh axes."""
    found: dict[tuple[str, str], list[float]] = {}
    for collective in self.collectives:
      axes = ' x '.join(collective.axes(self.axes))
      if not axes:  # a group of one device, which sends nothing
        continue
      entry = found.setdefault((collective.kind, axes), [0.0, 0])
      entry[0] += collective.sent
      entry[1] += collective.times
    return [
      {'kind': kind, 'axes': axes, 'bytes': size, 'times': times}
      for (kind, axes), (size, times) in sorted(found.items())
    ]


# The functions that lower the programs which a plan may compile, by the name of
# the program. The program that is the fastest to compile comes first. If a run
# compiles a program in several sizes, the largest size is lowered. The function
# of 'publish' lowers a list of programs.
PROGRAMS: Mapping[str, Callable[[Subject], Any]] = {
  'extend': lambda subject: subject.engine.extend(),
  'decode': lambda subject: subject.engine.decode(),
  'publish': lambda subject: subject.engine.publish(),
  'annotate': lambda subject: learner_lowering.lower_annotate(
    subject.learner, subject.packed
  ),
  'update': lambda subject: learner_lowering.lower_update(
    subject.learner, subject.packed
  ),
}
_WEIGHTS = frozenset({'policy parameters', 'value parameters', 'frozen base'})
_ENGINE = frozenset({engines.WEIGHTS, engines.CACHE})
# For each program, the names under which a plan counts the program's arguments.
# An array that a program does not read, such as the optimizer's moments in
# annotate, is not an argument of the compiled program.
_COUNTED: Mapping[str, frozenset[str]] = {
  'extend': _ENGINE,
  'decode': _ENGINE,
  # The results of publish take the place of the engine's old weights, if there
  # are any.
  'publish': frozenset({'policy parameters', engines.WEIGHTS}),
  'annotate': _WEIGHTS | {'reference'},
  'update': _WEIGHTS | {'policy optimizer', 'value optimizer'},
}
# The programs that run on the devices of one host, and the programs of the
# engine.
_OF_A_HOST = frozenset({'extend', 'decode'})
_OF_THE_ENGINE = _OF_A_HOST | {'publish'}


def compile_all(
  names: Sequence[str], subject: Subject, *, clock: float
) -> dict[str, Cost]:
  """Returns the costs of programs by name, after compiling them in parallel.

  Args:
    names: keys of `PROGRAMS`. Programs of the engine are left out if the engine
      is not on these devices.
    subject: the sizes and devices of the run.
    clock: the cycles of a device per second.

  Raises:
    Rejected: a program does not compile; the message is one line.
  """
  if subject.placement is None:
    names = [name for name in names if name not in _OF_THE_ENGINE]
  elif subject.placement.collectors:  # weights are sent without a program
    names = [name for name in names if name != 'publish']
  workers = min(os.cpu_count() or 1, _MOST_AT_ONCE)
  with concurrent.futures.ThreadPoolExecutor(workers) as threads:
    # This thread lowers one program after the other in Python, while the other
    # threads compile the programs that are already lowered.
    compiling = {
      name: threads.submit(_cost, name, PROGRAMS[name](subject), subject, clock)
      for name in names
    }
    return {name: future.result() for name, future in compiling.items()}


def _cost(name: str, lowered, subject: Subject, clock: float) -> Cost:
  """Returns the cost of a lowered program, or of a list of lowered programs."""
  if isinstance(lowered, list):
    return _in_turn(
      [(_cost(name, one, subject, clock), times) for one, times in lowered]
    )
  try:
    compiled = topology_lib.compiled(lowered)
  except topology_lib.DoesNotFit as error:
    return Cost(problem=str(error))
  except topology_lib.Rejected as error:
    raise topology_lib.Rejected(f'{name}: {error}') from error
  memory = compiled.memory_analysis()
  program = hlo.read(compiled.as_text())
  mesh = subject.learner.mesh
  if name in _OF_A_HOST:
    assert subject.placement is not None
    mesh = subject.placement.mesh
  on_tpu = mesh_lib.platform(mesh) == 'tpu'
  # The peak that the compiler for CPU gives lacks the temporaries, so the peak
  # is added up here.
  at_once = memory.argument_size_in_bytes + memory.temp_size_in_bytes
  at_once += memory.output_size_in_bytes - memory.alias_size_in_bytes
  return Cost(
    arguments=memory.argument_size_in_bytes,
    results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
    counted=_COUNTED[name],
    in_place=memory.alias_size_in_bytes,
    peak=memory.peak_memory_in_bytes if on_tpu else at_once,
    accessed=hlo_cost.accessed(program) if on_tpu else 0,
    axes=dict(mesh.shape),
    collectives=tuple(hlo_cost.collectives(program)),
    operations=hlo_cost.operations(program),
    seconds=hlo_cost.estimated_cycles(program) / clock,
  )


def _in_turn(costs: Sequence[tuple[Cost, int]]) -> Cost:
  """Returns the cost of programs that run one after the other.

  Args:
    costs: the cost of each program, and how often it runs. All results stay in
      memory, and no two programs share an argument.
  """
  if problems := [cost.problem for cost, _ in costs if cost.problem]:
    return Cost(problem=problems[0])
  # Temporaries are freed when a program ends, but all results stay.
  own = max(x.peak - x.arguments - x.results for x, _ in costs)
  arguments = sum(x.arguments for x, _ in costs)
  results = sum(n * x.results for x, n in costs)
  return costs[0][0]._replace(
    arguments=arguments,
    results=results,
    peak=arguments + results + own,
    accessed=sum(n * x.accessed for x, n in costs),
    collectives=tuple(
      dataclasses.replace(collective, times=n * collective.times)
      for x, n in costs
      for collective in x.collectives
    ),
    operations=sum(n * x.operations for x, n in costs),
    seconds=sum(n * x.seconds for x, n in costs),
  )
