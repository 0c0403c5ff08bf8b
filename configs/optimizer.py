"""The options of the optimisers, which several sections of a config share."""

from typing import Any


def adam(**changes: float) -> dict[str, Any]:
  """Returns the default options of an optimiser, with some changes."""
  return {
    # adamw | adamw_bfloat16 | adafactor | muon. adamw_bfloat16 stores moments
    # in half the memory, rounded stochastically. adafactor stores mean squares
    # of rows and columns, and does not use b1, b2 and eps. muon stores one
    # moment of each matrix of a layer, and makes the updates of these matrices
    # orthogonal; b1 and b2 do not apply to them.
    'name': 'adamw',
    'learning_rate': 1e-6,  # the rate after the warm-up
    'warmup_updates': 0,  # updates in which the rate rises linearly from 0
    'b1': 0.9,  # decay of the mean of gradients
    'b2': 0.999,  # decay of the mean of squared gradients
    'eps': 1e-8,  # added to the root of the mean of squared gradients
    'weight_decay': 0.01,  # decoupled from the gradient, as in AdamW
    'max_grad_norm': 1.0,  # larger gradients are scaled down to this norm
    # Updates whose gradient has a larger norm (a spike) are skipped; 0 = no
    # update is skipped. actor/grad_norm and critic/grad_norm show usual norms.
    'skip_grad_norm': 0.0,
    **changes,
  }
