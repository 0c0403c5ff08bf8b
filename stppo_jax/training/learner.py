"""The device side of a run: state, and jitted annotate and update."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.models import functional
from stppo_jax.parallel import distributed
from stppo_jax.parallel import sharding
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import diagnostics as diagnostics_lib
from stppo_jax.rl import kl as kl_lib
from stppo_jax.training import annotate as annotate_lib
from stppo_jax.training import keys
from stppo_jax.training import optimizer as optimizer_lib
from stppo_jax.training import state as state_lib
from stppo_jax.training import step as step_lib
from stppo_jax.training import weights as weights_lib

_ADAM = ('b1', 'b2', 'eps')


class Learner:
  """Makes, annotates with, and updates the train state of a config.

  Args:
    config: of the run.
    shape: of policy and value model.
    mesh: of the run.

  Raises:
    ValueError: weights that do not fit the shape.
  """

  def __init__(self, config, shape, mesh: jax.sharding.Mesh):
    self._algorithm = algorithm_lib.build_algorithm(config.algorithm)
    self.policy = functional.Model(shape, 'vocabulary', mesh)
    self.value = None
    if self._algorithm.uses_values:
      self.value = functional.Model(shape, 'scalar', mesh)
    self.mesh = mesh
    self._config = config
    self._rows = sharding.batch_sharding(mesh)
    self._optimizers = {}
    self._numbers = {
      'entropy_coefficient': config.loss.entropy_coefficient,
      'value_clip': config.loss.value_clip,
    }
    for name in ('policy', 'value'):
      options = config[f'{name}_optimizer'].to_dict()
      self._optimizers[name] = optimizer_lib.build_optimizer(
        **{option: options.pop(option) for option in _ADAM}
      )
      self._numbers[name] = {k: float(v) for k, v in options.items()}
    random = lambda: self.policy.init(jax.random.key(0))
    self._layout = sharding.param_shardings(
      jax.eval_shape(self._fresh(random)), mesh
    )
    self._copy = jax.jit(
      lambda params: jax.tree.map(jnp.copy, params),
      out_shardings=self._layout.policy.params,
    )
    updates = config.updates
    rows = updates.minibatch_size
    models = {'policy': self.policy, 'value': self.value}
    temperature = config.rollout.temperature
    num_turns = config.env.max_turns + 1
    self._annotate = jax.jit(
      functools.partial(
        annotate_lib.annotate,
        temperature=temperature,
        num_turns=num_turns,
        **models,
      ),
    )
    self._update = jax.jit(
      functools.partial(
        self._update_rows,
        **models,
        policy_optimizer=self._optimizers['policy'],
        value_optimizer=self._optimizers['value'],
        temperature=temperature,
        num_turns=num_turns,
        num_microbatches=rows // (updates.microbatch_size or rows),
      ),
      donate_argnums=0,
      # Pinned: left to the compiler, an updated state would lie elsewhere than
      # a fresh or restored one, and be computed with by another program.
      out_shardings=(self._layout, None, None),
    )

  def start(self) -> state_lib.TrainState:
    """The state before the first update."""
    path = self._config.model.path
    params = weights_lib.initial(self._config, path, self.policy, self.mesh)
    # All but the policy's weights, of which the program would make a copy.
    beside = jax.jit(
      lambda params: _with_weights(self._fresh(lambda: params)(), ()),
      out_shardings=_with_weights(self._layout, ()),
    )
    return _with_weights(beside(params), params)

  def saved_form(self, state: state_lib.TrainState) -> state_lib.TrainState:
    """A tree like those in the checkpoints of the run, to restore one."""
    published = (state.policy.params,) * self._config.rollout.steps_ahead
    return dataclasses.replace(state, published=published)

  def copy_policy(self, state: state_lib.TrainState) -> functional.Params:
    """The policy's weights, for longer than until the next update."""
    return self._copy(state.policy.params)

  def reference(self) -> functional.Params:
    """The frozen reference: its own directory, or the start of the run."""
    model = self._config.model
    path = model.reference_path or model.path
    return weights_lib.initial(self._config, path, self.policy, self.mesh)

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
    reference: functional.Params,
    old: functional.Params | None = None,
  ) -> tuple[batch_lib.TokenBatch, dict[str, Any]]:
    """See `annotate.annotate`; the batch comes as numpy arrays."""
    batch = distributed.from_local_rows(packed, self._rows)
    return self._annotate(batch, state, reference, self._algorithm, old)

  def update_epochs(
    self,
    state: state_lib.TrainState,
    batch: batch_lib.TokenBatch,
    step: int,
  ) -> tuple[state_lib.TrainState, dict[str, float]]:
    """All updates of a step; `state` is consumed.

    Returns:
      The new state and the metrics: means over the updates, ratios pooled.
    """
    numbers = self._numbers_at(step)
    reports = []
    for rows in self._minibatches(len(batch.lengths_B), step):
      state, *report = self._update(
        state, batch, rows, self._algorithm, numbers
      )
      reports.append(report)
    metrics, diagnostics = zip(*jax.device_get(reports))
    pooled = functools.reduce(diagnostics_lib.merge, diagnostics)
    return state, _mean_of(metrics) | diagnostics_lib.summarize(pooled)

  def _fresh(
    self, make_policy: Callable[[], functional.Params]
  ) -> Callable[[], state_lib.TrainState]:
    """Makes the state that starts from the weights of a policy."""
    make_value = None
    if self.value is not None:
      key = keys.step_key(self._config.seed, 0, keys.Purpose.INIT)
      make_value = functools.partial(
        state_lib.value_from_policy, self.value, jax.random.fold_in(key, 1)
      )
    return functools.partial(
      state_lib.fresh,
      make_policy,
      make_value,
      self._optimizers['policy'],
      self._optimizers['value'],
    )

  def _minibatches(self, num_rows: int, step: int) -> Iterator[np.ndarray]:
    """Row numbers of each minibatch; a new permutation every epoch."""
    size = self._config.updates.minibatch_size
    for epoch in range(self._config.updates.num_epochs):
      generator = np.random.default_rng((self._config.seed, step, epoch))
      order = generator.permutation(num_rows).astype(np.int32)
      yield from np.split(order, num_rows // size)

  def _update_rows(self, state, batch, rows, algorithm, numbers, **static):
    """Updates on some rows of a batch.

    One program, because taking the rows apart from the update would leave two
    programs with collectives in flight, which can block each other on CPU.
    """
    minibatch = jax.tree.map(
      lambda x: jax.lax.with_sharding_constraint(x[rows], self._rows), batch
    )
    return step_lib.update(state, minibatch, algorithm, numbers, **static)

  def _numbers_at(self, step: int):
    """The update's runtime numbers; the policy rests while values warm up."""
    learns = step >= self._config.loss.value_warmup_steps
    return {**self._numbers, 'policy_learns': learns}


def _with_weights(
  state: state_lib.TrainState, params: functional.Params
) -> state_lib.TrainState:
  """The state with other weights of the policy."""
  policy = dataclasses.replace(state.policy, params=params)
  return dataclasses.replace(state, policy=policy)


def _mean_of(reports: Sequence[dict[str, Any]]) -> dict[str, float]:
  return {
    name: float(np.mean([report[name] for report in reports]))
    for name in reports[0]
  }
