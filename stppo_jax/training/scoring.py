"""What the models of a state say of whole sequences.

B trajectories, L tokens, M of which are asked for.
"""

import functools
from typing import NamedTuple

import jax

from stppo_jax.models import functional
from stppo_jax.training import state as state_lib

Array = jax.Array


class Scores(NamedTuple):
  """Per token; see `heads`. Without a value model, values_BL is None."""

  logprobs_BL: Array
  entropy_BL: Array
  values_BL: Array | None


def score(
  state: state_lib.TrainState,
  tokens_BL: Array,
  positions_BM: Array | None = None,
  lengths_B: Array | None = None,
  *,
  policy: functional.Model,
  value: functional.Model | None,
  temperature: float,
) -> Scores:
  """Scores by policy and value model: one pass where they are one.

  Args:
    state: its weights, joined with its frozen part.
    tokens_BL: the sequences.
    positions_BM: tokens whose log-probability and entropy are asked for; None:
      all.
    lengths_B: tokens of each row without padding; None: all.
    policy, value: models, see `roles.build`.
    temperature: of sampling.
  """
  whole = functools.partial(state_lib.whole, frozen=state.frozen)
  params = whole(policy, params=state.policy.params)
  if policy.head == 'both':
    return Scores(
      *policy.logprobs_entropy_and_values(
        params, tokens_BL, positions_BM, lengths_B, temperature=temperature
      )
    )
  logprobs_BL, entropy_BL = policy.logprobs_and_entropy(
    params, tokens_BL, positions_BM, lengths_B, temperature=temperature
  )
  values_BL = None
  if value is not None:
    values_BL = value.values(
      whole(value, params=state.value.params), tokens_BL, lengths_B
    )
  return Scores(logprobs_BL, entropy_BL, values_BL)
