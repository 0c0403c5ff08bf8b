"""A value model that learns alone: its loss, its warm-up and its replay.

In the additional epochs of `updates.value_epochs` the policy stays as it is.
The program of these epochs does not run the policy, and drops the policy's
gradient, which is 0. The steps of the warm-up do not update the policy, either.

These epochs first go over the collections of the last `updates.value_replay`
steps, from the oldest to the newest, and then over the collection of this step.
The returns of a collection stay what they were in its own step. So while the
policy learns, they are returns of older policies; in the warm-up, one policy
made all collections.

B rows of a microbatch, a minibatch or a collection; L tokens.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.learner import model_roles
from stppo_jax.learner import policy_loss
from stppo_jax.learner import step as step_lib
from stppo_jax.parallel import sharding

Array = jax.Array

# The arrays of a collection that are kept. Values are not among them, so
# `values.value_loss` does not clip the values of a kept collection.
_DTYPES = {
  'tokens_BL': jnp.int32,
  'loss_mask_BL': jnp.bool_,
  'returns_BL': jnp.float32,
  'value_mask_BL': jnp.bool_,
  'lengths_B': jnp.int32,
}
_NONE: dict[str, Any] = {
  x.name: None for x in dataclasses.fields(batch_lib.TokenBatch)
}


def value_loss(
  params: model_roles.Params,
  microbatch: batch_lib.TokenBatch,
  context: policy_loss.Context,
  *,
  spec: step_lib.Spec,
) -> tuple[Array, step_lib.LossOutputs]:
  """Returns the share of a microbatch in the minibatch's value loss.

  For the arguments see `policy_loss.policy_loss`. All values have the same
  weight, also with an algorithm whose corrections weigh the value terms.
  """
  inputs = context.inputs
  values = policy_loss.values(params, microbatch, inputs=inputs, spec=spec)
  loss, metrics = policy_loss.value_term(values, microbatch, context, spec=spec)
  return loss, step_lib.LossOutputs(metrics)


def context_of(
  params: model_roles.Params,
  minibatch: batch_lib.TokenBatch,
  microbatches: batch_lib.TokenBatch,
  inputs: policy_loss.Inputs,
  *,
  spec: step_lib.Spec,
) -> policy_loss.Context:
  """Returns the data of the minibatch that the loss of a microbatch reads."""
  del params, microbatches, spec  # only the policy loss needs these arguments
  count = jnp.maximum(jnp.sum(minibatch.value_mask_BL), 1)
  # The first count is that of the policy loss, which is not computed.
  return policy_loss.Context(inputs, minibatch, count, count, None)


def finish(
  gradient: model_roles.Trained,
  outputs: step_lib.LossOutputs,
  inputs: policy_loss.Inputs,
) -> tuple[model_roles.Trained, step_lib.LossOutputs]:
  """Replaces the gradient of the policy, which is 0 everywhere, by None."""
  del inputs
  return gradient._replace(policy=None), outputs


@dataclasses.dataclass
class Warmup:
  """Counts the steps of the warm-up, in which the policy stays as it is.

  The warm-up ends early once the explained variance has not risen for some
  steps. The explained variance is measured on a collection before the value
  model learns from it, so a rise does not come from remembering single
  dialogues.

  Attributes:
    steps: the largest number of steps of the warm-up.
    patience: the number of steps without a rise that ends the warm-up early; 0:
      the warm-up never ends early.
    best: the largest explained variance so far.
    best_step: the step with the largest explained variance.
    ended: the first step in which the policy learns if the warm-up ended early;
      None if it did not end early.
  """

  steps: int
  patience: int
  best: float = -1e9  # below any explained variance; JSON has no -inf
  best_step: int = 0
  ended: int | None = None

  @property
  def end(self) -> int:
    """The first step in which the policy learns, as far as is known.

    When `observe` ends the warm-up early, the present step becomes `end`.
    """
    return self.steps if self.ended is None else min(self.steps, self.ended)

  @property
  def record(self) -> dict[str, float | None]:
    """The fields that a checkpoint holds; the config holds the other fields."""
    return {
      'best': self.best,
      'best_step': self.best_step,
      'ended': self.ended,
    }

  def observe(self, step: int, explained: float) -> bool:
    """Records an explained variance; returns whether the warm-up ends early.

    Call this once in each step that comes before step `end`, in the order of
    the steps. From step `end` on, or if `patience` is 0, a call records nothing
    and returns False. If the result is True, the policy already learns in this
    step.

    Args:
      step: the training step, whose updates have not been made.
      explained: the explained variance of the step's collection.
    """
    if step >= self.end or not self.patience:
      return False
    if explained > self.best:
      self.best, self.best_step = explained, step
    stops = step - self.best_step >= self.patience
    if stops:
      self.ended = step
    return stops


class Replay:
  """The collections of the last steps, on the devices.

  Args:
    config: the run's config.
    mesh: the mesh of training.

  Attributes:
    collections: the collections of the last `updates.value_replay` steps, the
      oldest first; before the first step, all of them are empty. The arrays
      that a value model alone does not read are None.
  """

  def __init__(self, config, mesh: jax.sharding.Mesh):
    layout = sharding.batch_sharding(mesh)
    keep = functools.partial(_kept, length=_shape(config)[1])
    self._keep = jax.jit(keep, out_shardings=layout)
    self.collections: tuple[batch_lib.TokenBatch, ...] = ()
    if config.updates.value_replay:
      empty = jax.jit(lambda: _empty(config), out_shardings=layout)()
      self.collections = (empty,) * config.updates.value_replay

  def before(self, step: int) -> tuple[batch_lib.TokenBatch, ...]:
    """Returns the collections that a step of the run repeats, oldest first."""
    return self.collections[max(0, len(self.collections) - step) :]

  def add(self, batch: batch_lib.TokenBatch) -> None:
    """Adds the annotated batch of a step in place of the oldest collection."""
    if self.collections:
      self.collections = (*self.collections[1:], self._keep(batch))


def abstract_collections(
  config, mesh: jax.sharding.Mesh
) -> tuple[batch_lib.TokenBatch, ...]:
  """Returns the shapes and shardings of `Replay.collections`."""
  shapes = jax.eval_shape(lambda: _empty(config))
  layout = jax.tree.map(lambda _: sharding.batch_sharding(mesh), shapes)
  one = sharding.with_layout(shapes, layout)
  return (one,) * config.updates.value_replay


def _shape(config) -> tuple[int, int]:
  """Returns the shape (B, L) of the longest batch of a config."""
  bucket = config.rollout.length_bucket
  length = -(-config.env.max_length // bucket) * bucket
  return config.rollout.trajectories_per_step, length


def _kept(batch: batch_lib.TokenBatch, *, length: int) -> batch_lib.TokenBatch:
  """Returns the kept arrays of a batch, padded to rows of `length` tokens."""

  def padded(x):
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]))) if x.ndim > 1 else x

  kept: dict[str, Any] = {
    name: padded(getattr(batch, name)) for name in _DTYPES
  }
  return batch_lib.TokenBatch(**_NONE | kept)


def _empty(config) -> batch_lib.TokenBatch:
  """Returns a collection without tokens."""
  shape = _shape(config)
  arrays: dict[str, Any] = {
    name: jnp.zeros(shape if name.endswith('BL') else shape[:1], dtype)
    for name, dtype in _DTYPES.items()
  }
  return batch_lib.TokenBatch(**_NONE | arrays)


METHOD = step_lib.Method(context_of, value_loss, finish=finish)
