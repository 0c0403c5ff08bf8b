"""Describes the shape of a transformer."""

from collections.abc import Mapping
import dataclasses
import itertools

# Fields of a `ModelConfig` that are only kept for the export; fields that say
# how to compute and not what; and the fields that only one kind of MLP has.
_FOR_EXPORT = ('family', 'max_position_embeddings', 'router_aux_loss_coef')
_PROGRAM = ('dtype', 'remat', 'scan_unroll', 'attention', 'moe', 'cache')
_OF_DENSE = ('intermediate_size',)
_OF_EXPERTS = ('num_experts_per_tok', 'moe_intermediate_size', 'norm_topk_prob')

# The fields of each kind of rope scaling.
ROPE_FIELDS: Mapping[str, tuple[str, ...]] = {
  'linear': ('factor',),
  'dynamic': ('factor',),
  'llama3': (
    'factor',
    'low_freq_factor',
    'high_freq_factor',
    'original_max_position_embeddings',
  ),
  'yarn': (
    'factor',
    'attention_factor',
    'beta_fast',
    'beta_slow',
    'truncate',
    'original_max_position_embeddings',
  ),
  'longrope': (
    'short_factor',
    'long_factor',
    'attention_factor',
    'original_max_position_embeddings',
  ),
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Says how rotary angles shrink for long texts; see `models/rotary.py`.

  Attributes:
    rope_type: a key of `ROPE_FIELDS`, which lists the fields that it has.
    factor: the number by which angles are divided.
    low_freq_factor, high_freq_factor: the turns within the original length up
      to which a pair is slow, and from which on it is fast.
    original_max_position_embeddings: the original length.
    attention_factor: the factor of rotated queries and keys.
    beta_fast, beta_slow, truncate: the turns from which on a pair is fast and
      up to which it is slow, and whether the pairs between them are counted in
      whole numbers.
    short_factor, long_factor: for each pair the number that divides its angle,
      in texts up to the original length and in longer ones.
    length: the longest text of the run, for which the scalings 'dynamic' and
      'longrope' are computed. In `transformers` they follow the present length;
      here they must not, because keys that are cached cannot be rotated again.
  """

  rope_type: str
  factor: float = 0.0
  low_freq_factor: float = 0.0
  high_freq_factor: float = 0.0
  original_max_position_embeddings: int = 0
  attention_factor: float = 1.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True
  short_factor: tuple[float, ...] = ()
  long_factor: tuple[float, ...] = ()
  length: int = 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Describes the shape of a decoder.

  The fields with defaults distinguish the families, see
  `models/hf/families.py`. Field names follow this project's configs, whose
  rules, and those of `models/hf/config_json.py`, make the sizes fit together.

  Attributes:
    vocab_size: V, vocabulary entries of the embedding.
    hidden_size: D, width of the residual stream.
    intermediate_size: width of the gated MLP; unused if experts replace all.
    num_layers: decoder layers.
    num_heads: query heads; a multiple of num_kv_heads.
    num_kv_heads: key and value heads.
    head_dim: H, size of one head; even, for rotary positions.
    rope_theta: base of the rotary frequencies.
    rms_norm_eps: added to the mean square.
    qkv_bias: biases on the query, key and value projections.
    tie_embeddings: the output head is the embedding.
    family: the family that the model was read from, for the export; '': the
      first one with these blocks. Models that differ in it alone are equal.
    o_bias: a bias on the output projection of attention.
    mlp_bias: biases on the projections of the MLP.
    qk_norm: a norm over each head of queries and keys, before rotary positions.
    qk_norm_whole: whether that norm is over all heads together.
    norms: where the norms are: 'before' attention and MLP, 'after' them, or
      'both'.
    norm_offset: the number that is added to the scales of norms.
    activation: a key of `transformer.ACTIVATIONS`.
    scale_embedding: whether embedded tokens are multiplied by √D.
    query_pre_attn_scalar: attention's logits are divided by its root; 0: H.
    partial_rotary_factor: the share of a head that is rotated.
    windows: for each layer the tokens that a query sees at most, its own and
      those before it; 0: all of them. (): all, in all layers.
    local_rope_theta: base of the rotary frequencies of layers with a window,
      which are then not scaled; 0: they are those of the other layers.
    num_experts: X, gated MLPs that a token is routed among; 0: one dense MLP.
    dense_layers: the layers that have a dense MLP although others have experts.
    num_experts_per_tok: E, how many of them a token visits.
    moe_intermediate_size: width of one expert.
    norm_topk_prob: whether the weights of the visited experts sum to one.
    router_aux_loss_coef: weight of the load-balance loss, for the export.
    rope_scaling: scaling of rotary positions; None: no scaling.
    max_position_embeddings: longest sequence that the model was made for; for
      the export.
    dtype: dtype of the activations; weights are stored in float32.
    remat: what is saved of a layer for the backward pass; a key of
      `transformer.POLICIES`.
    scan_unroll: layers per iteration of the scan; more of them compile longer
      and, in small models on a CPU, run faster.
    attention: how attention of whole sequences is computed; a key of
      `attention.IMPLEMENTATIONS`.
    moe: how experts are computed; a key of `moe.IMPLEMENTATIONS`.
    cache: the type of cached keys and values: 'model' (that of the activations)
      or 'int8'.
  """

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float
  rms_norm_eps: float
  qkv_bias: bool
  tie_embeddings: bool
  family: str = dataclasses.field(default='', compare=False)
  o_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  qk_norm_whole: bool = False
  norms: str = 'before'
  norm_offset: float = 0.0
  activation: str = 'silu'
  scale_embedding: bool = False
  query_pre_attn_scalar: float = 0.0
  partial_rotary_factor: float = 1.0
  windows: tuple[int, ...] = ()
  local_rope_theta: float = 0.0
  num_experts: int = 0
  dense_layers: tuple[int, ...] = ()
  num_experts_per_tok: int = 0
  moe_intermediate_size: int = 0
  norm_topk_prob: bool = True
  router_aux_loss_coef: float = 0.001
  rope_scaling: RopeScaling | None = None
  max_position_embeddings: int = 32768
  dtype: str = 'float32'
  remat: str = 'none'
  scan_unroll: int = 1
  attention: str = 'xla'
  moe: str = 'dense'
  cache: str = 'model'

  @property
  def layer_windows(self) -> tuple[int, ...]:
    """The window of each layer; 0: none."""
    return self.windows or (0,) * self.num_layers

  @property
  def stacks(self) -> Mapping[str, tuple['ModelConfig', int]]:
    """The stacks of equal layers by name: the shape of a layer, and how many.

    A name is a key of the parameter tree. Layers without experts are a stack of
    their own if others have experts.
    """
    dense = len(self.dense_layers)
    stacks = {'layers': (self, self.num_layers - dense)}
    if dense:
      shape = dataclasses.replace(self, num_experts=0, dense_layers=())
      stacks['dense_layers'] = shape, dense
    return stacks

  @property
  def places(self) -> tuple[tuple[str, int], ...]:
    """For each layer the name of its stack, and its number there."""
    names = [
      'dense_layers' if layer in self.dense_layers else 'layers'
      for layer in range(self.num_layers)
    ]
    return tuple((x, names[:n].count(x)) for n, x in enumerate(names))

  @property
  def pattern(self) -> tuple[int, list[tuple[str, slice, slice]]]:
    """How often a pattern of layers repeats, and its runs of equal layers.

    A run has the name of its stack and two ranges: of numbers in the pattern,
    and of numbers in the part of the stack that a repetition has.
    """
    names, count = [name for name, _ in self.places], self.num_layers
    length = count
    if self.dense_layers:
      lengths = (n for n in range(1, count + 1) if count % n == 0)
      length = next(n for n in lengths if names[:n] * (count // n) == names)
    runs = []
    layers = enumerate(self.places[:length])
    for name, run in itertools.groupby(layers, key=lambda x: x[1][0]):
      (first, (_, place)), *others = run
      end = 1 + len(others)
      runs.append((name, slice(first, first + end), slice(place, place + end)))
    return count // length, runs


def computed_as(config: ModelConfig, other: ModelConfig) -> ModelConfig:
  """Returns a shape with the other's fields that say how to compute."""
  fields = {name: getattr(other, name) for name in _PROGRAM}
  return dataclasses.replace(config, **fields)


def compared(config: ModelConfig) -> tuple[str, ...]:
  """Returns the fields that models must share to compute the same function."""
  others = _OF_DENSE if config.num_experts else _OF_EXPERTS
  others = () if config.dense_layers else others
  return tuple(
    field.name
    for field in dataclasses.fields(config)
    if field.name not in _FOR_EXPORT + _PROGRAM + others
  )
