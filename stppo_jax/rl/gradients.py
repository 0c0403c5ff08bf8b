"""The gradient-norm form of the clipping-bias correction.

With `correction.clipping_bias.norm='gradient'` the policy gradient is divided
by the L2 norm of the bias c, the gradient of the clipped terms (see
`clipping_bias`):

  g = g_policy / max(|c|_2, floor) + g_other,    c = grad bias

Each of the three terms needs a gradient of its own, so the functions here
replace `jax.value_and_grad` of the loss, which every other algorithm uses.
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax.rl import clipping_bias

Array = jax.Array
Tree = Any


class LossTerms(NamedTuple):
  """The terms of a loss, or the gradient of each of them.

  Attributes:
    policy: the policy term.
    bias: the scalar whose gradient is c.
    other: all terms that the correction does not change.
  """

  policy: Tree
  bias: Tree
  other: Tree


def term_gradients(
  loss_terms: Callable[[Tree], tuple[LossTerms, Tree]], params: Tree
) -> tuple[LossTerms, Tree]:
  """Returns the gradient of each term, and the auxiliary output.

  The forward pass runs once, and each term has a backward pass of its own.

  Args:
    loss_terms: maps parameters to (scalar terms, auxiliary output).
    params: the parameters at which the gradients are taken.
  """
  terms, pull_back, outputs = jax.vjp(loss_terms, params, has_aux=True)

  def gradient(name: str) -> Tree:
    zeros = jax.tree.map(jnp.zeros_like, terms)
    one = jnp.ones_like(getattr(terms, name))
    return pull_back(zeros._replace(**{name: one}))[0]

  return LossTerms(*map(gradient, LossTerms._fields)), outputs


def divide_by_bias_norm(
  gradients: LossTerms, *, floor: Array | float
) -> tuple[Tree, Array]:
  """Returns the combined gradient g (see the module's docstring), and |c|_2.

  Args:
    gradients: the gradient of each term, summed over the microbatches; all have
      the same structure.
    floor: the smallest divisor, so that a small c does not enlarge a step.
  """
  squares = [jnp.sum(jnp.square(x)) for x in jax.tree.leaves(gradients.bias)]
  norm = jnp.sqrt(sum(squares))
  scale = clipping_bias.gradient_scale(norm, floor=floor)
  gradient = jax.tree.map(
    lambda policy, other: scale * policy + other,
    gradients.policy,
    gradients.other,
  )
  return gradient, norm
