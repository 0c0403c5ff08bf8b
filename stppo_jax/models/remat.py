"""What of a layer is kept for the backward pass; the rest is computed again."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import jax

_policies = jax.checkpoint_policies

# From the most memory to the least. Products with weights have no batch
# dimensions (`layers.Linear`), attention's scores have: they grow with the
# square of the length, so 'dots' does not keep them.
POLICIES: Mapping[str, Callable[..., Any]] = {
  'none': _policies.everything_saveable,
  'all_dots': _policies.dots_saveable,
  'dots': _policies.dots_with_no_batch_dims_saveable,
  'full': _policies.nothing_saveable,
}


def recomputed(
  layer: Callable[..., Any], name: str, *, unrolled: bool
) -> Callable[..., Any]:
  """A layer of a scan that keeps what the policy says; the same numbers.

  Args:
    layer: one iteration.
    name: a key of POLICIES: 'none' keeps all, 'full' the layer's input only,
      'dots' what is multiplied with weights, 'all_dots' attention's scores
      too, where these are not formed in blocks.
    unrolled: several layers are in one iteration, where the compiler would
      find what is computed twice and keep it.

  Raises:
    ValueError: unknown name.
  """
  if name not in POLICIES:
    raise ValueError(f'remat={name!r}; choices: ' + ', '.join(POLICIES))
  if name == 'none':
    return layer
  return jax.checkpoint(layer, policy=POLICIES[name], prevent_cse=unrolled)
