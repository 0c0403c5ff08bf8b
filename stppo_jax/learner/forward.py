"""What the models of a state say of whole sequences.

B trajectories, L tokens, M of which are asked for; of a mixture of experts, N
layers, E experts that a token visits.
"""

import functools

import jax

from stppo_jax.learner import state as state_lib
from stppo_jax.models import functional
from stppo_jax.models import precision

Array = jax.Array


def computed(state: state_lib.TrainState, dtype: str) -> state_lib.TrainState:
  """A state's weights, and no more, as they are computed with.

  See `precision.computed`. Called before `score`, the casts are made once, not
  for each part of the rows.
  """

  def cast(model):
    if model is None:
      return None
    params = precision.cast(model.params, dtype)
    return state_lib.ModelState(params, optimizer=None, updates=None)

  return state_lib.TrainState(
    cast(state.policy),
    cast(state.value),
    frozen=precision.cast(state.frozen, dtype),
  )


def score(
  state: state_lib.TrainState,
  tokens_BL: Array,
  *,
  lengths_B: Array | None = None,
  loss_positions_BM: Array | None = None,
  expert_ids: Array | None = None,
  policy: functional.Model,
  value: functional.Model | None,
  temperature: float,
) -> functional.TokenOutputs:
  """Scores by policy and value model: one pass where they are one.

  Args:
    state: its weights, joined with its frozen part.
    tokens_BL: the sequences.
    lengths_B: tokens of each row without padding; None: all.
    loss_positions_BM: tokens whose log-probability and entropy are asked for;
      None: all.
    expert_ids: experts that the policy must visit; None: its own choice.
    policy, value: models, see `model_roles.build`.
    temperature: of sampling.
  """
  whole = functools.partial(state_lib.join_frozen, frozen=state.frozen)
  params = whole(policy, params=state.policy.params)
  scores = policy.token_outputs(
    params,
    tokens_BL,
    lengths_B=lengths_B,
    loss_positions_BM=loss_positions_BM,
    expert_ids=expert_ids,
    temperature=temperature,
  )
  if value is None:
    return scores
  values_BL = value.values(
    whole(value, params=state.value.params), tokens_BL, lengths_B=lengths_B
  )
  return scores._replace(values_BL=values_BL)
