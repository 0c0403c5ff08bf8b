"""Models split once: pure functions over a parameter tree.

A parameter tree is a nested dict of arrays ({'embedding': ..., 'layers': {...},
...}); layer leaves carry a leading layer axis.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import NamedTuple

from flax import nnx
import jax

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import config as model_config
from stppo_jax.models import heads
from stppo_jax.models import layers
from stppo_jax.models import lora as lora_lib
from stppo_jax.models import moe
from stppo_jax.models import shapes
from stppo_jax.models import transformer
from stppo_jax.parallel import division

Array = jax.Array
Params = Mapping[str, Any]

# Sizes that an axis of the mesh must divide, by their names in the config.
_CUT = {
  'fsdp': ('hidden_size',),
  'tensor': ('num_heads', 'intermediate_size', 'vocab_size'),
}
_CUT_OF_EXPERTS = {
  'fsdp': ('hidden_size',),
  'tensor': ('num_heads', 'moe_intermediate_size', 'vocab_size'),
}


class Scores(NamedTuple):
  """What a policy says of whole sequences, of one pass.

  Attributes:
    logprobs_BL, entropy_BL: at the positions that were asked for; see
      `heads.token_logprobs_and_entropy`.
    values_BL: everywhere; None without a value head.
    routing: of its experts; None without.
  """

  logprobs_BL: Array
  entropy_BL: Array
  values_BL: Array | None
  routing: moe.Routing | None


@dataclasses.dataclass(frozen=True)
class Model:
  """A transformer without its weights: what to compute, not on what.

  Parameters that do not fit the shape are a ValueError that names them.

  Attributes:
    config: the shape.
    head: 'vocabulary' (a policy), 'scalar' (a value model) or 'both' (a policy
      that estimates values too).
    mesh: that activations are laid out on; None leaves them to the compiler.
      One that does not divide the model is a ValueError, see `division`.
    lora: of adapters, which parameters may then have. Those without are still
      welcome: they are the base alone.
    chunk: tokens of a device whose scores over the vocabulary are held at
      once; 0 = all.
  """

  config: model_config.ModelConfig
  head: str
  mesh: jax.sharding.Mesh | None = None
  lora: lora_lib.Lora | None = None
  chunk: int = 0

  def __post_init__(self):
    if self.mesh is not None:
      sizes = dataclasses.asdict(self.config)
      cut = _CUT_OF_EXPERTS if self.config.num_experts else _CUT
      division.check(
        self.mesh,
        {axis: {n: sizes[n] for n in names} for axis, names in cut.items()},
        num_kv_heads=sizes['num_kv_heads'],
      )

  def init(self, key: Array) -> Params:
    """Random weights, float32, without adapters."""
    module = transformer.Transformer(
      self.config, head=self.head, rngs=nnx.Rngs(params=key)
    )
    return nnx.to_pure_dict(nnx.state(module))

  def init_adapters(self, key: Array) -> Params:
    """Fresh adapters; see `lora.init`.

    Raises:
      ValueError: targets that match none of the linear layers.
    """
    graph, abstract = _abstract(self.config, self.head, self.mesh)
    kernels = _kernels(_linear_layers(nnx.merge(graph, abstract)))
    return lora_lib.init(self.lora, kernels, key)

  def joined(self, frozen: Params, params: Params) -> Params:
    """The tree to compute with: what is trained, and the base it needs.

    Args:
      frozen: a policy's weights, or {} where everything is trained.
      params: adapters and heads, or all weights.
    """
    if self.head == 'scalar':
      frozen = {name: x for name, x in frozen.items() if name != 'lm_head'}
    return lora_lib.joined(frozen, params)

  def merged(self, params: Params) -> Params:
    """Weights of the same policy for a model without adapters and values."""
    params = {name: x for name, x in params.items() if name != 'scalar_head'}
    return params if self.lora is None else lora_lib.merged(self.lora, params)

  @property
  def plain(self) -> 'Model':
    """The model of merged weights, and of the base."""
    return dataclasses.replace(self, head='vocabulary', lora=None)

  def hidden(
    self,
    params: Params,
    tokens_BL: Array,
    lengths_B: Array | None = None,
    places_BM: Array | None = None,
  ) -> Array:
    """Final hidden states [B, L, D] of whole sequences, or some of them."""
    return self.routed(params, tokens_BL, lengths_B, None, places_BM)[0]

  def routed(
    self,
    params: Params,
    tokens_BL: Array,
    lengths_B: Array | None = None,
    expert_ids_BLNE: Array | None = None,
    places_BM: Array | None = None,
  ) -> tuple[Array, moe.Routing | None]:
    """Those and the experts that were visited; see `Transformer.routed`."""
    module = self._module(params)
    return module.routed(tokens_BL, lengths_B, expert_ids_BLNE, places_BM)

  def by_layer(self, params: Params) -> Params:
    """The same weights, a tree for each layer: what `extend` takes.

    So no layer is cut out of the stack for every token that is decoded.
    """
    layer = lambda n: jax.tree.map(lambda x: x[n], params['layers'])
    return {
      **params,
      'layers': tuple(layer(n) for n in range(self.config.num_layers)),
    }

  def extend(self, params, tokens_BC, *cached):
    """See `cache.extend`; `params` are those of `by_layer`."""
    graph, abstract = _abstract(self.config, self.head, self.mesh)
    state = jax.tree.map(lambda x: x, abstract)
    # Of the stacked layers only their graph is used.
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
      *cached,
    )

  def output_VD(self, params: Params) -> Array:
    """The matrix that scores the vocabulary: tied or its own."""
    return params['embedding' if self.config.tie_embeddings else 'lm_head']

  def logprobs_and_entropy(
    self,
    params: Params,
    tokens_BL: Array,
    positions_BM: Array | None = None,
    lengths_B: Array | None = None,
    *,
    temperature: float,
  ) -> tuple[Array, Array]:
    """logprobs_BL and entropy_BL of a policy on whole sequences.

    At the positions only; None: everywhere. See
    `heads.token_logprobs_and_entropy`.
    """
    return self.scores(
      params, tokens_BL, positions_BM, lengths_B, temperature=temperature
    )[:2]

  def scores(
    self,
    params: Params,
    tokens_BL: Array,
    positions_BM: Array | None = None,
    lengths_B: Array | None = None,
    expert_ids_BLNE: Array | None = None,
    *,
    temperature: float,
    all_values: bool = True,
  ) -> Scores:
    """All that a policy says of whole sequences.

    Args:
      params: its weights.
      tokens_BL: the sequences.
      positions_BM: where; None: everywhere.
      lengths_B, expert_ids_BLNE: see `Transformer.routed`.
      temperature: of the distributions.
      all_values: whether values are wanted everywhere, not only at the
        positions.
    """
    narrowed = positions_BM is not None
    narrowed &= self.head != 'both' or not all_values
    places_BM = None
    if narrowed:
      places_BM = heads.before(positions_BM, tokens_BL.shape[1])
    hidden_BLD, routing = self.routed(
      params, tokens_BL, lengths_B, expert_ids_BLNE, places_BM
    )
    logprobs_BL, entropy_BL = heads.token_logprobs_and_entropy(
      hidden_BLD,
      self.output_VD(params),
      tokens_BL,
      positions_BM,
      temperature=temperature,
      chunk=self.chunk,
      mesh=self.mesh,
      narrowed=narrowed,
    )
    values_BL = None
    if self.head == 'both':
      values_BL = _values(
        hidden_BLD, params, tokens_BL, positions_BM if narrowed else None
      )
    return Scores(logprobs_BL, entropy_BL, values_BL, routing)

  def divergence(
    self,
    params: Params,
    reference: Params,
    tokens_BL: Array,
    positions_BM: Array | None = None,
    lengths_B: Array | None = None,
    *,
    temperature: float,
  ) -> tuple[Array, Array, Array]:
    """A policy beside its reference; see `heads.token_divergence`."""
    return heads.token_divergence(
      self.hidden(params, tokens_BL, lengths_B),
      self.output_VD(params),
      self.hidden(reference, tokens_BL, lengths_B),
      self.output_VD(reference),
      tokens_BL,
      positions_BM,
      temperature=temperature,
      chunk=self.chunk,
      mesh=self.mesh,
    )

  def values(
    self,
    params: Params,
    tokens_BL: Array,
    lengths_B: Array | None = None,
    positions_BM: Array | None = None,
  ) -> Array:
    """values_BL of a value model on whole sequences.

    At the positions only; None: everywhere.
    """
    places_BM = None
    if positions_BM is not None:
      places_BM = heads.before(positions_BM, tokens_BL.shape[1])
    hidden_BLD = self.hidden(params, tokens_BL, lengths_B, places_BM)
    return _values(hidden_BLD, params, tokens_BL, positions_BM)

  def _module(self, params: Params) -> transformer.Transformer:
    adapters = {}
    if self.lora is not None:
      params, adapters = lora_lib.split(params)
    graph, abstract = _abstract(self.config, self.head, self.mesh)
    shapes.check(params, nnx.to_pure_dict(abstract))
    state = jax.tree.map(lambda x: x, abstract)  # a copy: filled below
    nnx.replace_by_pure_dict(state, dict(params))
    module = nnx.merge(graph, state)
    if adapters:
      linear = _linear_layers(module)
      lora_lib.check(self.lora, _kernels(linear), adapters)
      for name, pair in adapters.items():
        linear[name].adapt(
          pair[lora_lib.A], pair[lora_lib.B], scale=self.lora.scale
        )
    return module


def _values(hidden_BLD, params, tokens_BL, positions_BM):
  """Of all states, or of those before the positions."""
  scalar_D1 = params['scalar_head']
  if positions_BM is None:
    return heads.token_values(hidden_BLD, scalar_D1)
  return heads.token_values_at(hidden_BLD, scalar_D1, tokens_BL, positions_BM)


def _linear_layers(module: nnx.Module) -> dict[str, layers.Linear]:
  """The layers that may have adapters, by names like 'layers/q_proj'."""
  return {
    '/'.join(map(str, path)): part
    for path, part in nnx.iter_modules(module)
    if isinstance(part, layers.Linear)
  }


def _kernels(linear: Mapping[str, layers.Linear]) -> dict[str, Any]:
  return {name: layer.kernel for name, layer in linear.items()}


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
