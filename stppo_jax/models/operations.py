"""The operations that the formulas of a model need.

Causal attention counts half of the square, logits count at loss positions only,
and what is computed a second time does not count. An addition and a
multiplication are two operations.
"""

from collections.abc import Iterable

from stppo_jax.models import config as model_config


def of_layers(shape: model_config.ModelConfig, length: float) -> float:
  """Returns the operations of all layers for a token, forward.

  Args:
    shape: the shape of the model; of its experts, those count that a token
      visits.
    length: the number of tokens of its row, of which it attends to half on
      average.
  """
  heads = shape.num_heads * shape.head_dim
  both = 2 * shape.num_kv_heads * shape.head_dim
  width = shape.intermediate_size
  if shape.num_experts:
    width = shape.num_experts_per_tok * shape.moe_intermediate_size
  router = shape.num_experts
  weights = shape.hidden_size * (2 * heads + both + 3 * width + router)
  return shape.num_layers * (2 * weights + 2 * length * heads)


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
  return layers + 2 * shape.hidden_size * shape.vocab_size * losses, layers
