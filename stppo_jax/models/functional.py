"""Computes with models by pure functions of their parameter trees.

The network is a Flax NNX module, split once into its graph and its parameters
(`modules`). From there on, functions take a parameter tree: a nested dict of
arrays ({'embedding': ..., 'layers': {...}, ...}) in which leaves of the layers
carry a leading layer axis.

B rows, L tokens, M loss positions, C tokens read at once, D width, V
vocabulary.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple, TypedDict, Unpack

import jax

from stppo_jax.models import attention
from stppo_jax.models import cache as cache_lib
from stppo_jax.models import cached_pass
from stppo_jax.models import config as model_config
from stppo_jax.models import heads
from stppo_jax.models import lora as lora_lib
from stppo_jax.models import modules
from stppo_jax.models import moe
from stppo_jax.parallel import mesh as mesh_lib

Array = jax.Array
Params = Mapping[str, Any]


class Rows(TypedDict, total=False):
  """Lists the arrays that a forward pass may read beside the tokens.

  Attributes:
    lengths_B: tokens of each row without padding; None: all. It saves work.
    segments: the sequences in each row; None: each is one sequence.
    loss_positions_BM: int32, distinct positions l of the tokens that results
      are wanted for; entries outside 1..L - 1 are filler. None: all tokens.
    expert_ids: int [B, L, layers, E], the experts to visit in each layer that
      has some; None leaves them to the routers. See `moe.MixtureOfExperts`.
  """

  lengths_B: Array | None
  segments: attention.Segments | None
  loss_positions_BM: Array | None
  expert_ids: Array | None


class TokenOutputs(NamedTuple):
  """Holds the outputs of a policy's forward pass for each token.

  Attributes:
    logprobs_BL, entropy_BL: float32, at the loss positions that were given; see
      `heads.token_logprobs_and_entropy`.
    values_BL: float32, V before each token; None without a value head.
    routing: which experts the tokens visited; None without experts.
  """

  logprobs_BL: Array
  entropy_BL: Array
  values_BL: Array | None
  routing: moe.Routing | None


@dataclasses.dataclass(frozen=True)
class Model:
  """Describes a transformer without its weights, and computes with it.

  Attributes:
    config: the shape.
    head: 'vocabulary' (a policy), 'scalar' (a value model) or 'both' (a policy
      that estimates values too).
    mesh: mesh that activations are laid out on; None leaves the layout to the
      compiler.
    lora: options of adapters, which parameters may then contain. Parameters
      without adapters are accepted too, as the base alone.
    chunk: tokens of a device whose logits are held at once; 0: all.
    value_range: the smallest and the largest value; None: there are none.

  Raises:
    ValueError: the mesh does not divide the model, see `mesh.check_divides`.
  """

  config: model_config.ModelConfig
  head: str
  mesh: jax.sharding.Mesh | None = None
  lora: lora_lib.Lora | None = None
  chunk: int = 0
  value_range: tuple[float, float] | None = None

  def __post_init__(self):
    if self.mesh is not None:
      sizes = dataclasses.asdict(self.config)
      experts = self.config.num_experts > 0
      tensor = ['num_heads', 'vocab_size']
      tensor += ['moe_intermediate_size'] if experts else []
      if not experts or self.config.dense_layers:
        tensor.append('intermediate_size')
      # The sizes that an axis of the mesh must divide.
      apart = ('num_experts', 'hidden_size') if experts else ()
      sharded = {'expert': apart, 'fsdp': ('hidden_size',), 'tensor': tensor}
      mesh_lib.check_divides(
        self.mesh,
        {axis: {n: sizes[n] for n in names} for axis, names in sharded.items()},
        num_kv_heads=sizes['num_kv_heads'],
        whose=' of the value model' if self.head == 'scalar' else '',
      )

  def init(self, key: Array) -> Params:
    """Returns random weights, float32, without adapters."""
    return modules.init(self.config, self.head, key)

  @property
  def abstract_params(self) -> Params:
    """The shapes and dtypes of the result of `init`; nothing is computed."""
    return modules.abstract_params(self.config, self.head)

  def init_adapters(self, key: Array) -> Params:
    """Returns fresh adapters; see `lora.init`.

    Raises:
      ValueError: `lora` is None, or an expression of it matches none.
    """
    if self.lora is None:
      raise ValueError('the model has no adapters: lora is None')
    kernels = modules.kernels(self.config, self.head, self.mesh)
    return lora_lib.init(self.lora, kernels, key)

  def join_params(self, frozen: Params, params: Params) -> Params:
    """Returns one tree of all weights; no array is copied.

    Args:
      frozen: a policy's weights, or {} if all weights are trained.
      params: the trained weights: adapters and heads, or all.
    """
    if self.head == 'scalar':
      frozen = {name: x for name, x in frozen.items() if name != 'lm_head'}
    return lora_lib.join(frozen, params)

  def merge_adapters(self, params: Params) -> Params:
    """Returns the weights of `plain_policy` that compute the same policy."""
    params = {name: x for name, x in params.items() if name != 'scalar_head'}
    return params if self.lora is None else lora_lib.merge(self.lora, params)

  @property
  def plain_policy(self) -> 'Model':
    """The policy of the same shape without adapters and without a value head.

    It takes merged weights, and the weights of a base model.
    """
    return dataclasses.replace(self, head='vocabulary', lora=None)

  def output_VD(self, params: Params) -> Array:
    """Returns the output matrix [V, D], which maps hidden states to logits.

    It is the embedding if the config ties the two.
    """
    return params['embedding' if self.config.tie_embeddings else 'lm_head']

  def hidden(
    self, params: Params, tokens_BL: Array, **rows: Unpack[Rows]
  ) -> Array:
    """Returns the hidden states of `hidden_and_routing`."""
    return self.hidden_and_routing(params, tokens_BL, **rows)[0]

  def hidden_and_routing(
    self, params: Params, tokens_BL: Array, **rows: Unpack[Rows]
  ) -> tuple[Array, moe.Routing | None]:
    """Returns final hidden states of whole sequences, and the experts visited.

    The arguments are those of `token_outputs`.

    Returns:
      The hidden states and the routing. The states are [B, L, D] or, if loss
      positions are given, those that predict the tokens there, [B, M, D]. The
      routing is None without experts.
    """
    places_BM = rows.get('loss_positions_BM')
    if places_BM is not None:
      places_BM = heads.state_positions(places_BM, tokens_BL.shape[1])
    module = modules.filled(
      self.config, self.head, self.mesh, params, lora=self.lora
    )
    return module.hidden_and_routing(
      tokens_BL,
      lengths_B=rows.get('lengths_B'),
      segments=rows.get('segments'),
      expert_ids=rows.get('expert_ids'),
      places_BM=places_BM,
    )

  def token_outputs(
    self,
    params: Params,
    tokens_BL: Array,
    *,
    temperature: float,
    values_everywhere: bool = True,
    **rows: Unpack[Rows],
  ) -> TokenOutputs:
    """Returns all outputs of a policy for the tokens, from one pass.

    Args:
      params: the policy's weights.
      tokens_BL: token ids, right-padded.
      temperature: divides the logits.
      values_everywhere: whether values are wanted at every token, even if
        loss positions are given.
      **rows: see `Rows`.
    """
    loss_positions_BM = rows.get('loss_positions_BM')
    # Values at all tokens need the states of all tokens. The logits then use
    # those of these states that they need.
    narrowed = loss_positions_BM is not None
    narrowed &= self.head != 'both' or not values_everywhere
    rows['loss_positions_BM'] = loss_positions_BM if narrowed else None
    hidden_BLD, routing = self.hidden_and_routing(params, tokens_BL, **rows)
    logprobs_BL, entropy_BL = heads.token_logprobs_and_entropy(
      hidden_BLD,
      self.output_VD(params),
      tokens_BL,
      loss_positions_BM=loss_positions_BM,
      temperature=temperature,
      chunk=self.chunk,
      mesh=self.mesh,
      narrowed=narrowed,
    )
    values_BL = None
    if self.head == 'both':
      values_BL = heads.token_values(
        hidden_BLD,
        params['scalar_head'],
        tokens_BL,
        loss_positions_BM=rows['loss_positions_BM'],
        bounds=self.value_range,
      )
    return TokenOutputs(logprobs_BL, entropy_BL, values_BL, routing)

  def logprobs_and_entropy(
    self,
    params: Params,
    tokens_BL: Array,
    *,
    temperature: float,
    **rows: Unpack[Rows],
  ) -> tuple[Array, Array]:
    """Returns logprobs_BL and entropy_BL of `token_outputs`."""
    return self.token_outputs(
      params, tokens_BL, temperature=temperature, **rows
    )[:2]

  def divergence(
    self,
    params: Params,
    ref_params: Params,
    tokens_BL: Array,
    *,
    temperature: float,
    **rows: Unpack[Rows],
  ) -> tuple[Array, Array, Array]:
    """Returns log-probabilities of a policy and a reference, and their KL.

    See `heads.token_divergence`. The reference gets no gradient. The other
    arguments are those of `token_outputs`.
    """
    loss_positions_BM = rows.pop('loss_positions_BM', None)
    return heads.token_divergence(
      self.hidden(params, tokens_BL, **rows),
      self.output_VD(params),
      self.hidden(ref_params, tokens_BL, **rows),
      self.output_VD(ref_params),
      tokens_BL,
      loss_positions_BM=loss_positions_BM,
      temperature=temperature,
      chunk=self.chunk,
      mesh=self.mesh,
    )

  def values(
    self, params: Params, tokens_BL: Array, **rows: Unpack[Rows]
  ) -> Array:
    """Returns values_BL of a value model; 0 at tokens without a wanted value.

    The arguments are those of `token_outputs`.
    """
    return heads.token_values(
      self.hidden(params, tokens_BL, **rows),
      params['scalar_head'],
      tokens_BL,
      loss_positions_BM=rows.get('loss_positions_BM'),
      bounds=self.value_range,
    )

  def extend(
    self, params: Params, tokens_BC: Array, **cached: Any
  ) -> tuple[Array, cache_lib.Recent]:
    """Returns the states of the next tokens; see `cached_pass.extend`.

    Args:
      params: weights with a tree for each layer, adapters included. Decoding
        reads every weight for every token; of stacked layers, each would be
        sliced, and so copied, for every token.
      tokens_BC: the next tokens of each row.
      **cached: the keyword arguments of `cached_pass.extend`.
    """
    module, layers = modules.filled_by_layer(
      self.config, self.head, self.mesh, params, lora=self.lora
    )
    return cached_pass.extend(module, layers, tokens_BC, **cached)
