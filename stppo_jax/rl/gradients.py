"""From the parts of the policy loss to one gradient.

A correction with norm='gradient' needs gradients of its own: of the policy
term, of the bias, and of the rest (see `clipping_bias`). Everything else takes
one pull-back of the sum.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import clipping_bias

Array = jax.Array
Tree = Any

_TOGETHER = {'loss': frozenset({'policy', 'other'})}
_APART = {name: frozenset({name}) for name in ('policy', 'bias', 'other')}


def _divides(algorithm: algorithm_lib.Algorithm) -> bool:
  """Whether the gradient itself is divided by the norm of the bias."""
  correction = algorithm.correction
  return (
    'clipping_bias' in correction.names
    and correction.clipping_bias.norm == 'gradient'
  )


def pull_backs(
  algorithm: algorithm_lib.Algorithm,
) -> dict[str, frozenset[str]]:
  """Which parts of `PolicyLoss` are differentiated together, by name."""
  return _APART if _divides(algorithm) else _TOGETHER


def combine(
  algorithm: algorithm_lib.Algorithm, gradients: Mapping[str, Tree]
) -> tuple[Tree, dict[str, Array]]:
  """The gradient of the update, from one gradient per pull-back.

  Args:
    algorithm: the row.
    gradients: summed over the microbatches, by the names of `pull_backs`.

  Returns:
    The gradient, before norm clipping, and the metric
    `stab/bias_grad_norm` (0 where the row does not form it).
  """
  if not _divides(algorithm):
    return gradients['loss'], {'stab/bias_grad_norm': jnp.zeros(())}
  squares = [jnp.sum(jnp.square(x)) for x in jax.tree.leaves(gradients['bias'])]
  norm = jnp.sqrt(sum(squares))
  scale = clipping_bias.gradient_scale(
    norm, floor=algorithm.correction.clipping_bias.floor
  )
  gradient = jax.tree.map(
    lambda policy, other: scale * policy + other,
    gradients['policy'],
    gradients['other'],
  )
  return gradient, {'stab/bias_grad_norm': norm}
