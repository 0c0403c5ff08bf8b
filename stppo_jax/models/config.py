"""Describes the architecture of a transformer, called the model's shape."""

from collections.abc import Mapping
import dataclasses
import itertools

# Fields of a `ModelConfig` that `compared` may leave out: fields that only the
# export reads; fields that choose the program and the precision, but not the
# function that is computed; and fields that only a dense MLP or only a mixture
# of experts reads.
_FOR_EXPORT = ('family', 'max_position_embeddings', 'router_aux_loss_coef')
_PROGRAM = ('dtype', 'remat', 'scan_unroll', 'attention', 'moe', 'cache')
_OF_DENSE = ('intermediate_size',)
_OF_EXPERTS = ('num_experts_per_tok', 'moe_intermediate_size', 'norm_topk_prob')

# For each kind of rope scaling, the fields of `RopeScaling` that a
# `config.json` gives.
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

  A pair is two numbers of a head that are rotated together. The turns of a pair
  are the number of full rotations within the original length. 'llama3' and
  'yarn' shrink the angles of slow pairs, and keep the angles of fast pairs.

  Attributes:
    rope_type: the kind of scaling, a key of `ROPE_FIELDS`. A kind uses the
      fields of its entry in `ROPE_FIELDS`. 'dynamic' also uses the original
      length and `length`, and 'longrope' also uses `length`.
    factor: the number that divides the angles. For 'dynamic', the number that
      says how fast theta, the base of the frequencies, grows with the length.
    low_freq_factor, high_freq_factor: for 'llama3', a pair with at most
      low_freq_factor turns is slow, and a pair with at least high_freq_factor
      turns is fast.
    original_max_position_embeddings: the original length, which is the longest
      text in tokens that the model was first trained on.
    attention_factor: the number that multiplies rotated queries and keys.
    beta_fast, beta_slow: for 'yarn', a pair with at least beta_fast turns is
      fast, and a pair with at most beta_slow turns is slow.
    truncate: for 'yarn', whether the indices of the last fast pair and of the
      first slow pair are rounded to whole numbers.
    short_factor, long_factor: for each pair, the number that divides its angle.
      short_factor is used for texts up to the original length, and long_factor
      for longer texts.
    length: the longest text of the run in tokens. The angles of 'dynamic' and
      'longrope' are computed for this length. `transformers` computes these
      angles for the current length of a text. This is impossible here, because
      cached keys cannot be rotated again.
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

  The fields with defaults distinguish the model families, see
  `models/hf/families.py`. Field names follow this project's configs. The rules
  of these configs and of `models/hf/config_json.py` check that the sizes fit
  together.

  Attributes:
    vocab_size: V, the number of vocabulary entries.
    hidden_size: D, width of the residual stream.
    intermediate_size: width of the gated MLP; unused if all layers have
      experts.
    num_layers: number of decoder layers.
    num_heads: number of query heads; a multiple of num_kv_heads.
    num_kv_heads: number of key and value heads.
    head_dim: H, size of one head; even, because pairs of numbers are rotated.
    rope_theta: base of the rotary frequencies.
    rms_norm_eps: the number that norms add to the mean square.
    qkv_bias: whether the query, key and value projections have biases.
    tie_embeddings: whether the output head uses the matrix of the embedding.
    family: the model family of the files that the config was read from. The
      export writes files of this family. '': the export writes files of the
      family that `families.of` returns. Configs that differ only in this field
      compare as equal.
    o_bias: whether the output projection of attention has a bias.
    mlp_bias: whether the projections of the MLP have biases.
    qk_norm: whether queries and keys pass a norm before they are rotated.
    qk_norm_whole: whether this norm is over all heads together, and not over
      each head.
    norms: where the norms are: 'before' attention and MLP, 'after' them, or
      'both'.
    norm_offset: the number that is added to the scales of norms.
    activation: a key of `transformer.ACTIVATIONS`.
    scale_embedding: whether embedded tokens are multiplied by √D.
    query_pre_attn_scalar: attention divides its logits by the square root of
      this number; 0: by √H.
    partial_rotary_factor: the share of the numbers of a head that is rotated.
    windows: for each layer, the largest number of tokens that a query sees, its
      own token and the tokens before it; 0: no limit. (): no limit in any
      layer.
    local_rope_theta: base of the rotary frequencies in layers with a window.
      `rope_scaling` does not change these frequencies. 0: all layers have the
      same frequencies.
    num_experts: X, the number of gated MLPs that a token is routed among; 0:
      one dense MLP.
    dense_layers: the indices of layers with a dense MLP in a model whose other
      layers have experts.
    num_experts_per_tok: E, the number of experts that a token visits.
    moe_intermediate_size: width of the MLP of one expert.
    norm_topk_prob: whether the weights of the visited experts are scaled to sum
      to one.
    router_aux_loss_coef: weight of the load-balance loss; only the export reads
      it.
    rope_scaling: scaling of rotary positions; None: no scaling.
    max_position_embeddings: longest sequence that the model was made for; only
      the export reads it.
    dtype: dtype of the activations; weights are stored in float32.
    remat: which results of a layer are saved for the backward pass; a key of
      `transformer.POLICIES`.
    scan_unroll: number of layers in an iteration of the scan over layers. With
      a larger number, compiling takes longer, and small models run faster on a
      CPU.
    attention: how attention of whole sequences is computed; a key of
      `attention.IMPLEMENTATIONS`.
    moe: how experts are computed; a key of `moe.IMPLEMENTATIONS`.
    cache: the dtype of cached keys and values: 'model' (the dtype of the
      activations) or 'int8'.
    value_outputs: the number of outputs of a value head, see
      `heads.token_values`.
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
  value_outputs: int = 1

  @property
  def layer_windows(self) -> tuple[int, ...]:
    """The window of each layer in tokens; 0: the layer has no window."""
    return self.windows or (0,) * self.num_layers

  @property
  def stacks(self) -> Mapping[str, tuple['ModelConfig', int]]:
    """The stacks of equal layers: name -> (config of a layer, layer count).

    A name is a key of the parameter tree. If only some layers have experts, the
    layers without experts are a stack of their own.
    """
    dense = len(self.dense_layers)
    stacks = {'layers': (self, self.num_layers - dense)}
    if dense:
      shape = dataclasses.replace(self, num_experts=0, dense_layers=())
      stacks['dense_layers'] = shape, dense
    return stacks

  @property
  def places(self) -> tuple[tuple[str, int], ...]:
    """For each layer, the name of its stack and its index in the stack."""
    names = [
      'dense_layers' if layer in self.dense_layers else 'layers'
      for layer in range(self.num_layers)
    ]
    return tuple((x, names[:n].count(x)) for n, x in enumerate(names))

  @property
  def pattern(self) -> tuple[int, list[tuple[str, slice, slice]]]:
    """How often the layers repeat a pattern, and the runs of the pattern.

    If all layers are in one stack, the pattern is all layers. Otherwise the
    pattern is the shortest sequence of layers that, repeated, gives the right
    stack for every layer. A run is a series of adjacent layers of the pattern
    that are in the same stack. It is given as a tuple (name of the stack, slice
    of the pattern's layers, slice of the stack's layers). The last slice counts
    the layers of the stack from 0 in each repetition of the pattern.
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
  """Returns `config` with the fields named in `_PROGRAM` taken from `other`.

  These fields choose the program and the precision of the computation.
  """
  fields = {name: getattr(other, name) for name in _PROGRAM}
  return dataclasses.replace(config, **fields)


def compared(config: ModelConfig) -> tuple[str, ...]:
  """Returns the names of the fields that decide which function is computed.

  Two models with equal values of these fields compute the same function of
  weights and tokens.
  """
  others = _OF_DENSE if config.num_experts else _OF_EXPERTS
  others = () if config.dense_layers else others
  return tuple(
    field.name
    for field in dataclasses.fields(config)
    if field.name not in _FOR_EXPORT + _PROGRAM + others
  )
