"""Counts the floating-point operations that a model needs.

Causal attention over L tokens counts as L² / 2 pairs of a query and a key. In a
layer with a window, only the keys in the window of each query count. Logits
count at loss positions only. Only the functions named `recomputed_*` count the
operations that a backward pass repeats. An addition and a multiplication are
two operations.
"""

from collections.abc import Iterable
from typing import NamedTuple

from stppo_jax.models import config as model_config


class Weights(NamedTuple):
  """Counts the weights that a token is multiplied by in one layer.

  Attributes:
    attention: weights of the query, key, value and output projections.
    expand: weights of the gate and up projections. In a mixture of experts,
      these are the weights of the visited experts and of the router.
    contract: weights of the down projections. In a mixture of experts, these
      are the weights of the visited experts.
  """

  attention: int
  expand: int
  contract: int


def mlp_width(shape: model_config.ModelConfig) -> int:
  """Returns the total width of the MLPs that a token visits in a layer."""
  if shape.num_experts:
    return shape.num_experts_per_tok * shape.moe_intermediate_size
  return shape.intermediate_size


def layer_weights(shape: model_config.ModelConfig) -> Weights:
  """Returns the numbers of weights of a layer; norms are left out.

  If only some layers have experts, the numbers are for a layer with experts.
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
    shape: the config of the model.
    length: the number of tokens of a row. On average, a token attends to half
      of the row's tokens, or to fewer tokens in a layer with a window.
  """
  keys = seen_keys(shape, length)
  return 4.0 * keys * shape.num_heads * shape.head_dim


def seen_keys(shape: model_config.ModelConfig, length: float) -> float:
  """Returns how many keys a token sees on average, summed over all layers."""
  windows, keys = shape.layer_windows, 0.0
  for window in set(windows):
    # The first tokens of a row see all tokens before them. The later tokens see
    # a whole window.
    fills = 0 < window < length
    seen = window - window**2 / (2 * length) if fills else length / 2
    keys += windows.count(window) * seen
  return keys


def layer_operations(shape: model_config.ModelConfig, length: float) -> float:
  """Returns the forward operations of all layers for one token.

  Args:
    shape: the config of the model. Only the visited experts count.
    length: the number of tokens of a row, see `attention_operations`.
  """
  return 2.0 * sum(_all_weights(shape)) + attention_operations(shape, length)


def logit_operations(shape: model_config.ModelConfig) -> float:
  """Returns the forward operations of all logits of one token."""
  return 2.0 * shape.hidden_size * shape.vocab_size


def recomputed_layer_operations(
  shape: model_config.ModelConfig, length: float
) -> float:
  """Returns the forward operations that the backward pass repeats, per token.

  The operations of all layers count, and the operations of logits do not.

  Args:
    shape: the config of the model. Its `remat` says which results are saved.
    length: the number of tokens of a row, see `attention_operations`.
  """
  if shape.remat not in ('full', 'dots'):
    return 0.0
  count = attention_operations(shape, length)
  if shape.remat == 'full':
    # The down projection is not computed again, because the backward pass does
    # not need the result of the down projection.
    weights = _all_weights(shape)
    count += 2.0 * (weights.attention + weights.expand)
  return count


def forward_operations(
  shape: model_config.ModelConfig, lengths: Iterable[float], losses: float
) -> tuple[float, float]:
  """Returns the forward operations of a policy, and of a value model.

  Each number counts the operations of all rows together.

  Args:
    shape: the config that both models have.
    lengths: the number of tokens of each row.
    losses: the number of tokens with a loss, in all rows together.
  """
  layers = sum(length * layer_operations(shape, length) for length in lengths)
  return layers + logit_operations(shape) * losses, layers


def recomputed_operations(
  shape: model_config.ModelConfig, lengths: Iterable[float], losses: float
) -> tuple[float, float]:
  """Returns the forward operations that the backward pass repeats.

  The first number is for a policy, and the second for a value model. The logits
  of a policy are always computed again, because logits are too large to be
  saved. Operations that an attention kernel repeats inside itself are not
  counted.

  Args:
    shape, lengths, losses: see `forward_operations`.
  """
  layers = sum(
    length * recomputed_layer_operations(shape, length) for length in lengths
  )
  return layers + logit_operations(shape) * losses, layers
