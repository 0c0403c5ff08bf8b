"""The losses in plain eager torch, as a user of torch would write them.

B trajectories, L tokens, T turns. There are three ways to give tokens the mean
of their turn. Which is the fastest depends on the machine, so all three are
timed, and ours is compared with the best one.
"""

from collections.abc import Callable

import torch

Tensor = torch.Tensor
TurnMeans = Callable[[Tensor, Tensor, int], Tensor]

CLIP = 0.2
TAU = 3.0
ENTROPY_COEFFICIENT = 0.001


def scatter_add(x_BL: Tensor, ids_BL: Tensor, num_turns: int) -> Tensor:
  """Fills a table [B, T + 1] by scatter_add and reads it by gather."""
  totals_BT = x_BL.new_zeros(len(x_BL), num_turns + 1)
  counts_BT = totals_BT.scatter_add(1, ids_BL, torch.ones_like(x_BL))
  totals_BT = totals_BT.scatter_add(1, ids_BL, x_BL)
  return (totals_BT / counts_BT.clamp(min=1)).gather(1, ids_BL)


def index_add(x_BL: Tensor, ids_BL: Tensor, num_turns: int) -> Tensor:
  """Fills one flat table of all rows by index_add and reads it by indexing."""
  rows = torch.arange(len(x_BL))[:, None] * (num_turns + 1)
  flat = (rows + ids_BL).flatten()
  totals = x_BL.new_zeros(len(x_BL) * (num_turns + 1))
  counts = totals.index_add(0, flat, torch.ones_like(x_BL).flatten())
  totals = totals.index_add(0, flat, x_BL.flatten())
  return (totals / counts.clamp(min=1))[flat].view_as(x_BL)


def loop(x_BL: Tensor, ids_BL: Tensor, num_turns: int) -> Tensor:
  """Takes one masked mean per turn."""
  out_BL = torch.zeros_like(x_BL)
  for turn in range(1, num_turns + 1):
    own_BL = ids_BL == turn
    total_B1 = torch.where(own_BL, x_BL, 0.0).sum(1, keepdim=True)
    mean_B1 = total_B1 / own_BL.sum(1, keepdim=True).clamp(min=1)
    out_BL = torch.where(own_BL, mean_B1, out_BL)
  return out_BL


TURN_MEANS: dict[str, TurnMeans] = {
  'scatter_add': scatter_add,
  'index_add': index_add,
  'loop': loop,
}


def _mean(x_BL, mask_BL):
  return torch.where(mask_BL, x_BL, 0.0).sum() / mask_BL.sum()


def _rms(x_BL, mask_BL):
  squares = torch.where(mask_BL, x_BL.square(), 0.0).sum()
  return (squares / mask_BL.sum().clamp(min=1)).sqrt()


@torch.no_grad()
def clipping_bias_scale(
  log_ratio_BL: Tensor, advantages_BL: Tensor, mask_BL: Tensor
) -> Tensor:
  """Returns the scale of the clipping bias correction, a scalar.

  It is 1 / rho if rho = N_U / N_V exceeds tau, else 1. N_U and N_V are the root
  mean squares of ratio times advantage over the tokens whose ratio is outside
  and inside the band.
  """
  ratio_BL = log_ratio_BL.exp()
  inside_BL = (ratio_BL >= 1 - CLIP) & (ratio_BL <= 1 + CLIP)
  weighted_BL = ratio_BL * advantages_BL
  clipped = _rms(weighted_BL, mask_BL & ~inside_BL)
  rho = clipped / (_rms(weighted_BL, mask_BL & inside_BL) + 1e-8)
  return torch.where(rho > TAU, 1 / rho, 1.0)


def policy_loss(
  logprobs_BL: Tensor,
  old_logprobs_BL: Tensor,
  advantages_BL: Tensor,
  entropy_BL: Tensor,
  mask_BL: Tensor,
  ids_BL: Tensor | None,
  *,
  num_turns: int,
  turn_means: TurnMeans | None,
  corrected: bool,
) -> Tensor:
  """Returns the scalar loss of token PPO, Turn-PPO, S-PPO or ST-PPO.

  Args:
    logprobs_BL: log-probabilities, with respect to which the loss is
      differentiated.
    old_logprobs_BL, advantages_BL, entropy_BL: one number for each token.
    mask_BL: bool, true for the policy's tokens.
    ids_BL: int64, 0 or the token's turn; not read without `turn_means`.
    num_turns: the most turns of a row.
    turn_means: one of `TURN_MEANS`, for turn-level ratios; None = every token
      has its own ratio.
    corrected: whether the clipping bias scales the terms (S-PPO, ST-PPO).
  """
  log_ratio_BL = torch.where(mask_BL, logprobs_BL - old_logprobs_BL, 0.0)
  log_ratio_BL = token_BL = log_ratio_BL.clamp(-20.0, 20.0)
  if turn_means is not None:
    log_ratio_BL = turn_means(token_BL, ids_BL, num_turns)
  ratio_BL = log_ratio_BL.exp()
  clipped_BL = ratio_BL.clamp(1 - CLIP, 1 + CLIP)
  policy = _mean(
    torch.maximum(-advantages_BL * ratio_BL, -advantages_BL * clipped_BL),
    mask_BL,
  )
  if corrected:
    policy = policy * clipping_bias_scale(token_BL, advantages_BL, mask_BL)
  return policy - ENTROPY_COEFFICIENT * _mean(entropy_BL, mask_BL)


def value_loss(
  values_BL: Tensor,
  old_values_BL: Tensor,
  returns_BL: Tensor,
  mask_BL: Tensor,
  *,
  clip: float,
) -> Tensor:
  """Returns the clipped value loss, a scalar.

  It is half of the mean over tokens of the larger of two squared errors: the
  error of the value, and the error of the value clipped to within `clip` of the
  old value.
  """
  near_BL = old_values_BL + (values_BL - old_values_BL).clamp(-clip, clip)
  plain_BL = (values_BL - returns_BL).square()
  clipped_BL = (near_BL - returns_BL).square()
  return 0.5 * _mean(torch.maximum(plain_BL, clipped_BL), mask_BL)
