"""Token-level direct preference optimisation on pairs of trajectories.

Q pairs, 2 = (preferred w, dispreferred l), L tokens. The sums below are over
the loss mask of a trajectory y, and KL is over the whole vocabulary at a token:

  R(y) = sum_t log pi(y_t) - log reference(y_t)
  K(y) = sum_t KL(reference || pi), called SeqKL in the paper
  u    = R(w) - R(l)

  loss = -log sigmoid(beta (u - shift)),    sg: stop-gradient
  tdpo1: shift = K(l) - K(w)
  tdpo2: shift = alpha (K(l) - sg K(w))

Without the shift this is the loss of DPO. At pi = reference, K is at its
minimum, so the gradient equals the gradient of DPO. The sums leave observations
out, because the policy did not write them. This is our choice: the paper has
one turn and no observations.

Source: Zeng et al., "Token-level Direct Preference Optimization",
arXiv 2404.11999.
"""

import typing

import chex
import jax
import jax.numpy as jnp

from stppo_jax.rl import masking

Array = jax.Array
sg = jax.lax.stop_gradient


PREFERENCES = ('tdpo1', 'tdpo2')


class PreferenceLoss(typing.NamedTuple):
  """Sums over pairs; the caller divides them by the minibatch's count.

  A pair counts if both of its trajectories have a token in the loss mask. The
  sums leave out all other pairs, such as padding.

  Attributes:
    total: the sum of the losses.
    count: the number of pairs.
    margin: the sum of beta u, the margin of the implied rewards.
    correct: the number of pairs with u > 0.
    log_ratio_2: the sums of R over preferred and over dispreferred
      trajectories.
    divergence_2: the sums of K over preferred and over dispreferred
      trajectories, in nats.
  """

  total: Array
  count: Array
  margin: Array
  correct: Array
  log_ratio_2: Array
  divergence_2: Array


def preference_loss(
  logprobs_Q2L: Array,
  ref_logprobs_Q2L: Array,
  divergence_Q2L: Array,
  loss_mask_Q2L: Array,
  *,
  name: str,
  beta: Array | float,
  alpha: Array | float,
) -> PreferenceLoss:
  """Returns the preference loss of the pairs; see the module's docstring.

  Off the loss mask the first three arrays may hold any numbers.

  Args:
    logprobs_Q2L: log pi of the tokens, differentiable.
    ref_logprobs_Q2L: log-probabilities of the tokens under the reference; no
      gradient flows into them.
    divergence_Q2L: KL(reference || pi) in nats, between the distributions over
      the whole vocabulary that predict each token; differentiable.
    loss_mask_Q2L: bool, tokens of the policy that are trained on.
    name: one of `PREFERENCES`.
    beta: scale of the margin; a larger beta keeps the policy nearer to the
      reference.
    alpha: weight of the divergences in tdpo2.
  """
  chex.assert_equal_shape(
    [logprobs_Q2L, ref_logprobs_Q2L, divergence_Q2L, loss_mask_Q2L]
  )
  chex.assert_axis_dimension(loss_mask_Q2L, 1, 2)
  valid_Q = jnp.all(jnp.any(loss_mask_Q2L, axis=2), axis=1)
  # Pairs that do not count are masked token by token. If only their sums were
  # masked, a nan in one trajectory of such a pair would reach the gradient.
  chosen = lambda x_Q2L: masking.select(
    x_Q2L, loss_mask_Q2L & valid_Q[:, None, None]
  )
  # The log-probabilities are subtracted token by token, because the difference
  # of two long sums would lose its digits to cancellation.
  log_ratio_Q2L = chosen(logprobs_Q2L) - chosen(sg(ref_logprobs_Q2L))
  log_ratio_Q2 = jnp.sum(log_ratio_Q2L, axis=2)
  divergence_Q2 = jnp.sum(chosen(divergence_Q2L), axis=2)
  margin_Q = beta * (log_ratio_Q2[:, 0] - log_ratio_Q2[:, 1])
  preferred_Q, dispreferred_Q = divergence_Q2[:, 0], divergence_Q2[:, 1]
  if name == 'tdpo1':
    shift_Q = dispreferred_Q - preferred_Q
  else:
    # Detached, so that only the dispreferred trajectory is kept near the
    # reference.
    shift_Q = alpha * (dispreferred_Q - sg(preferred_Q))
  loss_Q = jax.nn.softplus(beta * shift_Q - margin_Q)

  total, count = masking.masked_total(loss_Q, valid_Q)
  over_pairs = lambda x_Q: sg(masking.masked_total(x_Q, valid_Q)[0])
  return PreferenceLoss(
    total=total,
    count=count,
    margin=over_pairs(margin_Q),
    correct=over_pairs((margin_Q > 0).astype(margin_Q.dtype)),
    # Pairs that do not count add 0 to these two sums.
    log_ratio_2=sg(jnp.sum(log_ratio_Q2, axis=0)),
    divergence_2=sg(jnp.sum(divergence_Q2, axis=0)),
  )
