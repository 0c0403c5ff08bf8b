"""Forward passes of policy and value model over whole sequences.

B trajectories, L tokens, M loss positions.
"""

from typing import NamedTuple

import jax

from stppo_jax import batch as batch_lib
from stppo_jax.learner import model_roles
from stppo_jax.models import functional

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


def token_outputs(
  params: model_roles.Params,
  tokens_BL: Array,
  *,
  lengths_B: Array | None = None,
  loss_positions_BM: Array | None = None,
  expert_ids: Array | None = None,
  models: model_roles.Models,
  temperature: float,
) -> functional.TokenOutputs:
  """Returns log-probabilities, entropy and values of sequences.

  With a shared backbone this is one pass; otherwise it is one of each model.

  Args:
    params: the weights of both models.
    tokens_BL: token ids, right-padded.
    lengths_B: tokens of each row without padding; None: all are tokens.
    loss_positions_BM: where log-probabilities and entropy are wanted; None:
      everywhere. Values are wanted everywhere.
    expert_ids: experts that the policy must visit, see `TokenBatch`; None: the
      routers choose.
    models: policy and value model.
    temperature: the sampling temperature.
  """
  outputs = models.policy.token_outputs(
    models.policy_weights(params),
    tokens_BL,
    lengths_B=lengths_B,
    loss_positions_BM=loss_positions_BM,
    expert_ids=expert_ids,
    temperature=temperature,
  )
  if models.value is None:
    return outputs
  values_BL = models.value.values(
    models.value_weights(params), tokens_BL, lengths_B=lengths_B
  )
  return outputs._replace(values_BL=values_BL)
