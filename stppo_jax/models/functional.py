"""Models split once: pure functions over a parameter tree.

A parameter tree is a nested dict of arrays ({'embedding': ..., 'layers': {...},
...}); layer leaves carry a leading layer axis.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from flax import nnx
import jax

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import config as model_config
from stppo_jax.models import heads
from stppo_jax.models import transformer

Array = jax.Array
Params = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Model:
  """A transformer without its weights: what to compute, not on what.

  Parameters that do not fit the shape are a ValueError that names them.

  Attributes:
    config: the shape.
    head: 'vocabulary' (a policy) or 'scalar' (a value model).
    mesh: that activations are laid out on; None leaves them to the compiler.
  """

  config: model_config.ModelConfig
  head: str
  mesh: jax.sharding.Mesh | None = None

  def init(self, key: Array) -> Params:
    """Random weights, float32."""
    module = transformer.Transformer(
      self.config, head=self.head, rngs=nnx.Rngs(params=key)
    )
    return nnx.to_pure_dict(nnx.state(module))

  def hidden(self, params: Params, tokens_BL: Array) -> Array:
    """Final hidden states [B, L, D] of whole sequences."""
    return self._module(params)(tokens_BL)

  def by_layer(self, params: Params) -> Params:
    """The same weights, a tree for each layer: what `extend` takes.

    So no layer is cut out of the stack for every token that is decoded.
    """
    layer = lambda n: jax.tree.map(lambda x: x[n], params['layers'])
    return {
      **params,
      'layers': tuple(layer(n) for n in range(self.config.num_layers)),
    }

  def extend(self, params, tokens_BC, cache, lengths_B, recent, first):
    """See `cache.extend`; `params` are those of `by_layer`."""
    graph, abstract = _abstract(self.config, self.head, self.mesh)
    state = jax.tree.map(lambda x: x, abstract)
    whole = {**params, 'layers': nnx.to_pure_dict(abstract)['layers']}
    nnx.replace_by_pure_dict(state, whole)
    layers = []
    for tree in params['layers']:
      layer = jax.tree.map(lambda x: x, abstract['layers'])
      nnx.replace_by_pure_dict(layer, dict(tree))
      layers.append(layer)
    return cache_lib.extend(
      nnx.merge(graph, state),
      layers,
      tokens_BC,
      cache,
      lengths_B,
      recent,
      first,
    )

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

  def divergence(
    self,
    params: Params,
    reference: Params,
    tokens_BL: Array,
    *,
    temperature: float,
    chunk: int,
  ) -> tuple[Array, Array, Array]:
    """A policy beside its reference; see `heads.token_divergence`."""
    return heads.token_divergence(
      self.hidden(params, tokens_BL),
      self.output_VD(params),
      self.hidden(reference, tokens_BL),
      self.output_VD(reference),
      tokens_BL,
      temperature=temperature,
      chunk=chunk,
    )

  def values(self, params: Params, tokens_BL: Array) -> Array:
    """values_BL of a value model on whole sequences."""
    return heads.token_values(
      self.hidden(params, tokens_BL), params['scalar_head']
    )

  def _module(self, params: Params) -> transformer.Transformer:
    graph, abstract = _abstract(self.config, self.head, self.mesh)
    _check_shapes(params, nnx.to_pure_dict(abstract))
    state = jax.tree.map(lambda x: x, abstract)  # a copy: filled below
    nnx.replace_by_pure_dict(state, dict(params))
    return nnx.merge(graph, state)


def _check_shapes(params: Params, expected: Params) -> None:
  """Raises ValueError that names every leaf which does not fit the model."""
  found, wanted = _shapes(params), _shapes(expected)
  wrong = [
    f'{name} {found.get(name, "missing")}, '
    f'expected {wanted.get(name, "no such parameter")}'
    for name in sorted(found.keys() | wanted.keys())
    if found.get(name) != wanted.get(name)
  ]
  if wrong:
    raise ValueError('parameters do not fit the model: ' + '; '.join(wrong))


def _shapes(params: Params) -> dict[str, tuple[int, ...]]:
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }


def _abstract(
  config: model_config.ModelConfig,
  head: str,
  mesh: jax.sharding.Mesh | None,
):
  """Graph and abstract state of the module, built without arrays."""
  make = lambda: transformer.Transformer(
    config, head=head, mesh=mesh, rngs=nnx.Rngs(0)
  )
  return nnx.split(nnx.eval_shape(make))
