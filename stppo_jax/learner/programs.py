"""The compiled programs of a learner.

Learners with the same models, optimisers and sizes share their programs, so
that each program is traced and compiled once in a process.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.learner import annotate as annotate_lib
from stppo_jax.learner import cpu_parallel
from stppo_jax.learner import forward
from stppo_jax.learner import policy_loss
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import step as step_lib
from stppo_jax.learner import token_details as token_details_lib
from stppo_jax.learner import value_training
from stppo_jax.parallel import compilation
from stppo_jax.parallel import rows as rows_lib
from stppo_jax.parallel import sharding


class Updating(NamedTuple):
  """The programs that every kind of training compiles.

  Attributes:
    layout: the shardings of the state.
    init: makes the state, as `state.init`, from the policy's weights, a random
      key, adapters or None, and the value model's weights or None. It donates
      the weights.
    update: runs `step.update` on (state without frozen weights, frozen weights,
      batch, `packing.Packed`, `step.Hyperparameters`). It donates the state.
    sizes: returns the number of tokens and the number of loss tokens of each
      trajectory or pair of a batch. Every host gets the numbers of all rows.
  """

  layout: state_lib.TrainState
  init: Callable[..., Any]
  update: Any
  sizes: Callable[..., Any]


def keeping_frozen(update: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a function that updates states that contain frozen weights.

  Args:
    update: maps (state without frozen weights, frozen weights, ...) to (new
      state without frozen weights, outputs), and donates only the state.
  """

  def updated(state: state_lib.TrainState, *inputs):
    frozen = state.frozen
    state, outputs = update(state.with_frozen({}), frozen, *inputs)
    return state.with_frozen(frozen), outputs

  return updated


class Programs(NamedTuple):
  """The jitted functions of reinforcement learning.

  Attributes:
    updating: the programs that every kind of training has.
    update_minibatch: runs `Updating.update` on states that contain frozen
      weights, see `keeping_frozen`. On a CPU it may run `cpu_parallel.Updater`.
    update_values: runs the same update for the value model alone, which must
      not be the value head of the policy.
    annotate, mean_logprobs: see the module `annotate`.
    token_outputs: see `forward.all_outputs`.
    token_details: see `token_details.measure_tokens`; all hosts get all rows.
    copy: copies the policy's trained weights.
    merge: returns the policy's weights with merged adapters, see
      `Models.merged`.
  """

  updating: Updating
  update_minibatch: Callable[..., Any]
  update_values: Callable[..., Any]
  annotate: Any
  mean_logprobs: Callable[..., Any]
  token_outputs: Callable[..., Any]
  token_details: Callable[..., Any]
  copy: Callable[..., Any]
  merge: Callable[..., Any]


@functools.lru_cache(maxsize=8)
def updating(
  spec: step_lib.Spec,
  optimizers: state_lib.Optimizers,
  method: step_lib.Method,
  mesh: jax.sharding.Mesh,
) -> Updating:
  """Returns the programs that start and update a state.

  A single program selects the rows of a minibatch and updates the state. Two
  separate programs with collectives could run at the same time and, on CPU
  devices, block each other.

  Args:
    spec: the models and the sizes of an update.
    optimizers: the optimisers of the models.
    method: how the gradient is computed.
    mesh: the mesh of training.

  Raises:
    ValueError: the targets of the adapters match no layer.
  """
  init = functools.partial(
    state_lib.init, models=spec.models, optimizers=optimizers
  )
  # The layout is made from shapes, before weights are read, because each device
  # then reads only its own shards of the weights.
  weights = spec.models.policy.plain_policy.abstract_params
  state = jax.eval_shape(
    init, weights, jax.random.key(0), None, spec.models.abstract_value_start
  )
  layout = sharding.param_shardings(state, mesh)
  one_step = functools.partial(
    step_lib.update, method=method, spec=spec, optimizers=optimizers
  )

  def update_rows(state, frozen, batch, packed, hyperparameters):
    minibatch = rows_lib.select(batch, packed.rows, mesh)
    return one_step(state, frozen, minibatch, hyperparameters, packed.packing)

  jit = functools.partial(
    compilation.jit, mesh=mesh, dtype=spec.models.policy.config.dtype
  )
  return Updating(
    layout=layout,
    # The weights are donated, so that no second copy of them is made.
    init=jit(init, donate_argnums=(0, 3), out_shardings=layout),
    # The shardings of the result are fixed. Otherwise the compiler might give
    # an updated state other shardings than a new or a restored state has, and
    # then the update would compile twice.
    update=jit(
      update_rows,
      donate_argnums=0,
      out_shardings=(layout.with_frozen({}), None),
    ),
    sizes=jit(sizes, out_shardings=sharding.replicated(mesh)),
  )


