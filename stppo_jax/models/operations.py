"""The operations that the formulas of a model need, and those done twice.

Causal attention counts half of the square, and logits count at loss positions
only. What is computed a second time counts in `of_recomputed` and
`of_second_pass` alone. An addition and a multiplication are two operations.
"""

from collections.abc import Iterable
from typing import NamedTuple

from stppo_jax.models import config as model_config


class Weights(NamedTuple):
  """The weights of the products that a token goes through in one layer.

  Attributes:
    attention: weights of queries, keys, values and the output.
    expand: weights of gate and up projection, of all experts that it visits.
    contract: weights of the down projection.
  """

  attention: int
  expand: int
  contract: int


def layer_weights(shape: model_config.ModelConfig) -> Weights:
  """Returns the weights that a token meets in a layer; norms are left out."""
  queries = shape.num_heads * shape.head_dim
  keys = shape.num_kv_heads * shape.head_dim
  width = shape.intermediate_size
  router = 0
  if shape.num_experts:
    width = shape.num_experts_per_tok * shape.moe_intermediate_size
    router = shape.num_experts
  return Weights(
    attention=shape.hidden_size * (2 * queries + 2 * keys),
    expand=shape.hidden_size * (2 * width + router),
    contract=shape.hidden_size * width,
  )


def of_attention(shape: model_config.ModelConfig, length: float) -> float:
  """Returns the operations of attention for a token of a row, in all layers.

  Args:
    shape: the shape of the model.
    length: the tokens of the row; a token attends to half of them on average.
  """
  return 2.0 * shape.num_layers * length * shape.num_heads * shape.head_dim


def of_layers(shape: model_config.ModelConfig, length: float) -> float:
  """Returns the operations of all layers for a token, forward.

  Args:
    shape: the shape of the model; of its experts, those count that a token
      visits.
    length: the number of tokens of its row, of which it attends to half on
      average.
  """
  products = 2.0 * shape.num_layers * sum(layer_weights(shape))
  return products + of_attention(shape, length)


def of_logits(shape: model_config.ModelConfig) -> float:
  """Returns the operations of the logits of a token, forward."""
  return 2.0 * shape.hidden_size * shape.vocab_size


def of_recomputed(shape: model_config.ModelConfig, length: float) -> float:
  """Returns the operations of all layers that a backward pass does again.

  Args:
    shape: the shape of the model; `remat` says what is kept.
    length: the tokens of the row, see `of_layers`.
  """
  if shape.remat not in ('full', 'dots'):
    return 0.0
  count = of_attention(shape, length)
  if shape.remat == 'full':
    # The backward pass does not need the result of the last product.
    weights = layer_weights(shape)
    count += 2.0 * shape.num_layers * (weights.attention + weights.expand)
  return count


def of_pass(
  shape: model_config.ModelConfig, lengths: Iterable[float], losses: float
) -> tuple[float, float]:
  """Returns the operations of a pass of the policy, and of the value model.

  Args:
    shape: the shape of both.
    lengths: the number of tokens of each row.
    losses: the number of tokens with a loss.
  """
  layers = sum(length * of_layers(shape, length) for length in lengths)
  return layers + of_logits(shape) * losses, layers


def of_second_pass(
  shape: model_config.ModelConfig, lengths: Iterable[float], losses: float
) -> tuple[float, float]:
  """Returns what the backward passes of policy and value model do again.

  Logits are always computed again: they are too large to be kept. What an
  attention kernel does again inside it is not counted.

  Args:
    shape, lengths, losses: see `of_pass`.
  """
  layers = sum(length * of_recomputed(shape, length) for length in lengths)
  return layers + of_logits(shape) * losses, layers
