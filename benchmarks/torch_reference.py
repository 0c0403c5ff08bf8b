"""The losses in plain torch, as a user of torch would write them.

B trajectories, L tokens.
"""

import torch

Tensor = torch.Tensor

CLIP = 0.2
ENTROPY_COEFFICIENT = 0.001


def _mean(x_BL, mask_BL):
  return torch.where(mask_BL, x_BL, 0.0).sum() / mask_BL.sum()


def policy_loss(
  logprobs_BL: Tensor,
  old_logprobs_BL: Tensor,
  advantages_BL: Tensor,
  entropy_BL: Tensor,
  mask_BL: Tensor,
) -> Tensor:
  """Returns the scalar loss of token PPO with an entropy bonus.

  Args:
    logprobs_BL: log-probabilities of the policy that is trained.
    old_logprobs_BL, advantages_BL, entropy_BL: one number for each token.
    mask_BL: bool, true for the policy's tokens.
  """
  log_ratio_BL = torch.where(mask_BL, logprobs_BL - old_logprobs_BL, 0.0)
  ratio_BL = log_ratio_BL.clamp(-20.0, 20.0).exp()
  clipped_BL = ratio_BL.clamp(1 - CLIP, 1 + CLIP)
  policy = _mean(
    torch.maximum(-advantages_BL * ratio_BL, -advantages_BL * clipped_BL),
    mask_BL,
  )
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

  Each token has two squared errors: the error of its value, and the error of
  the value clipped to within `clip` of the old value. The loss is half of the
  mean over tokens of the larger squared error.
  """
  near_BL = old_values_BL + (values_BL - old_values_BL).clamp(-clip, clip)
  plain_BL = (values_BL - returns_BL).square()
  clipped_BL = (near_BL - returns_BL).square()
  return 0.5 * _mean(torch.maximum(plain_BL, clipped_BL), mask_BL)
