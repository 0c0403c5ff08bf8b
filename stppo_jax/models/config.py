"""The shape of a transformer, read from and written to Hugging Face configs."""

from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import NamedTuple

from stppo_jax.models.hf import fields as fields_lib


class _Architecture(NamedTuple):
  """The class of an architecture, and the properties that distinguish it."""

  class_name: str
  qkv_bias: bool
  qk_norm: bool
  experts: bool


ARCHITECTURES: Mapping[str, _Architecture] = {
  'qwen2': _Architecture('Qwen2ForCausalLM', True, False, False),
  'qwen3': _Architecture('Qwen3ForCausalLM', False, True, False),
  'llama': _Architecture('LlamaForCausalLM', False, False, False),
  'qwen3_moe': _Architecture('Qwen3MoeForCausalLM', False, True, True),
}

# Fields of a `ModelConfig` that are only kept for the export; fields that say
# how to compute and not what; and the fields that only one kind of MLP has.
_FOR_EXPORT = ('max_position_embeddings', 'router_aux_loss_coef')
_PROGRAM = ('dtype', 'remat', 'scan_unroll', 'attention', 'moe', 'cache')
_OF_DENSE = ('intermediate_size',)
_OF_EXPERTS = ('num_experts_per_tok', 'moe_intermediate_size', 'norm_topk_prob')

