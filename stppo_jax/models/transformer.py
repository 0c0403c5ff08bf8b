"""The decoder: one definition for policy and value.

B rows, L tokens, D width, Q query heads, K key/value heads, H head size.

Sequences are right-padded. Under a causal mask a token never sees what follows
it, so padding needs no mask: it changes only itself.
"""

from collections.abc import Callable

from flax import nnx
import jax
import jax.numpy as jnp

from stppo_jax.models import attention
from stppo_jax.models import config as model_config
from stppo_jax.models import layers
from stppo_jax.models import remat
from stppo_jax.models import rotary
from stppo_jax.parallel import activations

Array = jax.Array

HEADS = ('vocabulary', 'scalar', 'both')


class Block(nnx.Module):
  """Attention and gated MLP, each with a norm before and a residual around."""

  def __init__(
    self,
    config: model_config.ModelConfig,
    mesh: jax.sharding.Mesh | None,
    *,
    rngs: nnx.Rngs,
  ):
    c = config
    self.config = c
    self.mesh = mesh
    self.attention_norm = layers.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
    bias = {'use_bias': c.qkv_bias, 'rngs': rngs}
    self.q_proj = layers.Linear(c.hidden_size, c.num_heads * c.head_dim, **bias)
    self.k_proj = layers.Linear(
      c.hidden_size, c.num_kv_heads * c.head_dim, **bias
    )
    self.v_proj = layers.Linear(
      c.hidden_size, c.num_kv_heads * c.head_dim, **bias
    )
    plain = {'use_bias': False, 'rngs': rngs}
    self.o_proj = layers.Linear(
      c.num_heads * c.head_dim, c.hidden_size, **plain
    )
    if c.qk_norm:
      self.q_norm = layers.RMSNorm(c.head_dim, eps=c.rms_norm_eps)
      self.k_norm = layers.RMSNorm(c.head_dim, eps=c.rms_norm_eps)
    self.mlp_norm = layers.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
    self.gate_proj = layers.Linear(c.hidden_size, c.intermediate_size, **plain)
    self.up_proj = layers.Linear(c.hidden_size, c.intermediate_size, **plain)
    self.down_proj = layers.Linear(c.intermediate_size, c.hidden_size, **plain)

  def __call__(
    self,
    x_BLD: Array,
    rotation: tuple[Array, Array],
    attend: Callable[[Array, Array, Array], Array],
  ) -> Array:
    """One layer; `attend(q_BLQH, k_BLKH, v_BLKH)` mixes values: BLQH."""
    B, L, _ = x_BLD.shape
    H = self.config.head_dim

    def heads(x):
      x_BLNH = x.reshape(B, L, -1, H)
      rows, tensor = activations.ROWS, activations.TENSOR
      return activations.constrain(x_BLNH, self.mesh, rows, None, tensor)

    y_BLD = self.attention_norm(x_BLD)
    q_BLQH, k_BLKH = heads(self.q_proj(y_BLD)), heads(self.k_proj(y_BLD))
    if self.config.qk_norm:
      q_BLQH, k_BLKH = self.q_norm(q_BLQH), self.k_norm(k_BLKH)
    q_BLQH, k_BLKH = (rotary.rotate(x, rotation) for x in (q_BLQH, k_BLKH))
    v_BLKH = heads(self.v_proj(y_BLD))
    mixed_BLQH = attend(q_BLQH, k_BLKH, v_BLKH)
    x_BLD = self._residual(x_BLD + self.o_proj(mixed_BLQH.reshape(B, L, -1)))
    return self._residual(x_BLD + self._mlp(self.mlp_norm(x_BLD)))

  def _mlp(self, x_BLD: Array) -> Array:
    """down(silu(gate) * up)."""
    gated = jax.nn.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD)
    gated = activations.constrain(
      gated, self.mesh, activations.ROWS, None, activations.TENSOR
    )
    return self.down_proj(gated)

  def _residual(self, x_BLD: Array) -> Array:
    return activations.constrain(x_BLD, self.mesh, activations.ROWS)


class Transformer(nnx.Module):
  """Embedding, stacked blocks, norm, and a head.

  Args:
    config: the shape.
    head: 'vocabulary' (a policy: an output matrix unless tied), 'scalar' (a
      value model: one number per token, starting at zero) or 'both'.
    mesh: that activations are laid out on; None leaves them alone.
    rngs: source of the initial weights.
  """

  def __init__(
    self,
    config: model_config.ModelConfig,
    *,
    head: str,
    mesh: jax.sharding.Mesh | None = None,
    rngs: nnx.Rngs,
  ):
    self.config = config
    self.mesh = mesh
    shape = (config.vocab_size, config.hidden_size)
    self.embedding = nnx.Param(layers.INITIALIZER(rngs.params(), shape))

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs):
      return Block(config, mesh, rngs=rngs)

    self.layers = stack(rngs)
    self.norm = layers.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
    if head not in HEADS:
      raise ValueError(f'head={head!r}; choices: ' + ', '.join(HEADS))
    if head != 'vocabulary':
      self.scalar_head = nnx.Param(jnp.zeros((config.hidden_size, 1)))
    if head != 'scalar' and not config.tie_embeddings:
      self.lm_head = nnx.Param(layers.INITIALIZER(rngs.params(), shape))

  def __call__(self, tokens_BL: Array, lengths_B: Array | None = None) -> Array:
    """Final hidden states [B, L, D] of whole sequences, causal.

    Args:
      tokens_BL: right-padded.
      lengths_B: tokens of each row without padding. Only saves work: states of
        padding are meaningless with them, and unread without.
    """
    L = tokens_BL.shape[1]
    positions_BL = jnp.broadcast_to(jnp.arange(L), tokens_BL.shape)
    rotation = rotary.rotation(self.config, positions_BL)
    attend = attention.whole(self.config.attention, L, lengths_B, self.mesh)
    graph, stacked = nnx.split(self.layers)

    def layer(x_BLD, params):
      return nnx.merge(graph, params)(x_BLD, rotation, attend), None

    unroll = self.config.scan_unroll
    x_BLD, _ = jax.lax.scan(
      remat.recomputed(layer, self.config.remat, unrolled=unroll > 1),
      self.embed(tokens_BL),
      stacked,
      unroll=unroll,
    )
    return self.norm(x_BLD)

  def embed(self, tokens_BL: Array) -> Array:
    """[B, L, D] of the first layer."""
    # Whole rows, of the ids at hand: looked up there, summed over `tensor`.
    embedding_VD = activations.constrain(
      self.embedding[...], self.mesh, activations.TENSOR
    )
    x_BLD = embedding_VD[tokens_BL].astype(self.config.dtype)
    return activations.constrain(x_BLD, self.mesh, activations.ROWS)
