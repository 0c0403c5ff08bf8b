"""Forward passes of policy and value model over whole sequences.

B trajectories, L tokens, M loss positions.
"""

from typing import NamedTuple

import jax

from stppo_jax import batch as batch_lib
from stppo_jax.learner import model_roles
from stppo_jax.learner import state as state_lib
from stppo_jax.models import functional
from stppo_jax.models import precision

Array = jax.Array


class ModelInputs(NamedTuple):
  """The arrays of a `TokenBatch` that models read."""

  tokens_BL: Array
  lengths_B: Array
  loss_positions_BM: Array | None
  expert_ids: Array | None


def model_inputs(batch: batch_lib.TokenBatch) -> ModelInputs:
  """Returns the arrays of a batch that models read."""
  return ModelInputs(*(getattr(batch, name) for name in ModelInputs._fields))


class TrainedParams(NamedTuple):
  """The trained weights of both models, or their gradients.

  Attributes:
    policy: all weights of the policy, or its adapters and heads.
    value: the same of the value model; None without one.
  """

  policy: functional.Params
  value: functional.Params | None


def trained_params(state: state_lib.TrainState) -> TrainedParams:
  """Returns the trained weights of a state."""
  value = None if state.value is None else state.value.params
  return TrainedParams(state.policy.params, value)


def cast_params(
  state: state_lib.TrainState,
  *,
  frozen: functional.Params | None,
  dtype: str,
) -> tuple[TrainedParams, functional.Params | None]:
  """Returns trained and frozen weights in the dtype of the activations.

  Call it outside a loop over microbatches, so that the cast copies are made
  once and the gathers between devices move the smaller dtype.
  """
  return precision.cast((trained_params(state), frozen), dtype)


def token_outputs(
  params: TrainedParams,
  tokens_BL: Array,
  *,
  frozen: functional.Params | None = None,
  lengths_B: Array | None = None,
  loss_positions_BM: Array | None = None,
  expert_ids: Array | None = None,
  models: model_roles.Models,
  temperature: float,
) -> functional.TokenOutputs:
  """Returns log-probabilities, entropy and values of sequences.

  With a shared backbone this is one pass; otherwise it is one of each model.

  Args:
    params: trained weights.
    tokens_BL: token ids, right-padded.
    frozen: the base under adapters; None where everything is trained.
    lengths_B: tokens of each row without padding; None: all are tokens.
    loss_positions_BM: where log-probabilities and entropy are wanted; None:
      everywhere. Values are wanted everywhere.
    expert_ids: experts that the policy must visit, see `TokenBatch`; None: the
      routers choose.
    models: policy and value model.
    temperature: the sampling temperature.
  """
  outputs = models.policy.token_outputs(
    state_lib.join_frozen(models.policy, frozen, params.policy),
    tokens_BL,
    lengths_B=lengths_B,
    loss_positions_BM=loss_positions_BM,
    expert_ids=expert_ids,
    temperature=temperature,
  )
  if models.value is None:
    return outputs
  assert params.value is not None  # both come from one config
  values_BL = models.value.values(
    state_lib.join_frozen(models.value, frozen, params.value),
    tokens_BL,
    lengths_B=lengths_B,
  )
  return outputs._replace(values_BL=values_BL)
