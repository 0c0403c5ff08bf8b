"""Models split once: pure functions over a parameter tree.

A parameter tree is a nested dict of arrays ({'embedding': ..., 'layers': {...},
...}); layer leaves carry a leading layer axis.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from flax import nnx
import jax

from stppo_jax.models import config as model_config
from stppo_jax.models import heads
from stppo_jax.models import transformer

Array = jax.Array
Params = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Model:
  """A transformer without its weights: what to compute, not on what.

  Attributes:
    config: the shape.
    head: 'vocabulary' (a policy) or 'scalar' (a value model).
  """

  config: model_config.ModelConfig
  head: str

  def init(self, key: Array) -> Params:
    """Random weights, float32."""
    module = transformer.Transformer(
      self.config, head=self.head, rngs=nnx.Rngs(params=key)
    )
    return nnx.to_pure_dict(nnx.state(module))

  def hidden(self, params: Params, tokens_BL: Array) -> Array:
    """Final hidden states [B, L, D] of whole sequences."""
    return self._module(params)(tokens_BL)

  def extend(self, params, tokens_BC, cache, lengths_B, counts_B):
    """See `Transformer.extend`."""
    module = self._module(params)
    return module.extend(tokens_BC, cache, lengths_B, counts_B)

  def output_VD(self, params: Params) -> Array:
    """The matrix that scores the vocabulary: tied or its own."""
    return params['embedding' if self.config.tie_embeddings else 'lm_head']

  def logprobs_and_entropy(
    self, params: Params, tokens_BL: Array, *, temperature: float
  ) -> tuple[Array, Array]:
    """logprobs_BL and entropy_BL of a policy on whole sequences."""
    return heads.token_logprobs_and_entropy(
      self.hidden(params, tokens_BL),
      self.output_VD(params),
      tokens_BL,
      temperature=temperature,
    )

  def values(self, params: Params, tokens_BL: Array) -> Array:
    """values_BL of a value model on whole sequences."""
    return heads.token_values(
      self.hidden(params, tokens_BL), params['scalar_head']
    )

  def _module(self, params: Params) -> transformer.Transformer:
    graph, abstract = _abstract(self.config, self.head)
    state = jax.tree.map(lambda x: x, abstract)  # a copy: filled below
    nnx.replace_by_pure_dict(state, dict(params))
    return nnx.merge(graph, state)


def _abstract(config: model_config.ModelConfig, head: str):
  """Graph and abstract state of the module, built without arrays."""
  make = lambda: transformer.Transformer(config, head=head, rngs=nnx.Rngs(0))
  return nnx.split(nnx.eval_shape(make))
