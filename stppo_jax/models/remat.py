"""Rematerialisation: which results the forward pass of a layer saves.

The backward pass computes the others again. A policy selects by the kind of
operation whose results are saved.
"""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import jax

_policies = jax.checkpoint_policies

# From the most memory to the least. 'dots' saves products without batch
# dimensions: those with weights, which `layers.Linear` computes as products of
# two matrices. The products of attention have batch dimensions (rows and
# heads); its logits grow with the square of the length, so they are computed
# again. 'all_dots' saves them too; 'full' saves nothing but a layer's input.
POLICIES: Mapping[str, Callable[..., Any]] = {
  'none': _policies.everything_saveable,
  'all_dots': _policies.dots_saveable,
  'dots': _policies.dots_with_no_batch_dims_saveable,
  'full': _policies.nothing_saveable,
}


def rematerialised(
  layer: Callable[..., Any], name: str, *, unrolled: bool
) -> Callable[..., Any]:
  """Returns a layer that computes the same and saves what the policy selects.

  Args:
    layer: function of one iteration of the scan over layers.
    name: a key of `POLICIES`: 'none' saves everything, 'all_dots' all matrix
      products (attention in tiles saves its own residuals under any policy),
      'dots' products with weights, 'full' the layer's input only.
    unrolled: whether several layers are in one iteration. Within an iteration
      the compiler would find that something is computed twice and keep the
      first result in memory, which has to be prevented. Across iterations it
      cannot find this.

  Raises:
    ValueError: the name is not a key of `POLICIES`.
  """
  if name not in POLICIES:
    raise ValueError(f'remat={name!r}; choices: ' + ', '.join(POLICIES))
  if name == 'none':
    return layer
  return jax.checkpoint(layer, policy=POLICIES[name], prevent_cse=unrolled)