def sizes(batch: Any) -> tuple[Any, Any]:
  """Returns how many tokens and loss tokens each trajectory or pair has.

  Args:
    batch: a `TokenBatch`, a `PairBatch` or `forward.Inputs`, of traced or numpy
      arrays. The results are arrays of the same kind.
  """
  total = lambda x: x.reshape(len(x), -1).sum(axis=1, dtype='int32')
  if isinstance(batch, batch_lib.PairBatch):
    return total(batch.lengths_Q2), total(batch.loss_mask_Q2L)
  return total(batch.lengths_B), total(batch.loss_mask_BL)


# Eight cached results suffice, because most algorithms differ in numbers only
# and share their programs.
@functools.lru_cache(maxsize=8)
def build(
  spec: step_lib.Spec,
  optimizers: state_lib.Optimizers,
  mesh: jax.sharding.Mesh,
  *,
  divides_by_bias_norm: bool,
  num_workers: int,
  routing_replay: str,
) -> Programs:
  """Returns the programs of reinforcement learning.

  All arguments are static. Equal arguments give the same programs.

  Args:
    spec: the models and the sizes of an update.
    optimizers: the optimisers of the models.
    mesh: the mesh of training.
    divides_by_bias_norm: see `policy_loss.BIAS_NORM_METHOD`.
    num_workers: the number of CPU cores that share the microbatches; with 1,
      one program runs all microbatches.
    routing_replay: see `annotate.annotate`.

  Raises:
    ValueError: the targets of the adapters match no layer.
  """
  method = policy_loss.METHOD
  if divides_by_bias_norm:
    method = policy_loss.BIAS_NORM_METHOD
  common = updating(spec, optimizers, method, mesh)

  def minibatch_program(method: step_lib.Method) -> Callable[..., Any]:
    update = updating(spec, optimizers, method, mesh).update
    if num_workers > 1:
      update = cpu_parallel.Updater(
        spec,
        method,
        optimizers,
        num_workers=num_workers,
        out_shardings=common.layout.with_frozen({}),
      ).update
    return keeping_frozen(update)

  jit = functools.partial(
    compilation.jit, mesh=mesh, dtype=spec.models.policy.config.dtype
  )

  # Models and temperature are compiled into these programs as constants.
  def of_models(function, **options):
    return functools.partial(
      function, models=spec.models, temperature=spec.temperature, **options
    )

  weights = spec.models.policy.plain_policy.abstract_params
  return Programs(
    updating=common,
    update_minibatch=minibatch_program(method),
    update_values=minibatch_program(value_training.METHOD),
    annotate=jit(
      of_models(
        annotate_lib.annotate,
        num_turns=spec.num_turns,
        routing_replay=routing_replay,
      )
    ),
    mean_logprobs=jit(
      of_models(annotate_lib.mean_logprobs),
      out_shardings=sharding.batch_sharding(mesh),
    ),
    token_outputs=jit(of_models(forward.all_outputs)),
    token_details=jit(
      of_models(token_details_lib.measure_tokens, num_turns=spec.num_turns),
      out_shardings=sharding.replicated(mesh),
    ),
    copy=jit(
      lambda params: jax.tree.map(jnp.copy, params),
      out_shardings=common.layout.policy.params,
    ),
    merge=jit(
      spec.models.merged,
      out_shardings=sharding.param_shardings(weights, mesh),
    ),
  )
