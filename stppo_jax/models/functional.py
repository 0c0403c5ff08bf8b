"""Computes with models by pure functions of their parameter trees.

The network is a Flax NNX module, which `modules` splits once into its graph and
its parameters. The functions here take the parameters as a tree: a nested dict
of arrays ({'embedding': ..., 'layers': {...}, ...}). The leaves of the layers
have a leading axis over layers.

Shape letters: B rows, L tokens of a row, M loss positions of a row, C new
tokens of a row beyond its cached tokens, D width, V vocabulary entries, E
experts that a token visits.
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
  """Lists the optional arrays that a forward pass reads beside the tokens.

  Attributes:
    lengths_B: the number of tokens of each row without padding. Known lengths
      save work on padding. None: rows have no padding.
    segments: the sequences in each row; None: each row is one sequence.
    loss_positions_BM: int32, the positions l of the tokens whose results the
      caller wants, distinct within a row. Positions outside 1..L - 1 fill up a
      row and are ignored. None: all tokens.
    expert_ids: int [B, L, layers, E], the experts to visit in each layer that
      has experts; None: the routers choose. See `moe.MixtureOfExperts`.
  """

  lengths_B: Array | None
  segments: attention.Segments | None
  loss_positions_BM: Array | None
  expert_ids: Array | None


class TokenOutputs(NamedTuple):
  """Holds the outputs of a policy's forward pass for each token.

  Attributes:
    logprobs_BL, entropy_BL: float32, at the given loss positions; see
      `heads.token_logprobs_and_entropy`.
    values: the values of the tokens; None without a value head.
    routing: the experts that the tokens visited; None without experts.
  """

  logprobs_BL: Array
  entropy_BL: Array
  values: heads.Values | None
  routing: moe.Routing | None


@dataclasses.dataclass(frozen=True)
class Model:
  """Describes a transformer without its weights, and computes with it.

  Attributes:
    config: the model's config.
    head: 'vocabulary' (a policy), 'scalar' (a value model) or 'both' (a policy
      that estimates values too).
    mesh: mesh that activations are laid out on; None leaves the layout to the
      compiler.
    lora: options of the adapters that parameters may contain. Parameters
      without adapters compute the base model. None: no adapters.
    chunk: see `chunks.Options`.
    value_range: the smallest and the largest value that the value head can
      return; None: no limits.

  Raises:
    ValueError: an axis of the mesh does not divide the sizes of the model, see
      `mesh.check_divides`.
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
      # Mesh axis -> the sizes of the model that the axis must divide.
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
      ValueError: `lora` is None, or one of its expressions matches no layer.
    """
    if self.lora is None:
      raise ValueError('the model has no adapters: lora is None')
    kernels = modules.kernels(self.config, self.head, self.mesh)
    return lora_lib.init(self.lora, kernels, key)

  def join_params(self, frozen: Params, params: Params) -> Params:
    """Returns frozen and trained weights as one tree; no array is copied.

    Args:
      frozen: a policy's frozen weights, or {} if all weights are trained.
      params: the trained weights: adapters and heads, or all weights.
    """
    if self.head == 'scalar':
      frozen = {name: x for name, x in frozen.items() if name != 'lm_head'}
    return lora_lib.join(frozen, params)

  def merge_adapters(self, params: Params) -> Params:
    """Returns the weights with merged adapters and without a value head.

    With these weights, `plain_policy` computes the same policy as this model
    with `params`.

    Args:
      params: weights of this model, with or without adapters.
    """
    params = {name: x for name, x in params.items() if name != 'scalar_head'}
    return params if self.lora is None else lora_lib.merge(self.lora, params)

  @property
  def plain_policy(self) -> 'Model':
    """The policy with this model's config, without adapters and value head.

    Its parameters are the result of `merge_adapters`, or the weights of a model
    that a run starts from. A value model has a plain policy too, because its
    weights may be read from the files of a policy.
    """
    return dataclasses.replace(self, head='vocabulary', lora=None)

  def output_VD(self, params: Params) -> Array:
    """Returns the output matrix [V, D], which maps hidden states to logits.

    The matrix is the embedding if the config ties these two matrices.
    """
    return params['embedding' if self.config.tie_embeddings else 'lm_head']

  def hidden(
    self, params: Params, tokens_BL: Array, **rows: Unpack[Rows]
  ) -> Array:
    """Returns the hidden states alone, see `hidden_and_routing`."""
    return self.hidden_and_routing(params, tokens_BL, **rows)[0]

  def hidden_and_routing(
    self, params: Params, tokens_BL: Array, **rows: Unpack[Rows]
  ) -> tuple[Array, moe.Routing | None]:
    """Returns final hidden states of whole sequences, and the experts visited.

    The arguments have the same meaning as in `token_outputs`.

    Returns:
      The hidden states [B, L, D] and the routing. If loss positions are given,
      only the states that predict the tokens at these positions are returned,
      [B, M, D]. The routing is None without experts.
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
    """Returns all outputs of a policy for the tokens, from one forward pass.

    Args:
      params: the policy's weights.
      tokens_BL: token ids, right-padded.
      temperature: the number that divides the logits.
      values_everywhere: whether values are computed at every token, even if
        loss positions are given.
      **rows: see `Rows`.
    """
    loss_positions_BM = rows.get('loss_positions_BM')
    # Logits need only the states that predict the loss positions. If values at
    # all tokens are wanted, the states of all tokens are computed, and the
    # logits are made from some of these states.
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
    values = None
    if self.head == 'both':
      values = heads.token_values(
        hidden_BLD,
        params['scalar_head'],
        tokens_BL,
        loss_positions_BM=rows['loss_positions_BM'],
        bounds=self.value_range,
      )
    return TokenOutputs(logprobs_BL, entropy_BL, values, routing)

  def logprobs_and_entropy(
    self,
    params: Params,
    tokens_BL: Array,
    *,
    temperature: float,
    **rows: Unpack[Rows],
  ) -> tuple[Array, Array]:
    """Returns only logprobs_BL and entropy_BL, see `token_outputs`."""
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

    See `heads.token_divergence`. The reference gets no gradient. The remaining
    arguments have the same meaning as in `token_outputs`.
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
  ) -> heads.Values:
    """Returns the values of a value model; see `heads.token_values`.

    The arguments have the same meaning as in `token_outputs`.
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
      params: weights with a separate tree for each layer, adapters included.
        Decoding reads every weight for every token. If the layers were stacked,
        each layer would be sliced, and so copied, for every token.
      tokens_BC: the next tokens of each row.
      **cached: the keyword arguments of `cached_pass.extend`.
    """
    module, layers = modules.filled_by_layer(
      self.config, self.head, self.mesh, params, lora=self.lora
    )
    return cached_pass.extend(module, layers, tokens_BC, **cached)
