"""Random batches of the usual shape: a prompt, then turns and observations.

B trajectories, L tokens.
"""

import functools

import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.rl import losses

# The policy loss of a batch that is one minibatch and one microbatch.
policy_loss = functools.partial(losses.policy_loss, statistics=None, count=None)


def turn_ids(
  rng: np.random.Generator, rows: int, length: int, num_turns: int
) -> np.ndarray:
  """Returns the turn number of each token; 0 if the policy did not write it.

  The result is int32 [B, L], with turns 1 to num_turns. A row is cut into
  num_turns + 1 equal spans. The first span is the prompt. Each other span
  begins with a turn, which takes a fifth to three fifths of the span, and ends
  with an observation. Every turn has at least one token.
  """
  span = length // (num_turns + 1)
  ids_BL = np.zeros((rows, length), np.int32)
  sizes_BT = rng.integers(
    max(span // 5, 1), max(3 * span // 5, 1) + 1, (rows, num_turns)
  )
  for b in range(rows):
    for turn in range(1, num_turns + 1):
      begin = span * turn
      ids_BL[b, begin : begin + sizes_BT[b, turn - 1]] = turn
  return ids_BL


def dialogue_ids(
  rng: np.random.Generator, lengths_B: np.ndarray, length: int, num_turns: int
) -> np.ndarray:
  """Returns the `turn_ids` of rows of different lengths, [B, length].

  Args:
    rng: the random generator of the lengths of turns.
    lengths_B: the number of tokens of each row without padding.
    length: the number of tokens of each row with padding.
    num_turns: the number of turns of a row.
  """
  ids_BL = np.zeros((len(lengths_B), length), np.int32)
  for b, own in enumerate(lengths_B):
    ids_BL[b, :own] = turn_ids(rng, 1, int(own), num_turns)
  return ids_BL


def token_batch(
  *, rows: int, length: int, num_turns: int, seed: int = 0
) -> tuple[batch_lib.TokenBatch, np.ndarray, np.ndarray]:
  """Returns a random annotated batch for a policy loss.

  The second and the third result are the log-probabilities and the entropy of
  the new policy. The new policy is so far from the old policy that ratio bounds
  of 1 - 0.2 and 1 + 0.2 clip a tenth of the turns, and a larger share of the
  tokens. Floating-point arrays are float32.
  """
  rng = np.random.default_rng(seed)
  ids_BL = turn_ids(rng, rows, length, num_turns)

  def draw():
    return rng.normal(size=ids_BL.shape).astype(np.float32)

  old_BL = -np.abs(draw())
  # A common shift of all tokens of a row makes the ratios of whole turns leave
  # the bounds.
  shift_B1 = 0.15 * rng.normal(size=(rows, 1)).astype(np.float32)
  logprobs_BL = old_BL + shift_B1 + np.float32(0.2) * draw()
  batch = batch_lib.TokenBatch(
    tokens_BL=np.zeros(ids_BL.shape, np.int32),
    lengths_B=np.full(rows, length, np.int32),
    turn_ids_BL=ids_BL,
    loss_mask_BL=ids_BL > 0,
    sampler_logprobs_BL=old_BL,
    rewards_BL=draw(),
    group_ids_B=np.arange(rows, dtype=np.int32),
    old_logprobs_BL=old_BL,
    advantages_BL=draw(),
  )
  return batch, logprobs_BL, np.abs(draw())
