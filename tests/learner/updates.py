"""Annotated batches and updates that compile in a second, on any mesh."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stppo_jax import batch as batch_lib
from stppo_jax.learner import annotate as annotate_lib
from stppo_jax.learner import model_roles
from stppo_jax.learner import optimizer as optimizer_lib
from stppo_jax.learner import packing as packing_lib
from stppo_jax.learner import policy_loss
from stppo_jax.learner import programs as programs_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import step as step_lib
from stppo_jax.models import functional
from stppo_jax.models import heads
from stppo_jax.models import transformer
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.rl import diagnostics as diagnostics_lib
from stppo_jax.rollout import pack
from tests import compilations
from tests.learner import trees
from tests.models import tiny
from tests.rl import batches

# optax.identity makes new functions at each call, which would recompile.
IDENTITY = optax.identity()
# Each string is a row: the turn that each token belongs to, '.' for none.
_LAYOUT = (
  '..111.222.33',
  '.1.22222.333',
  '...1111.2222',
  '.1111.......',
  '..1.2.3.....',
  '.11111111111',
  '..11..22..33',
  '.1..22..333.',
)
B, L, NUM_TURNS = len(_LAYOUT), len(_LAYOUT[0]), 3
ONE_DEVICE = (1, 1, 1)
MANY = {'mesh': (2, 2, 2), 'num_microbatches': 2}
# A correction of the gradient that changes it in these batches.
BIAS = {
  'correction__clipping_bias__tau': 0.1,  # below the batch's rho: it scales
  'correction__clipping_bias__floor': 0.01,  # below the batch's norm: divides
}
# Plain descent at rate 1: the change of the weights is the gradient. (Adam
# would turn rounding of a vanishing gradient into a whole step.)
DESCENT = optimizer_lib.Hyperparameters(
  learning_rate=1.0,
  warmup_updates=0.0,
  weight_decay=0.0,
  max_grad_norm=1e9,
  skip_grad_norm=np.inf,
)
Models = model_roles.Models


def hyperparameters(
  *,
  policy_step=DESCENT,
  value_step=DESCENT,
  policy_learns=True,
  **coefficients,
) -> step_lib.Hyperparameters:
  """Returns hyperparameters of plain descent, with coefficients by name.

  Their `loss` are the coefficients alone, see `with_algorithm`.
  """
  loss = policy_loss.Coefficients(
    entropy=0.01, value_clip=0.5, value=0.0, load_balance=0.0
  )
  return step_lib.Hyperparameters(
    loss._replace(**coefficients), policy_step, value_step, policy_learns
  )


HYPERPARAMETERS = hyperparameters()


def with_algorithm(
  hyperparameters: step_lib.Hyperparameters, algorithm
) -> step_lib.Hyperparameters:
  """Returns hyperparameters as `step.update` takes them."""
  inputs = policy_loss.Inputs(algorithm, hyperparameters.loss)
  return hyperparameters._replace(loss=inputs)


def method(algorithm) -> step_lib.Method:
  """Returns the method with which a learner computes the gradient."""
  if algorithm.divides_by_bias_norm:
    return policy_loss.BIAS_NORM_METHOD
  return policy_loss.METHOD


class _Sums(functional.Model):
  """A model whose states are running sums of embeddings; its heads are real."""

  def hidden_and_routing(
    self,
    params,
    tokens_BL,
    *,
    lengths_B=None,
    segments=None,
    loss_positions_BM=None,
    expert_ids=None,
  ):
    del lengths_B, expert_ids
    x_BLD = params['embedding'][tokens_BL]
    if segments is None:
      x_BLD = jnp.cumsum(x_BLD, axis=1)
    else:
      ids_BL, size = segments.ids_BL, tokens_BL.shape[1]
      earlier_1LL = np.tri(size, dtype=bool)[None]
      visible_BLL = (ids_BL[:, :, None] == ids_BL[:, None]) & earlier_1LL
      x_BLD = jnp.einsum('blj,bjd->bld', visible_BLL.astype(x_BLD.dtype), x_BLD)
    x_BLD = jnp.tanh(x_BLD)
    if loss_positions_BM is not None:
      places_BM = heads.state_positions(loss_positions_BM, tokens_BL.shape[1])
      x_BLD = transformer.gather_states(x_BLD, places_BM)
    return x_BLD, None


@functools.cache
def transformers(**changes) -> Models:
  """Returns small transformers."""
  return Models(tiny.model(**changes), tiny.model('scalar', **changes))


@functools.cache
def sums(**changes) -> Models:
  """Returns stand-ins for transformers that compile in a third of the time."""
  policy, value, *_ = transformers(**changes)
  return Models(
    _Sums(policy.config, 'vocabulary'), _Sums(value.config, 'scalar')
  )


def hooked(hook) -> Models:
  """Returns stand-ins that call a function when they are traced.

  Args:
    hook: gets the lengths of the rows, once for each pass.
  """

  class Hooked(_Sums):
    def hidden_and_routing(self, *args, lengths_B=None, **arrays):
      hook(lengths_B)
      return super().hidden_and_routing(*args, lengths_B=lengths_B, **arrays)

  return Models(*(Hooked(x.config, x.head) for x in sums()[:2]))


def policy_alone() -> Models:
  """Returns the models of algorithms without a critic."""
  return Models(sums().policy, None)


def params(model, seed):
  """Returns random weights of a model as numpy arrays."""
  if not isinstance(model, _Sums):
    return tiny.params(model, seed)
  rng = np.random.default_rng(seed)
  draw = lambda *shape: (0.3 * rng.normal(size=shape)).astype(np.float32)
  head = ('lm_head', 'scalar_head')[model.head == 'scalar']
  config = model.config
  columns = (config.vocab_size, config.value_outputs)[model.head == 'scalar']
  matrix = draw(config.hidden_size, columns)
  return {
    'embedding': draw(config.vocab_size, config.hidden_size),
    head: matrix if head == 'scalar_head' else matrix.T,
  }


def train_state(models: Models | None = None) -> state_lib.TrainState:
  """Returns a state of plain descent, as numpy arrays; by default of `sums`."""
  models = models or sums()

  def init(model, seed):
    return state_lib.ModelState(
      params(model, seed), optax.EmptyState(), np.int32(0)
    )

  value = None if models.value is None else init(models.value, 2)
  return state_lib.TrainState(init(models.policy, 1), value)


@functools.cache
def policy_outputs(policy):
  """Returns the compiled log-probabilities and entropies of a policy."""
  return jax.jit(
    functools.partial(policy.logprobs_and_entropy, temperature=1.0)
  )


@functools.cache
def batch(
  models: Models | None = None, *, spread: float = 0.4
) -> batch_lib.TokenBatch:
  """Returns an annotated batch, `spread` away from the old policy.

  Args:
    models: the models, by default `sums`.
    spread: the standard deviation of the logarithm of the ratio.
  """
  models = models or sums()
  rng = np.random.default_rng(3)
  draw = lambda: rng.normal(size=(B, L)).astype(np.float32)
  turn_ids = np.array(
    [[0 if c == '.' else int(c) for c in row] for row in _LAYOUT], np.int32
  )
  tokens = rng.integers(0, models.policy.config.vocab_size, (B, L))
  tokens = tokens.astype(np.int32)
  policy = models.policy
  logprobs, _ = policy_outputs(policy)(params(policy, 1), tokens)
  old = np.asarray(logprobs) + spread * draw()
  annotated = batch_lib.TokenBatch(
    tokens_BL=tokens,
    lengths_B=np.full(B, L, np.int32),
    turn_ids_BL=turn_ids,
    loss_mask_BL=turn_ids > 0,
    sampler_logprobs_BL=old,
    rewards_BL=draw(),
    group_ids_B=np.arange(B, dtype=np.int32),
    old_logprobs_BL=old,
    ref_logprobs_BL=old + 0.1 * draw(),
    values_BL=0.1 * draw(),
    advantages_BL=draw(),
    returns_BL=draw(),
    value_mask_BL=turn_ids > 0,
  )
  return annotated.replace(
    sampler_logprobs_BL=old + 0.2 * draw(),
    sentence_ids_BL=batches.sentences(turn_ids),
    turn_z_BL=draw(),
  )


def ragged(models: Models | None = None) -> batch_lib.TokenBatch:
  """Returns a batch with loss positions, and few tokens behind the last."""
  whole = batch(models)
  ends_B = np.max((np.arange(L) + 1) * whole.loss_mask_BL, axis=1)
  lengths_B = np.random.default_rng(0).integers(ends_B, L + 1)
  return whole.replace(
    lengths_B=lengths_B.astype(np.int32),
    loss_positions_BM=pack.loss_positions(whole.loss_mask_BL),
  )


def with_visits(batch: batch_lib.TokenBatch) -> batch_lib.TokenBatch:
  """Returns a batch with visits of six experts."""
  visits_BX = np.arange(6.0 * B, dtype=np.float32).reshape(B, 6)
  return batch.replace(expert_visits_BX=visits_BX)


OPTIMIZERS = state_lib.Optimizers(IDENTITY, IDENTITY)


def spec(models: Models, **options) -> step_lib.Spec:
  """Returns the static sizes and options of an update of these models."""
  return step_lib.Spec(models, temperature=1.0, num_turns=NUM_TURNS, **options)


def packed(
  batch,
  num_microbatches: int = 1,
  *,
  num_shards: int = 1,
  row_length: int = L,
  chosen=None,
  num_workers: int = 1,
) -> packing_lib.Packed:
  """Returns the packing of all trajectories, or pairs, of a batch.

  Args:
    batch: as `batch` makes it, or pairs.
    num_microbatches: the number of microbatches if each trajectory fills a row.
    num_shards: devices along the axes of rows.
    row_length: tokens of a row.
    chosen: the numbers of some trajectories; None: all.
    num_workers: the number of microbatches is a multiple of it.
  """
  count = len(jax.tree.leaves(batch)[0])
  rows = count // num_microbatches // num_shards
  lengths, losses = programs_lib.sizes(batch)
  return packing_lib.plan(
    np.arange(count) if chosen is None else chosen,
    lengths,
    losses,
    packing_lib.Sizes(num_shards, row_length, rows, num_workers),
  )


@functools.cache
def compiled(
  models: Models, method: step_lib.Method = policy_loss.METHOD, **options
):
  """Returns the jitted `step.update` of these models; see `spec`."""
  return jax.jit(
    functools.partial(
      step_lib.update,
      method=method,
      spec=spec(models)._replace(**options),
      optimizers=OPTIMIZERS,
    ),
    compiler_options=compilations.QUICK,
  )


def traced(
  models: Models,
  rows,
  *,
  inputs=None,
  method: step_lib.Method = policy_loss.METHOD,
  packing=None,
):
  """Returns the traced `step.update` of these models; by default of ST-PPO."""
  if inputs is None:
    inputs = with_algorithm(HYPERPARAMETERS, batches.algorithm('st_ppo'))
  start = train_state(models)
  return compiled(models, method).trace(start, {}, rows, inputs, packing)


def telling_gradient(method: step_lib.Method) -> step_lib.Method:
  """Returns a method whose diagnostics are the gradient of the minibatch."""

  def finish(gradient, outputs, inputs):
    gradient, outputs = method.finish(gradient, outputs, inputs)
    return gradient, outputs._replace(diagnostics=gradient)

  return method._replace(finish=finish)


class Result(NamedTuple):
  """The new state as numpy arrays, and all metrics."""

  state: Any
  metrics: dict[str, float]


def update(
  algorithm, batch, models=None, *, hyperparameters=HYPERPARAMETERS, **options
) -> Result:
  """Returns the result of an update; see `batch` and `update_by`."""
  inputs = with_algorithm(hyperparameters, algorithm)
  models = models or sums()
  return update_by(method(algorithm), inputs, batch, models, **options)


def update_by(
  method,
  inputs,
  batch,
  models,
  *,
  state=None,
  frozen=(),
  mesh=ONE_DEVICE,
  num_microbatches=1,
  row_length=L,
  **options,
) -> Result:
  """Returns the result of an update by a method on a mesh of a shape.

  Trajectories share rows if there are several microbatches. For the options see
  `compiled`.
  """
  axes = dict(zip(('data', 'fsdp', 'tensor'), mesh))
  devices = jax.devices()[: math.prod(mesh)]
  made = mesh_lib.make_mesh(**axes, devices=devices)
  state = train_state(models) if state is None else state
  state = jax.device_put(state, sharding.param_shardings(state, made))
  frozen = dict(frozen)
  frozen = jax.device_put(frozen, sharding.param_shardings(frozen, made))
  packing = None
  if num_microbatches > 1:
    order, packing = packed(
      batch,
      num_microbatches,
      num_shards=mesh[0] * mesh[1],
      row_length=row_length,
    )
    batch = jax.tree.map(lambda x: x[order], batch)
  laid_out = jax.device_put(batch, sharding.batch_sharding(made))
  new, outputs = compiled(models, method, **options)(
    state, frozen, laid_out, inputs, packing
  )
  return result(new, outputs)


def result(
  state: state_lib.TrainState, outputs: step_lib.LossOutputs
) -> Result:
  """Returns the result of an update as numpy arrays and floats."""
  metrics = {name: float(x) for name, x in outputs.metrics.items()}
  if outputs.diagnostics:
    metrics |= diagnostics_lib.summarize(outputs.diagnostics)
  return Result(jax.device_get(state), metrics)


def gradients(result: Result, models: Models | None = None) -> tuple[Any, Any]:
  """Returns the gradients of policy and value that plain descent subtracted."""
  weights = lambda state: (
    state.policy.params,
    state.value and state.value.params,
  )
  old, new = weights(train_state(models)), weights(result.state)
  return trees.subtract(old, new)


def annotate(models: Models, **options):
  """Returns the annotation of batches by these models, not compiled yet.

  Args:
    models: policy and value model.
    **options: see `annotate.annotate`.
  """
  return functools.partial(
    annotate_lib.annotate,
    models=models,
    temperature=1.0,
    num_turns=NUM_TURNS,
    **options,
  )


def rows(batch: batch_lib.TokenBatch, chosen) -> batch_lib.TokenBatch:
  """Returns the chosen rows of a batch."""
  return jax.tree.map(lambda x: x[chosen], batch)


def assert_same(
  actual: Result, expected: Result, models: Models | None = None
) -> None:
  """Compares losses to 1e-6, gradients and the other metrics to 1e-5."""
  losses = lambda result: {
    name: x for name, x in result.metrics.items() if name.endswith('_loss')
  }
  trees.assert_close(losses(actual), losses(expected), 1e-6, 1e-6)
  trees.assert_close(actual.metrics, expected.metrics, atol=1e-5)
  trees.assert_close(
    gradients(actual, models), gradients(expected, models), atol=1e-5
  )
