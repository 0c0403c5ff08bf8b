"""The device side of a run: state, and jitted annotate and update."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.learner import annotate as annotate_lib
from stppo_jax.learner import cpu_parallel
from stppo_jax.learner import forward
from stppo_jax.learner import keys
from stppo_jax.learner import loss
from stppo_jax.learner import model_roles
from stppo_jax.learner import optimizer as optimizer_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import update as update_lib
from stppo_jax.learner import weights as weights_lib
from stppo_jax.models import functional
from stppo_jax.models import precision
from stppo_jax.parallel import distributed
from stppo_jax.parallel import memory
from stppo_jax.parallel import sharding
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import diagnostics as diagnostics_lib
from stppo_jax.rl import kl as kl_lib

_ADAM = ('b1', 'b2', 'eps')


class Learner:
  """Makes, annotates with, and updates the train state of a config.

  Args:
    config: of the run.
    shape: of policy and value model.
    mesh: of the run.

  Raises:
    ValueError: weights that do not fit the shape, a mesh that does not divide
      it, or no host memory for the reference where it shall wait there.
  """

  def __init__(self, config, shape, mesh: jax.sharding.Mesh):
    self._algorithm = algorithm_lib.build_algorithm(config.algorithm)
    models = model_roles.build(
      config, shape, mesh, uses_values=self._algorithm.uses_values
    )
    self._trained, self._value = models['policy'], models['value']
    self.policy = self._trained.plain_policy
    self.mesh = mesh
    self._config = config
    self._rows = sharding.batch_sharding(mesh)
    if self._reference_waits:
      memory.check_host(mesh)
    optimizers = {}
    self._numbers = {
      'entropy_coefficient': config.loss.entropy_coefficient,
      'value_clip': config.loss.value_clip,
      'value_coefficient': config.loss.value_coefficient,
      'load_balance_coefficient': config.loss.load_balance_coefficient,
    }
    for name in ('policy', 'value'):
      options = config[f'{name}_optimizer'].to_dict()
      optimizers[f'{name}_optimizer'] = optimizer_lib.build_optimizer(
        **{option: options.pop(option) for option in _ADAM}
      )
      self._numbers[name] = {k: float(v) for k, v in options.items()}
    key = keys.step_key(config.seed, 0, keys.Purpose.INIT)
    self._fresh = functools.partial(
      state_lib.fresh,
      key=jax.random.fold_in(key, 1),
      **models,
      **optimizers,
    )
    weights = jax.eval_shape(self.policy.init, key)
    self._layout = sharding.param_shardings(
      jax.eval_shape(self._fresh, weights), mesh
    )
    self._copy = jax.jit(
      lambda params: jax.tree.map(jnp.copy, params),
      out_shardings=self._layout.policy.params,
    )
    self._merge = jax.jit(
      self._merged, out_shardings=sharding.param_shardings(weights, mesh)
    )
    updates = config.updates
    suits = cpu_parallel.suits(mesh, self._algorithm)
    of_core = updates.core_rows if suits else 0
    at_once = of_core or updates.microbatch_size or updates.minibatch_size
    num_microbatches = updates.minibatch_size // at_once
    told = {'temperature': config.rollout.temperature, **models}
    self._score = jax.jit(functools.partial(forward.score, **told))
    told['num_turns'] = config.env.max_turns + 1
    self._annotate = jax.jit(
      functools.partial(
        annotate_lib.annotate,
        **told,
        microbatch_size=at_once,
        routing_replay=updates.routing_replay,
      ),
    )
    # Pinned: left to the compiler, an updated state would lie elsewhere than
    # a fresh or restored one, and be computed with by another program.
    layout = dataclasses.replace(self._layout, frozen=None)
    self._update = jax.jit(
      functools.partial(
        self._update_rows,
        **told,
        **optimizers,
        num_microbatches=num_microbatches,
      ),
      donate_argnums=0,
      out_shardings=(layout, None, None),
    )
    self._update_minibatch = self._update
    workers = cpu_parallel.workers(num_microbatches) if of_core else 1
    if workers > 1:
      self._update_minibatch = cpu_parallel.Updater(
        loss.Losses(**told),
        num_microbatches=num_microbatches,
        num_workers=workers,
        **optimizers,
        out_shardings=layout,
      ).update

  def start(self) -> state_lib.TrainState:
    """The state before the first update."""
    path = self._config.model.path
    load = weights_lib.frozen if self._trained.lora else weights_lib.initial
    params = load(self._config, path, self.policy, self.mesh)
    # Donated, so that no second copy of them is made.
    make = jax.jit(self._fresh, donate_argnums=0, out_shardings=self._layout)
    return make(params)

  def lowered_update(
    self, packed: batch_lib.TokenBatch
  ) -> tuple[state_lib.TrainState, functional.Params | None, Any]:
    """An update on shapes alone: nothing is loaded, held or computed.

    Args:
      packed: shapes of a batch, as packed.

    Returns:
      Shapes and layouts of state and reference, and the lowered update.
    """
    weights = jax.eval_shape(self.policy.init, jax.random.key(0))
    fixed = jax.eval_shape(
      lambda params: precision.cast(params, self.policy.config.dtype),
      weights,
    )
    start = fixed if self._trained.lora else weights
    state = _placed(jax.eval_shape(self._fresh, start), self._layout)
    reference = None
    if self._has_reference:
      layout = sharding.param_shardings(fixed, self.mesh)
      reference = _placed(fixed, layout)
    batch, _ = jax.eval_shape(
      self._annotate, packed, state, reference, self._algorithm
    )
    lowered = self._update.lower(
      dataclasses.replace(state, frozen=None),
      _placed(batch, jax.tree.map(lambda _: self._rows, batch)),
      np.arange(self._config.updates.minibatch_size, dtype=np.int32),
      self._algorithm,
      self._numbers_at(0),
      state.frozen,
    )
    return state, reference, lowered

  def abstract_state(self, state: state_lib.TrainState) -> state_lib.TrainState:
    """A tree like those in the checkpoints of the run, to restore one."""
    published = (state.policy.params,) * self._config.rollout.steps_ahead
    return dataclasses.replace(state, published=published, frozen=None)

  def abstract_policy_params(self) -> Any:
    """Shapes and layout of the policy's trained weights."""
    weights = jax.eval_shape(self.policy.init, jax.random.key(0))
    state = _placed(jax.eval_shape(self._fresh, weights), self._layout)
    return state.policy.params

  def copy_policy(self, state: state_lib.TrainState) -> functional.Params:
    """The policy's trained weights, for longer than until the next update."""
    return self._copy(state.policy.params)

  def merged_params(
    self,
    state: state_lib.TrainState,
    params: functional.Params | None = None,
  ) -> functional.Params:
    """Weights for `self.policy`: those that play, and those for others.

    Adapters are merged into copies of their matrices; without adapters nothing
    is copied.

    Args:
      state: of the run.
      params: trained weights of an earlier policy; None: those of the state.
    """
    if params is None:
      params = state.policy.params
    merge = self._merged if state.frozen is None else self._merge
    return merge(state.frozen, params)

  def reference(self) -> functional.Params | None:
    """The frozen reference: its own directory, or the start of the run.

    None under adapters whose base it is: the state has it.
    """
    model = self._config.model
    if not self._has_reference:
      return None
    path = model.reference_path or model.path
    params = weights_lib.frozen(self._config, path, self.policy, self.mesh)
    return memory.on_host(params) if self._reference_waits else params

  @property
  def _reference_waits(self) -> bool:
    return self._config.model.reference_memory == 'host'

  @property
  def _has_reference(self) -> bool:
    model = self._config.model
    return bool(not model.lora.rank or model.reference_path)

  @property
  def kl_coefficient(self) -> float:
    """The weight of the divergence from the reference, in force now.

    With an adaptive controller it is state: a checkpoint must hold it.
    """
    return float(self._algorithm.kl.coefficient)

  @kl_coefficient.setter
  def kl_coefficient(self, coefficient: float) -> None:
    kl = dataclasses.replace(self._algorithm.kl, coefficient=coefficient)
    self._algorithm = dataclasses.replace(self._algorithm, kl=kl)

  def adapt_kl(self, kl: float, num_trajectories: int) -> None:
    """Lets the controller set the coefficient for the next step.

    Args:
      kl: divergence in this step, nats per trajectory.
      num_trajectories: of this step.
    """
    options = self._algorithm.kl
    self.kl_coefficient = kl_lib.CONTROLLERS[options.controller](
      self.kl_coefficient,
      kl,
      num_trajectories=num_trajectories,
      target=options.target,
      horizon=options.horizon,
    )

  def annotate(
    self,
    packed: batch_lib.TokenBatch,
    state: state_lib.TrainState,
    reference: functional.Params | None,
    old: functional.Params | None = None,
  ) -> tuple[batch_lib.TokenBatch, dict[str, Any]]:
    """See `annotate.annotate`; the batch comes as numpy arrays."""
    batch = distributed.from_local_rows(packed, self._rows)
    if self._reference_waits and reference is not None:
      reference = memory.on_devices(reference)
    return self._annotate(batch, state, reference, self._algorithm, old)

  def score(
    self,
    state: state_lib.TrainState,
    tokens_BL: jax.Array,
    expert_ids: jax.Array | None = None,
  ) -> functional.TokenOutputs:
    """See `scoring.score`; the rows come laid out like those of a batch."""
    return self._score(state, tokens_BL, expert_ids=expert_ids)

  def minibatches(
    self, num_rows: int, step: int, epoch: int
  ) -> list[np.ndarray]:
    """Returns the row numbers of each minibatch of an epoch.

    Every epoch is another permutation of all rows, derived from
    (seed, step, epoch).
    """
    generator = np.random.default_rng((self._config.seed, step, epoch))
    order = generator.permutation(num_rows).astype(np.int32)
    return np.split(order, num_rows // self._config.updates.minibatch_size)

  def update(
    self,
    state: state_lib.TrainState,
    batch: batch_lib.TokenBatch,
    rows: np.ndarray,
    step: int,
  ) -> tuple[state_lib.TrainState, tuple[Any, Any]]:
    """Takes one optimiser step on a minibatch.

    Args:
      state: consumed, but for its frozen weights.
      batch: an annotated batch.
      rows: the row numbers of the minibatch, see `minibatches`.
      step: steps of the run before this one.

    Returns:
      The new state and a report on devices, for `summarize`.
    """
    frozen, state = state.frozen, dataclasses.replace(state, frozen=None)
    state, *report = self._update_minibatch(
      state, batch, rows, self._algorithm, self._numbers_at(step), frozen
    )
    return dataclasses.replace(state, frozen=frozen), tuple(report)

  def update_epochs(
    self,
    state: state_lib.TrainState,
    batch: batch_lib.TokenBatch,
    step: int,
  ) -> tuple[state_lib.TrainState, dict[str, float]]:
    """Makes all updates of a step, as `training.loop` does.

    Args:
      state: consumed, but for its frozen weights.
      batch: an annotated batch.
      step: steps of the run before this one.

    Returns:
      The new state and the metrics of `summarize`.
    """
    reports = []
    for epoch in range(self._config.updates.num_epochs):
      for rows in self.minibatches(len(batch.lengths_B), step, epoch):
        state, report = self.update(state, batch, rows, step)
        reports.append(report)
    return state, summarize(reports)

  def _merged(self, frozen, params):
    return self._trained.merge_adapters(
      state_lib.join_frozen(self._trained, frozen, params)
    )

  def _update_rows(
    self, state, batch, rows, algorithm, numbers, frozen=None, **static
  ):
    """Updates on some rows of a batch.

    One program, because taking the rows apart from the update would leave two
    programs with collectives in flight, which can block each other on CPU.
    """
    taken = jax.tree.map(
      lambda x: jax.lax.with_sharding_constraint(x[rows], self._rows), batch
    )
    return update_lib.update(state, taken, algorithm, numbers, frozen, **static)

  def _numbers_at(self, step: int):
    """The update's runtime numbers; the policy rests while values warm up."""
    learns = step >= self._config.loss.value_warmup_steps
    return {**self._numbers, 'policy_learns': learns}


def _placed(shapes, layouts):
  """Shapes that know their layouts."""
  return jax.tree.map(
    lambda s, layout: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=layout),
    shapes,
    layouts,
  )


def summarize(reports: Sequence[tuple[Any, Any]]) -> dict[str, float]:
  """Returns the metrics of a step's updates: means, and pooled ratios.

  Waits until the updates are done.

  Args:
    reports: of `Learner.update`, at least one.
  """
  metrics, diagnostics = zip(*jax.device_get(list(reports)))
  means = {
    name: float(np.mean([report[name] for report in metrics]))
    for name in metrics[0]
  }
  pooled = functools.reduce(diagnostics_lib.merge, diagnostics)
  return means | diagnostics_lib.summarize(pooled)
