"""Rematerialisation: what the forward pass keeps of a layer.

The backward pass computes the rest again. A policy decides by the kind of
operation: its result is saved, or it is not.
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
  """Returns a layer that saves what the policy says and computes the same.

  Args:
    layer: function of one iteration of the scan over layers.
    name: a key of `POLICIES`: 'none' saves everything, 'all_dots' all matrix
      products (attention in tiles saves its own residuals under any policy),
      'dots' products with weights, 'full' the layer's input only.
    unrolled: whether several layers are in one iteration. There the compiler
      would recognise what is computed twice and keep the first result, which
      has to be prevented; from one iteration to the next it cannot.

  Raises:
    ValueError: the name is not a key of `POLICIES`.
  """
  if name not in POLICIES:
    raise ValueError(f'remat={name!r}; choices: ' + ', '.join(POLICIES))
  if name == 'none':
    return layer
  return jax.checkpoint(layer, policy=POLICIES[name], prevent_cse=unrolled)
