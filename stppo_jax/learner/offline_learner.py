"""Trains a policy on rows that are not sampled during the run."""

import jax
import numpy as np

from stppo_jax.learner import model_roles
from stppo_jax.learner import optimizer as optimizer_lib
from stppo_jax.learner import packing as packing_lib
from stppo_jax.learner import programs as programs_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import step as step_lib
from stppo_jax.learner import weights as weights_lib
from stppo_jax.models import functional
from stppo_jax.parallel import distributed
from stppo_jax.parallel import sharding


class OfflineLearner:
  """Trains a policy on demonstrations or on pairs of trajectories.

  Args:
    config: the config of a run.
    models: the policy, perhaps with adapters.
    method: how the gradient is computed, see `offline_losses`.
    optimizer: the config section of the optimiser.
    temperature: the number that divides the logits.
    row_length: the number of tokens of a packed row.
    microbatch: the number of rows of a forward pass; 0 means all rows.

  Attributes:
    policy: the policy without adapters.
    numbers: the hyperparameters of the optimiser, inputs of the program.
  """

  def __init__(
    self,
    config,
    models: model_roles.Models,
    method: step_lib.Method,
    optimizer,
    *,
    temperature: float,
    row_length: int,
    microbatch: int = 0,
  ):
    mesh = models.policy.mesh
    assert mesh is not None  # a model in training has a mesh
    self._config = config
    self._models = models
    self.policy = models.policy.plain_policy
    adam, self.numbers = optimizer_lib.from_config(optimizer)
    spec = step_lib.Spec(
      self._models,
      temperature=temperature,
      num_turns=config.env.max_turns + 1,
    )
    self._sizes = packing_lib.sizes(
      mesh, row_length=row_length, microbatch=microbatch
    )
    self._programs = programs_lib.updating(
      spec, state_lib.Optimizers(adam, adam), method, mesh
    )
    self._update = programs_lib.keeping_frozen(self._programs.update)
    self._rows = sharding.batch_sharding(mesh)

  def start(self) -> state_lib.TrainState:
    """Returns the state before the first update."""
    return self._programs.init(
      *weights_lib.load_start(
        self._config, self._config.model.path, self._models
      )
    )

  def reference(self) -> functional.Params | None:
    """Returns the reference's weights; None if the state has these weights."""
    path = self._config.model.path
    return weights_lib.load_reference(self._config, path, self.policy)

  def update(
    self,
    state: state_lib.TrainState,
    minibatch,
    inputs=(),
    *,
    numbers: optimizer_lib.Hyperparameters | None = None,
  ) -> tuple[state_lib.TrainState, dict[str, jax.Array]]:
    """Takes one optimiser step.

    Args:
      state: the state before the step. Its arrays are donated, except the
        frozen arrays.
      minibatch: this host's rows, as numpy arrays.
      inputs: the inputs of the loss beside weights and rows.
      numbers: the optimiser's hyperparameters; None means `self.numbers`.

    Returns:
      The new state, and the metrics.
    """
    numbers = numbers or self.numbers
    batch = distributed.from_local_rows(minibatch, self._rows)
    # A single process has all rows as numpy arrays, and counts their tokens
    # without waiting for the device. Several processes must learn the lengths
    # of each other's rows.
    if jax.process_count() == 1:
      lengths, losses = programs_lib.sizes(minibatch)
    else:
      lengths, losses = jax.device_get(self._programs.sizes(batch))
    packed = packing_lib.plan(
      np.arange(len(lengths)), lengths, losses, self._sizes
    )
    # The second `numbers` are for a value model. They are never read, because
    # no value model is trained.
    state, outputs = self._update(
      state,
      batch,
      packed,
      step_lib.Hyperparameters(inputs, numbers, numbers),
    )
    return state, outputs.metrics

  def merged_params(self, state: state_lib.TrainState) -> functional.Params:
    """Returns the weights of `policy`, with merged adapters.

    Without adapters no array is copied.
    """
    if not state.frozen:
      return state.policy.params
    return jax.jit(self._models.merged)(state.params)
