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

# The compiler for TPU takes up to 3 GB for each program.
_MOST_AT_ONCE = 4


@dataclasses.dataclass(frozen=True)
class Subject:
  """The sizes and devices of a run, from which its programs are lowered.

  Attributes:
    config: the config of a run.
    learner: its learner.
    placement: the devices that decode; None with rollout.engine=remote.
    packed: shapes of a packed batch.
  """

  config: Any
  learner: learner_lib.Learner
  placement: publish_lib.Placement | None
  packed: batch_lib.TokenBatch

  @functools.cached_property
  def engine(self) -> lowering.Lowering:
    """Returns the programs of the engine of a host."""
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
    arguments: the bytes of its arguments, as the compiler lays them out.
    results: the bytes of its results that take the place of no argument.
    counted: the names by which a plan counts arguments too.
    in_place: the bytes of arguments that its results take the place of.
    peak: the bytes that it needs at most at a time, its arguments included, by
      the compiler.
    accessed: the bytes that it reads from the device's memory and writes to it,
      see `program`; 0 if not known, as for other platforms than TPU.
    axes: the sizes of the axes of the mesh that it runs on.
    collectives: its collectives.
    operations: the multiplications and additions of its matrix products.
    seconds: the time that the compiler for TPU estimates for its kernels, which
      is good for comparing programs; 0 on other platforms.
    problem: why it does not fit; '' if it does. The other numbers are then 0.
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
    """Returns the bytes that it needs beside what a plan counts by name.

    Args:
      sizes: the bytes of weights, moments and the engine, see `memory.Held`.
    """
    counted = sum(size for name, size in sizes.items() if name in self.counted)
    return max(self.peak - counted, 0)

  @property
  def sent(self) -> list[dict[str, Any]]:
    """Returns the bytes that a device sends, by kind and axes of the mesh."""
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


# The programs that a plan may compile, by name, and how they are lowered, the
# fastest to compile first. Of each it is the largest that a run compiles.
# Publishing is several programs.
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
# By program, the arguments that a plan counts by name. What a program does not
# read, such as the moments in annotate, is no argument of the compiled program.
_WEIGHTS = frozenset({'policy parameters', 'value parameters', 'frozen base'})
_ENGINE = frozenset({engines.WEIGHTS, engines.CACHE})
_COUNTED: Mapping[str, frozenset[str]] = {
  'extend': _ENGINE,
  'decode': _ENGINE,
  # Its results take the place of the old weights, where there are any.
  'publish': frozenset({'policy parameters', engines.WEIGHTS}),
  'annotate': _WEIGHTS | {'reference'},
  'update': _WEIGHTS | {'policy optimizer', 'value optimizer'},
}
# Those that run on the devices of one host, and those of the engine.
_OF_A_HOST = frozenset({'extend', 'decode'})
_OF_THE_ENGINE = _OF_A_HOST | {'publish'}


def compile_all(
  names: Sequence[str], subject: Subject, *, clock: float
) -> dict[str, Cost]:
  """Returns the costs of programs by name, after compiling them in parallel.

  Args:
    names: keys of `PROGRAMS`; those of the engine are left out where it is not
      on these devices.
    subject: the run.
    clock: cycles of a device per second.

  Raises:
    Rejected: one does not compile; one line.
  """
  if subject.placement is None:
    names = [name for name in names if name not in _OF_THE_ENGINE]
  elif subject.placement.collectors:  # hosts send weights, and no program does
    names = [name for name in names if name != 'publish']
  workers = min(os.cpu_count() or 1, _MOST_AT_ONCE)
  with concurrent.futures.ThreadPoolExecutor(workers) as threads:
    # Lowering is work of Python; a program is compiled while the next one is
    # lowered.
    compiling = {
      name: threads.submit(_cost, name, PROGRAMS[name](subject), subject, clock)
      for name in names
    }
    return {name: future.result() for name, future in compiling.items()}


def _cost(name: str, lowered, subject: Subject, clock: float) -> Cost:
  """Returns the cost of a lowered program, or of several; see `compile_all`."""
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
  # The compiler for CPU gives no peak that temporaries are part of.
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
    costs: the cost of each, and how often it runs. All results stay, and no
      argument of one is an argument of another.
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
