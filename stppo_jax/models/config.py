"""The shape of a transformer, read from and written to Hugging Face configs."""

from collections.abc import Mapping
import dataclasses
from typing import Any

# The same network, with and without biases on query, key and value.
_SUPPORTED = ('qwen2', 'llama')


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A Qwen2-shaped decoder. Field names follow this project's configs.

  Attributes:
    vocab_size: rows of the embedding.
    hidden_size: D, width of the residual stream.
    intermediate_size: width of the gated MLP.
    num_layers: blocks.
    num_heads: query heads; a multiple of num_kv_heads.
    num_kv_heads: key and value heads.
    head_dim: H, size of one head; even, for rotary positions.
    rope_theta: base of the rotary frequencies.
    rms_norm_eps: added to the mean square.
    qkv_bias: biases on the query, key and value projections.
    tie_embeddings: the output head is the embedding.
    dtype: of the activations; weights are stored in float32.
    remat: 'none' keeps every activation for the backward pass, 'full'
      recomputes each layer.
    scan_unroll: layers per iteration of the scan; more compiles longer and,
      for small models on CPU, runs faster.
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
  dtype: str = 'float32'
  remat: str = 'none'
  scan_unroll: int = 1

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads={self.num_heads} must be a multiple of '
        f'num_kv_heads={self.num_kv_heads}'
      )
    if self.head_dim % 2:
      raise ValueError(f'head_dim={self.head_dim} must be even')

  @classmethod
  def from_hf(
    cls,
    hf: Mapping[str, Any],
    *,
    dtype: str,
    remat: str,
    scan_unroll: int,
  ) -> 'ModelConfig':
    """From the contents of a Hugging Face `config.json`.

    Raises:
      ValueError: another architecture than Qwen2 and Llama, or options of them
        that are not implemented.
    """
    kind = hf.get('model_type')
    if kind not in _SUPPORTED:
      raise ValueError(
        f'unsupported model_type {kind!r}; supported: {", ".join(_SUPPORTED)}'
      )
    if hf.get('attention_bias') or hf.get('mlp_bias'):
      raise ValueError('attention_bias and mlp_bias are not supported')
    rope = hf.get('rope_scaling') or hf.get('rope_parameters') or {}
    if rope.get('rope_type', 'default') != 'default':
      raise ValueError(f'unsupported rope scaling {rope!r}')
    if hf.get('use_sliding_window'):
      raise ValueError('use_sliding_window=true is not supported')
    heads = hf['num_attention_heads']
    return cls(
      vocab_size=hf['vocab_size'],
      hidden_size=hf['hidden_size'],
      intermediate_size=hf['intermediate_size'],
      num_layers=hf['num_hidden_layers'],
      num_heads=heads,
      num_kv_heads=hf.get('num_key_value_heads', heads),
      head_dim=hf.get('head_dim') or hf['hidden_size'] // heads,
      rope_theta=float(hf.get('rope_theta', rope.get('rope_theta', 10000.0))),
      rms_norm_eps=hf.get('rms_norm_eps', 1e-6),
      qkv_bias=kind == 'qwen2',
      tie_embeddings=hf.get('tie_word_embeddings', False),
      dtype=dtype,
      remat=remat,
      scan_unroll=scan_unroll,
    )

  def to_hf(self) -> dict[str, Any]:
    """The contents of a `config.json` that `transformers` loads."""
    kind = 'qwen2' if self.qkv_bias else 'llama'
    return {
      'architectures': [f'{kind.capitalize()}ForCausalLM'],
      'model_type': kind,
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
      'max_position_embeddings': 32768,
      'torch_dtype': 'float32',
    }
