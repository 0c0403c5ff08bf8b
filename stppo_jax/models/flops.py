"""Counts the floating-point operations that a model needs.

Causal attention counts half of the square of the length. In a layer with a
window, it counts only the keys in the window of each query. Logits count at
loss positions only. Only the functions named `recomputed_*` count what a
backward pass repeats. An addition and a multiplication are two operations.
"""

from collections.abc import Iterable
from typing import NamedTuple

from stppo_jax.models import config as model_config


class Weights(NamedTuple):
  """Counts the weights that a token is multiplied by in one layer.

  Attributes:
    attention: weights of the query, key, value and output projections.
    expand: weights of the gate and up projections; in a mixture, those of the
      experts that the token visits, and those of the router.
    contract: weights of the down projections.
  """

  attention: int
  expand: int
  contract: int


def mlp_width(shape: model_config.ModelConfig) -> int:
  """Returns the width of the MLPs that a token visits in a layer."""
  if shape.num_experts:
    return shape.num_experts_per_tok * shape.moe_intermediate_size
  return shape.intermediate_size


def layer_weights(shape: model_config.ModelConfig) -> Weights:
  """Returns the numbers of weights of a layer; norms are left out.

  If some layers have experts and some have none, it is one that has some.
  """
  queries = shape.num_heads * shape.head_dim
  keys = shape.num_kv_heads * shape.head_dim
  width = mlp_width(shape)
  return Weights(
    attention=shape.hidden_size * (2 * queries + 2 * keys),
    expand=shape.hidden_size * (2 * width + shape.num_experts),
    contract=shape.hidden_size * width,
  )


def _all_weights(shape: model_config.ModelConfig) -> Weights:
  """Returns the sums of `layer_weights` over all layers."""
  stacks = shape.stacks.values()
  counts = ([n * x for x in layer_weights(layer)] for layer, n in stacks)
  return Weights(*map(sum, zip(*counts)))


def attention_operations(
  shape: model_config.ModelConfig, length: float
) -> float:
  """Returns the forward operations of attention for a token, in all layers.

  Args:
    shape: the shape of the model.
    length: the number of tokens of its row, of which it attends to half on
      average, or to fewer in a layer with a window.
  """
  keys = seen_keys(shape, length)
  return 4.0 * keys * shape.num_heads * shape.head_dim


def seen_keys(shape: model_config.ModelConfig, length: float) -> float:
  """Returns the keys that a token of a row sees on average, in all layers."""
  windows, keys = shape.layer_windows, 0.0
  for window in set(windows):
    # The first tokens of a row see all before them, the others a whole window.
    fills = 0 < window < length
    seen = window - window**2 / (2 * length) if fills else length / 2
    keys += windows.count(window) * seen
  return keys


def layer_operations(shape: model_config.ModelConfig, length: float) -> float:
  """Returns the forward operations of all layers for a token.

  Args:
    shape: the shape of the model, of whose experts only the visited ones count.
    length: the number of tokens of its row, see `attention_operations`.
  """
  return 2.0 * sum(_all_weights(shape)) + attention_operations(shape, length)


def logit_operations(shape: model_config.ModelConfig) -> float:
  """Returns the forward operations of the logits of a token."""
  return 2.0 * shape.hidden_size * shape.vocab_size


def recomputed_layer_operations(
  shape: model_config.ModelConfig, length: float
) -> float:
  """Returns the operations of a token that the layers' backward pass repeats.

  Args:
    shape: the shape of the model, whose `remat` says which results are saved.
    length: the number of tokens of its row, see `attention_operations`.
  """
  if shape.remat not in ('full', 'dots'):
    return 0.0
  count = attention_operations(shape, length)
  if shape.remat == 'full':
    # The backward pass does not need the result of the last product.
    weights = _all_weights(shape)
    count += 2.0 * (weights.attention + weights.expand)
  return count


def forward_operations(
  shape: model_config.ModelConfig, lengths: Iterable[float], losses: float
) -> tuple[float, float]:
  """Returns the forward operations of a policy, and of a value model.

  Args:
    shape: the shape of either.
    lengths: the number of tokens of each row.
    losses: the number of tokens with a loss.
  """
  layers = sum(length * layer_operations(shape, length) for length in lengths)
  return layers + logit_operations(shape) * losses, layers


def recomputed_operations(
  shape: model_config.ModelConfig, lengths: Iterable[float], losses: float
) -> tuple[float, float]:
  """Returns the operations that backward passes of both models repeat.

  Logits are always computed again, because they are too large to be saved. What
  an attention kernel recomputes by itself is not counted.

  Args:
    shape, lengths, losses: see `forward_operations`.
  """
  layers = sum(
    length * recomputed_layer_operations(shape, length) for length in lengths
  )
  return layers + logit_operations(shape) * losses, layers