# The fields of each kind of rope scaling.
_ROPE_FIELDS: Mapping[str, tuple[str, ...]] = {
  'linear': ('factor',),
  'llama3': (
    'factor',
    'low_freq_factor',
    'high_freq_factor',
    'original_max_position_embeddings',
  ),
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How rotary angles are stretched for long texts; see `models/rotary.py`.

  Attributes:
    rope_type: 'linear' or 'llama3'.
    factor: the number by which angles are divided.
    low_freq_factor, high_freq_factor, original_max_position_embeddings: used by
      'llama3' only, which leaves angles that turn fast as they are.

  Raises:
    ValueError: the type is unknown, or a number that it needs is not positive
      or contradicts another.
  """

  rope_type: str
  factor: float = 0.0
  low_freq_factor: float = 0.0
  high_freq_factor: float = 0.0
  original_max_position_embeddings: int = 0

  def __post_init__(self):
    if self.rope_type not in _ROPE_FIELDS:
      raise ValueError(
        f'unsupported rope scaling {self.rope_type!r}; supported: default, '
        + ', '.join(_ROPE_FIELDS)
      )
    for name in _ROPE_FIELDS[self.rope_type]:
      if not getattr(self, name) > 0:
        raise ValueError(
          f'rope scaling {self.rope_type}: {name}={getattr(self, name)!r} '
          'must be greater than 0'
        )
    if self.rope_type == 'llama3' and (
      self.low_freq_factor >= self.high_freq_factor
    ):
      raise ValueError(
        f'rope scaling llama3: low_freq_factor={self.low_freq_factor} must be '
        f'smaller than high_freq_factor={self.high_freq_factor}'
      )

  def to_hf(self) -> dict[str, Any]:
    """Returns the value of `rope_scaling` in a `config.json`."""
    fields = ('rope_type', *_ROPE_FIELDS[self.rope_type])
    return {name: getattr(self, name) for name in fields}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape of a decoder of the Qwen and Llama family.

  Biases, norms of queries and keys, and experts distinguish the architectures.
  Combinations that are not in `ARCHITECTURES` raise ValueError, so that every
  model can be exported. Sizes that do not fit together raise it, too. Field
  names follow this project's configs.

  Attributes:
    vocab_size: V, vocabulary entries of the embedding.
    hidden_size: D, width of the residual stream.
    intermediate_size: width of the gated MLP; unused if experts replace it.
    num_layers: decoder layers.
    num_heads: query heads; a multiple of num_kv_heads.
    num_kv_heads: key and value heads.
    head_dim: H, size of one head; even, for rotary positions.
    rope_theta: base of the rotary frequencies.
    rms_norm_eps: added to the mean square.
    qkv_bias: biases on the query, key and value projections.
    tie_embeddings: the output head is the embedding.
    qk_norm: a norm over each head of queries and keys, before rotary positions.
    num_experts: X, gated MLPs that a token is routed among; 0: one dense MLP.
    num_experts_per_tok: E, how many of them a token visits.
    moe_intermediate_size: width of one expert.
    norm_topk_prob: whether the weights of the visited experts sum to one.
    router_aux_loss_coef: weight of the load-balance loss, for the export.
    rope_scaling: scaling of rotary positions; None: no scaling.
    max_position_embeddings: longest sequence that the model was made for; for
      the export.
    dtype: dtype of the activations; weights are stored in float32.
    remat: what is saved of a layer for the backward pass; a key of
      `remat.POLICIES`.
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
  qk_norm: bool = False
  num_experts: int = 0
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

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads={self.num_heads} must be a multiple of '
        f'num_kv_heads={self.num_kv_heads}'
      )
    if self.head_dim <= 0 or self.head_dim % 2:
      raise ValueError(
        f'head_dim={self.head_dim} must be even and greater than 0'
      )
    if self.num_experts:
      if not 0 < self.num_experts_per_tok <= self.num_experts:
        raise ValueError(
          f'num_experts_per_tok={self.num_experts_per_tok} must be 1 to '
          f'num_experts={self.num_experts}'
        )
      if self.moe_intermediate_size <= 0:
        raise ValueError(
          f'moe_intermediate_size={self.moe_intermediate_size} must be greater '
          f'than 0 when num_experts={self.num_experts}'
        )
    _ = self.architecture  # raises if there is none

  @property
  def architecture(self) -> str:
    """The `model_type` of Hugging Face; a key of `ARCHITECTURES`."""
    properties = (self.qkv_bias, self.qk_norm, self.num_experts > 0)
    for kind, architecture in ARCHITECTURES.items():
      if architecture[1:] == properties:
        return kind
    choices = '; '.join(
      f'{kind} (qkv_bias={a.qkv_bias}, qk_norm={a.qk_norm}, num_experts '
      f'{"> 0" if a.experts else "= 0"})'
      for kind, a in ARCHITECTURES.items()
    )
    raise ValueError(
      f'qkv_bias={self.qkv_bias}, qk_norm={self.qk_norm}, num_experts='
      f'{self.num_experts} are those of no architecture; choices: {choices}'
    )

  @classmethod
  def from_hf(
    cls,
    hf: Mapping[str, Any],
    *,
    dtype: str,
    remat: str,
    scan_unroll: int,
  ) -> 'ModelConfig':
    """Returns the shape that a Hugging Face `config.json` describes.

    Args:
      hf: contents of the file.
      dtype, remat, scan_unroll: see the class.

    Raises:
      ValueError: the architecture is not in `ARCHITECTURES`, an option of it is
        not implemented, or a key is missing or has a value that is not allowed;
        one line.
    """
    kind = fields_lib.model_type(hf)
    # Checked first, because fields have other meanings in other families.
    if kind is None or kind not in ARCHITECTURES:
      raise ValueError(
        f'unsupported model_type {kind!r}; supported: '
        + ', '.join(ARCHITECTURES)
      )
    fields_lib.check(hf)
    architecture = ARCHITECTURES[kind]
    hidden_size = fields_lib.needed(hf, 'hidden_size')
    heads = fields_lib.needed(hf, 'num_attention_heads')
    # Without a value, heads divide the width equally, except in Qwen3.
    head_dim = 128 if kind == 'qwen3' else hidden_size // heads
    rope_theta, rope_scaling = _rope(hf)
    experts = {}
    if architecture.experts:
      experts = {
        'num_experts': fields_lib.needed(
          hf, 'num_experts', 'num_local_experts'
        ),
        'num_experts_per_tok': fields_lib.needed(hf, 'num_experts_per_tok'),
        'moe_intermediate_size': fields_lib.needed(hf, 'moe_intermediate_size'),
        'norm_topk_prob': hf.get('norm_topk_prob', False),
        'router_aux_loss_coef': hf.get('router_aux_loss_coef', 0.001),
      }
    return cls(
      vocab_size=fields_lib.needed(hf, 'vocab_size'),
      hidden_size=hidden_size,
      intermediate_size=fields_lib.needed(hf, 'intermediate_size'),
      num_layers=fields_lib.needed(hf, 'num_hidden_layers'),
      num_heads=heads,
      num_kv_heads=hf.get('num_key_value_heads') or heads,
      head_dim=hf.get('head_dim') or head_dim,
      rope_theta=rope_theta,
      rms_norm_eps=hf.get('rms_norm_eps', 1e-6),
      qkv_bias=architecture.qkv_bias,
      tie_embeddings=hf.get('tie_word_embeddings', False),
      qk_norm=architecture.qk_norm,
      rope_scaling=rope_scaling,
      max_position_embeddings=hf.get('max_position_embeddings', 32768),
      dtype=dtype,
      remat=remat,
      scan_unroll=scan_unroll,
      **experts,
    )

  def to_hf(self) -> dict[str, Any]:
    """Returns the contents of a `config.json` that `transformers` loads.

    Rotary positions are written in a form that its old and new versions read.
    """
    hf = {
      'architectures': [ARCHITECTURES[self.architecture].class_name],
      'model_type': self.architecture,
      'vocab_size': self.vocab_size,
      'hidden_size': self.hidden_size,
      'intermediate_size': self.intermediate_size,
      'num_hidden_layers': self.num_layers,
      'num_attention_heads': self.num_heads,
      'num_key_value_heads': self.num_kv_heads,
      'head_dim': self.head_dim,
      'rope_theta': self.rope_theta,
      'rms_norm_eps': self.rms_norm_eps,
      'tie_word_embeddings': self.tie_embeddings,
      'hidden_act': 'silu',
      'max_position_embeddings': self.max_position_embeddings,
      'torch_dtype': 'float32',
    }
    if self.rope_scaling:
      hf['rope_scaling'] = self.rope_scaling.to_hf()
    if self.num_experts:
      hf |= {
        'num_experts': self.num_experts,
        'num_experts_per_tok': self.num_experts_per_tok,
        'moe_intermediate_size': self.moe_intermediate_size,
        'norm_topk_prob': self.norm_topk_prob,
        'router_aux_loss_coef': self.router_aux_loss_coef,
        'decoder_sparse_step': 1,
        'mlp_only_layers': [],
      }
    return hf


def compared(config: ModelConfig) -> tuple[str, ...]:
  """Returns the fields that models must share to compute the same function."""
  others = _OF_DENSE if config.num_experts else _OF_EXPERTS
  return tuple(
    field.name
    for field in dataclasses.fields(config)
    if field.name not in _FOR_EXPORT + _PROGRAM + others
  )


def _rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  """Returns the base and the scaling of rotary positions."""
  rope = fields_lib.rope(hf)
  theta = rope.get('rope_theta') or hf.get('rope_theta') or 10000.0
  kind = rope.get('rope_type') or rope.get('type') or 'default'
  if kind == 'default':
    return float(theta), None
  defaults = {
    'original_max_position_embeddings': hf.get('max_position_embeddings')
  }
  fields = {
    name: rope.get(name) or defaults.get(name) or 0
    for name in _ROPE_FIELDS.get(kind, ())
  }
  return float(theta), RopeScaling(kind, **fields)
