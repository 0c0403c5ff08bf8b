"""The learner of a run: its shardings, and its jitted annotate and update."""

import dataclasses
from typing import Any
import weakref

import jax
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.learner import cpu_parallel
from stppo_jax.learner import forward
from stppo_jax.learner import minibatches as minibatches_lib
from stppo_jax.learner import model_roles
from stppo_jax.learner import optimizer as optimizer_lib
from stppo_jax.learner import packing as packing_lib
from stppo_jax.learner import policy_loss
from stppo_jax.learner import programs as programs_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import step as step_lib
from stppo_jax.learner import token_details as token_details_lib
from stppo_jax.learner import value_training
from stppo_jax.learner import weights as weights_lib
from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.models import modules
from stppo_jax.parallel import activations
from stppo_jax.parallel import distributed
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.parallel import memory
from stppo_jax.parallel import sharding
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import kl as kl_lib


class Learner:
  """Makes the train state of a config, annotates batches and updates the state.

  Args:
    config: the run's config.
    shape: the config of the policy's layers, see `model_roles.build`.
    mesh: the mesh of training.
    gathers_base: see `model_roles.Models`.

  Attributes:
    config: the run's config.
    models: policy and value model.
    policy: the policy without adapters and value head, for export.
    decoded: the policy with its adapters but without a value head, for the
      local engine.
    mesh: the mesh of training.
    programs: the compiled programs of this learner.
    sizes, annotate_sizes: sizes of packed rows in updates and in `annotate`.
    num_microbatches: the number of microbatches of the last policy update.
    algorithm: the algorithm, with the present coefficient of its KL penalty.
    warmup: says which of the first steps train only the value model.

  Raises:
    ValueError: the mesh does not divide the models, adapters or value model do
      not fit the policy, or the devices cannot read a reference in host memory.
  """

  def __init__(
    self,
    config,
    shape: model_config.ModelConfig,
    mesh: jax.sharding.Mesh,
    *,
    gathers_base: bool = False,
  ):
    self.config = config
    self.algorithm = algorithm_lib.build_algorithm(config.algorithm)
    models = model_roles.build(
      config,
      shape,
      mesh,
      uses_values=self.algorithm.uses_values,
      gathers_base=gathers_base,
    )
    self.models = models
    self.policy = models.policy.plain_policy
    self.decoded = dataclasses.replace(self.policy, lora=models.policy.lora)
    self.mesh = mesh
    self._rows = sharding.batch_sharding(mesh)
    self._reference_on_host = config.model.reference_memory == 'host'
    if self._reference_on_host:
      memory.check_host(mesh)

    of_both = config.policy_optimizer, config.value_optimizer
    optimizers, self._numbers = zip(*map(optimizer_lib.from_config, of_both))
    self._coefficients = policy_loss.Coefficients(
      entropy=config.loss.entropy_coefficient,
      value_clip=config.loss.value_clip,
      value=config.loss.value_coefficient,
      load_balance=config.loss.load_balance_coefficient,
    )
    updates = config.updates
    on_cores = cpu_parallel.is_supported(mesh, self.algorithm)
    core_rows = updates.core_rows if on_cores else 0
    num_workers = cpu_parallel.num_cores() if core_rows else 1
    spec = step_lib.Spec(
      models,
      temperature=config.rollout.temperature,
      num_turns=config.env.max_turns + 1,
    )
    self.sizes = packing_lib.sizes(
      mesh,
      row_length=updates.row_length or config.env.max_length,
      microbatch=core_rows or updates.microbatch_size,
      num_workers=num_workers,
    )
    size = updates.minibatch_size
    self.annotate_sizes = packing_lib.for_annotate(self.sizes, size)
    self.warmup = value_training.Warmup(
      config.loss.value_warmup_steps, config.loss.value_warmup_patience
    )
    self.num_microbatches = 0
    # Weak references to batches, and `programs.sizes` of them; see `_packed`.
    self._sized: list[tuple[Any, Any]] = []
    self.programs = programs_lib.build(
      spec,
      state_lib.Optimizers(*optimizers),
      mesh,
      divides_by_bias_norm=self.algorithm.divides_by_bias_norm,
      num_workers=num_workers,
      routing_replay=updates.routing_replay,
    )

  def start(self, path: str | None = None) -> state_lib.TrainState:
    """Returns the state before the first update.

    Args:
      path: the directory of the weights; '' draws random weights; None means
        model.path.
    """
    path = self.config.model.path if path is None else path
    return self.programs.updating.init(
      *weights_lib.load_start(self.config, path, self.models)
    )

  def reference(self, path: str | None = None) -> functional.Params | None:
    """Loads the reference, see `weights.load_reference` and `start`."""
    path = self.config.model.path if path is None else path
    params = weights_lib.load_reference(self.config, path, self.policy)
    return memory.on_host(params) if self._reference_on_host else params

  def annotate(
    self,
    state: state_lib.TrainState,
    packed: batch_lib.TokenBatch,
    *,
    reference: functional.Params | None,
    old: model_roles.Params | None = None,
    older: tuple[model_roles.Params, ...] = (),
  ) -> tuple[batch_lib.TokenBatch, dict[str, Any]]:
    """Returns a batch with all arrays that updates read, and metrics.

    Args:
      state: the policy about to be updated, and the value model.
      packed: this host's rows, as numpy arrays.
      reference: the result of `reference()`.
      old: the old policy; None means the state's policy.
      older: the policies of earlier steps, see `annotate.annotate`.
    """
    batch = distributed.from_local_rows(packed, self._rows)
    if self._reference_on_host and reference is not None:
      reference = memory.on_devices(reference)
    return self.programs.annotate(
      state,
      batch,
      self.algorithm,
      reference=reference,
      old=None if old is None else old.trained.policy,
      older=[x.trained.policy for x in older],
      packed=self._packed(
        batch, np.arange(len(batch.lengths_B)), self.annotate_sizes
      ),
    )

  def mean_logprobs(
    self, state: state_lib.TrainState, packed: batch_lib.TokenBatch
  ) -> np.ndarray:
    """Returns the result of `annotate.mean_logprobs` for this host's rows."""
    inputs = distributed.from_local_rows(forward.inputs_of(packed), self._rows)
    lengths, losses = jax.device_get(self.programs.updating.sizes(inputs))
    order = np.arange(len(lengths))
    rows = packing_lib.plan(order, lengths, losses, self.annotate_sizes)
    return distributed.to_local_rows(
      self.programs.mean_logprobs(state.params, inputs, rows)
    )

  def minibatches(
    self,
    num_rows: int,
    step: int,
    *,
    num_updates: int | None = None,
    values_alone: bool = False,
  ) -> list[np.ndarray]:
    """Returns the rows of each minibatch of a step, epoch by epoch.

    Args:
      num_rows: the number of rows of the batch.
      step: the training step.
      num_updates: the number of minibatches, from as many epochs as necessary.
        None means all minibatches of `updates.num_epochs` epochs or, with
        `values_alone`, of the `updates.value_epochs` epochs after them.
    """
    updates = self.config.updates
    epochs = updates.num_epochs, updates.value_epochs
    count, further = (x * num_rows // updates.minibatch_size for x in epochs)
    rows = minibatches_lib.minibatch_rows(
      num_rows,
      size=updates.minibatch_size,
      count=count + further if num_updates is None else num_updates,
      seed=self.config.seed,
      step=step,
      shuffle=updates.shuffle,
    )
    if num_updates is None:
      return rows[count:] if values_alone else rows[:count]
    return rows

  def update(
    self,
    state: state_lib.TrainState,
    batch: batch_lib.TokenBatch,
    rows: np.ndarray,
    step: int,
    *,
    values_alone: bool = False,
  ) -> tuple[state_lib.TrainState, step_lib.LossOutputs]:
    """Takes one optimiser step on some rows; see `step.update`.

    Args:
      state: the state before the step. Its arrays are donated, except the
        frozen arrays.
      batch: the annotated batch; with `values_alone` also one of
        `value_training.Replay.collections`.
      rows: the rows of the minibatch, from `minibatches`.
      step: the training step; the policy does not learn in the value warm-up.
      values_alone: whether only the value model learns, see `value_training`.
    """
    packed, numbers = self._packed(batch, rows), self.hyperparameters(step)
    if values_alone:
      return self.programs.update_values(state, batch, packed, numbers)
    self.num_microbatches = len(packed.packing.rows)
    return self.programs.update_minibatch(state, batch, packed, numbers)

  def _packed(
    self,
    batch: batch_lib.TokenBatch,
    rows: np.ndarray,
    sizes: packing_lib.Sizes | None = None,
  ) -> packing_lib.Packed:
    """Packs some rows of a batch within `sizes`, by default `self.sizes`.

    A device program gives all hosts the lengths of all rows. The lengths are
    kept for the batch: a second run would wait for the updates in progress.
    """
    # The references to the batches are weak, so that the arrays of a step are
    # freed before the arrays of the next step are made.
    self._sized = [(of, found) for of, found in self._sized if of() is not None]
    found = next((sizes for of, sizes in self._sized if of() is batch), None)
    if found is None:
      found = jax.device_get(self.programs.updating.sizes(batch))
      self._sized.append((weakref.ref(batch), found))
    lengths, losses = found
    return packing_lib.plan(rows, lengths, losses, sizes or self.sizes)

  def hyperparameters(self, step: int) -> step_lib.Hyperparameters:
    """Returns the runtime inputs of a step's updates."""
    return step_lib.Hyperparameters(
      policy_loss.Inputs(self.algorithm, self._coefficients),
      *self._numbers,
      policy_learns=step >= self.warmup.end,
    )

  def token_outputs(
    self,
    state: state_lib.TrainState,
    tokens_BL: jax.Array,
    *,
    expert_ids: jax.Array | None = None,
  ) -> functional.TokenOutputs:
    """Returns `forward.all_outputs` for unpacked rows, sharded like a batch."""
    return self.programs.token_outputs(
      state.params, forward.Inputs(tokens_BL, expert_ids=expert_ids)
    )

  def token_details(
    self,
    state: state_lib.TrainState,
    batch: batch_lib.TokenBatch,
    hosts: hosts_lib.Hosts,
  ) -> batch_lib.TokenDetails | None:
    """Measures the tokens of this host's first rows; see `token_details`.

    Args:
      state: the state after the updates of a step.
      batch: the annotated batch.
      hosts: the hosts of the run; all of them call this function.

    Returns:
      numpy arrays of the wanted rows or more; None if the config wants none.
    """
    writer = self.config.writer
    count = min(writer.token_details, writer.trajectories)
    if not count:
      return None
    rows = token_details_lib.choose_rows(
      len(batch.lengths_B),
      count,
      num_hosts=hosts.count,
      num_devices=activations.extent(self.mesh, activations.ROWS),
    )
    packed = self._packed(batch, rows)
    details = self.programs.token_details(state, batch, packed, self.algorithm)
    # `details` has the rows in the order of the shards, like `packed.rows`. The
    # argsort restores the order of `rows`, where a host's rows are adjacent.
    mine = np.argsort(packed.rows).reshape(hosts.count, -1)[hosts.index]
    return jax.tree.map(lambda x: x[mine], jax.device_get(details))

  @property
  def kl_coefficient(self) -> float:
    """The current weight of the divergence from the reference.

    An adaptive controller changes the weight, so checkpoints must contain it.
    """
    return float(self.algorithm.kl.coefficient)

  @kl_coefficient.setter
  def kl_coefficient(self, coefficient: float) -> None:
    kl = dataclasses.replace(self.algorithm.kl, coefficient=coefficient)
    self.algorithm = dataclasses.replace(self.algorithm, kl=kl)

  def adapt_kl(self, kl: float, num_trajectories: int) -> None:
    """Lets the controller set the KL coefficient for the next step.

    Args:
      kl: the divergence from the reference in this step, nats per trajectory.
      num_trajectories: the number of valid trajectories of this step.
    """
    options = self.algorithm.kl
    self.kl_coefficient = kl_lib.CONTROLLERS[options.controller](
      self.kl_coefficient,
      kl,
      num_trajectories=num_trajectories,
      target=options.target,
      horizon=options.horizon,
    )

  def copy_policy(self, state: state_lib.TrainState) -> model_roles.Params:
    """Returns the policy, with a copy of the weights that an update donates."""
    trained = model_roles.Trained(self.programs.copy(state.policy.params), None)
    return model_roles.Params(trained, state.frozen)

  def merged_params(self, params: model_roles.Params) -> functional.Params:
    """Returns weights of `self.policy`, for decoding and for export.

    Adapters are merged into copies of the matrices that they adapt. Without
    adapters no array is copied.

    Args:
      params: the trained and the frozen weights of a policy.
    """
    if not params.frozen:
      return self.models.merged(params)
    return self.programs.merge(params)

  def abstract_policy_params(self) -> Any:
    """Returns shapes and shardings of the policy's trained weights."""
    return self._abstract_state_of(self.policy.abstract_params).policy.params

  def abstract_start(
    self,
  ) -> tuple[state_lib.TrainState, functional.Params | None]:
    """Returns shapes and shardings of the first state and the reference."""
    weights = self.policy.abstract_params
    cast = jax.eval_shape(
      lambda params: modules.cast(params, self.policy.config.dtype), weights
    )
    start = weights if self.models.policy.lora is None else cast
    state = self._abstract_state_of(start)
    reference = None
    if weights_lib.has_own_reference(self.config):
      layout = sharding.param_shardings(cast, self.mesh)
      reference = sharding.with_layout(cast, layout)
    return state, reference

  def _abstract_state_of(self, weights) -> state_lib.TrainState:
    """Returns shapes and shardings of the state that starts from `weights`."""
    of_values = self.models.abstract_value_start
    state = jax.eval_shape(
      self.programs.updating.init, weights, jax.random.key(0), None, of_values
    )
    return sharding.with_layout(state, self.programs.updating.layout)
