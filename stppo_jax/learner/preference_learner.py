"""Makes the state of a policy, and updates it on pairs of trajectories."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax

from stppo_jax import batch as batch_lib
from stppo_jax.learner import model_roles
from stppo_jax.learner import optimizer as optimizer_lib
from stppo_jax.learner import preference_update
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import weights as weights_lib
from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.parallel import compilation
from stppo_jax.parallel import distributed
from stppo_jax.parallel import sharding


class PreferenceLearner:
  """Makes the state of a policy and updates it on pairs.

  Args:
    config: the config of a run.
    shape: the policy's shape.
    mesh: the run's mesh.

  Attributes:
    policy: the policy without adapters.
  """

  def __init__(
    self, config, shape: model_config.ModelConfig, mesh: jax.sharding.Mesh
  ):
    self._config, self._mesh = config, mesh
    models = model_roles.build(config, shape, mesh, uses_values=False)
    self._trained = models.policy
    self.policy = self._trained.plain_policy
    optimizer, numbers = optimizer_lib.from_config(config.policy_optimizer)
    self._hyperparameters = preference_update.Hyperparameters(
      numbers,
      beta=float(config.preference.beta),
      alpha=float(config.preference.alpha),
    )
    self._rows = sharding.batch_sharding(mesh)
    options = config.preference
    size = options.batch_size
    self._init, self._update = _programs(
      self._trained,
      optimizer,
      mesh,
      name=options.name,
      temperature=config.rollout.temperature,
      num_microbatches=size // (options.microbatch_size or size),
    )

  def start(self) -> state_lib.TrainState:
    """Returns the state before the first update."""
    return self._init(
      *weights_lib.load_start(self._config, self._trained, self._mesh)
    )

  def reference(self, state: state_lib.TrainState) -> functional.Params:
    """Returns the weights of the frozen reference."""
    model = self._config.model
    if state.frozen is not None and not model.reference_path:
      return state.frozen
    path = model.reference_path or model.path
    return weights_lib.load_frozen(self._config, path, self.policy, self._mesh)

  def update(
    self,
    state: state_lib.TrainState,
    minibatch: batch_lib.PairBatch,
    reference: functional.Params,
  ) -> tuple[state_lib.TrainState, dict[str, jax.Array]]:
    """Takes one optimiser step; consumes all of a state but frozen weights."""
    policy, metrics = self._update(
      state.policy,
      distributed.from_local_rows(minibatch, self._rows),
      self._hyperparameters,
      reference,
      frozen=state.frozen,
    )
    return dataclasses.replace(state, policy=policy), metrics

  def merged_params(self, state: state_lib.TrainState) -> functional.Params:
    """Returns weights for `policy`: without adapters, no copy is made."""
    params = state.policy.params
    if state.frozen is None:
      return params
    joined = state_lib.join_frozen(self._trained, state.frozen, params)
    return jax.jit(self._trained.merge_adapters)(joined)


# Equal models share them, so that each is compiled once in a process.
@functools.lru_cache(maxsize=8)
def _programs(
  policy: functional.Model,
  optimizer: optimizer_lib.Optimizer,
  mesh: jax.sharding.Mesh,
  **options: Any,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """Returns jitted functions: the state of weights and a key, and the update.

  Args:
    policy: the policy with its adapters.
    optimizer: its optimiser.
    mesh: the run's mesh.
    **options: those of `preference_update.update`.
  """
  init = functools.partial(
    state_lib.init,
    policy=policy,
    value=None,
    policy_optimizer=optimizer,
    value_optimizer=optimizer,
  )
  key = jax.random.key(0)
  weights = policy.plain_policy.abstract_params
  layout = sharding.param_shardings(jax.eval_shape(init, weights, key), mesh)
  return (
    jax.jit(init, donate_argnums=0, out_shardings=layout),
    compilation.jit(
      functools.partial(
        preference_update.update,
        policy=policy,
        optimizer=optimizer,
        **options,
      ),
      donate_argnums=0,
      # Pinned, so that a restored state needs no other compiled program.
      out_shardings=(layout.policy, None),
      mesh=mesh,
      dtype=policy.config.dtype,
    ),
  )
