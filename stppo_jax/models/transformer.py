"""The decoder: one definition for policy and value, whole or from a cache.

B rows, L tokens, D width, Q query heads, K key/value heads, G = Q / K, H head
size, C appended tokens, S cache positions.

Sequences are right-padded. Under a causal mask a token never sees what follows
it, so padding needs no mask: it changes only itself.
"""

from collections.abc import Callable

from flax import nnx
import jax
import jax.numpy as jnp

from stppo_jax.models import config as model_config

Array = jax.Array
Cache = tuple[tuple[Array, Array], ...]  # per layer: keys, values [B, K, S, H]

_INITIALIZER = nnx.initializers.normal(stddev=0.02)
_MASKED = -1e30  # finite: a row of nothing but masked scores stays finite


class Linear(nnx.Module):
  """x @ kernel (+ bias), the kernel stored [in, out]."""

  def __init__(self, din: int, dout: int, *, use_bias: bool, rngs: nnx.Rngs):
    self.kernel = nnx.Param(_INITIALIZER(rngs.params(), (din, dout)))
    if use_bias:
      self.bias = nnx.Param(jnp.zeros((dout,)))
    self.use_bias = use_bias

  def __call__(self, x: Array) -> Array:
    # As one matrix: on CPU the gradient of a batched product is half as fast.
    flat = x.reshape(-1, x.shape[-1])
    y = flat @ self.kernel[...].astype(x.dtype)
    if self.use_bias:
      y = y + self.bias[...].astype(x.dtype)[None]
    return y.reshape(*x.shape[:-1], -1)


class RMSNorm(nnx.Module):
  """x / rms(x) · scale, the mean square taken in float32."""

  def __init__(self, size: int, *, eps: float):
    self.scale = nnx.Param(jnp.ones((size,)))
    self.eps = eps

  def __call__(self, x: Array) -> Array:
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    normed = x32 * jax.lax.rsqrt(mean_square + self.eps)
    scale = self.scale[...].astype(x.dtype).reshape(*[1] * (x.ndim - 1), -1)
    return normed.astype(x.dtype) * scale


class Block(nnx.Module):
  """Attention and gated MLP, each with a norm before and a residual around."""

  def __init__(self, config: model_config.ModelConfig, *, rngs: nnx.Rngs):
    c = config
    self.config = c
    self.attention_norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
    bias = {'use_bias': c.qkv_bias, 'rngs': rngs}
    self.q_proj = Linear(c.hidden_size, c.num_heads * c.head_dim, **bias)
    self.k_proj = Linear(c.hidden_size, c.num_kv_heads * c.head_dim, **bias)
    self.v_proj = Linear(c.hidden_size, c.num_kv_heads * c.head_dim, **bias)
    plain = {'use_bias': False, 'rngs': rngs}
    self.o_proj = Linear(c.num_heads * c.head_dim, c.hidden_size, **plain)
    self.mlp_norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
    self.gate_proj = Linear(c.hidden_size, c.intermediate_size, **plain)
    self.up_proj = Linear(c.hidden_size, c.intermediate_size, **plain)
    self.down_proj = Linear(c.intermediate_size, c.hidden_size, **plain)

  def __call__(
    self,
    x_BLD: Array,
    rotation: tuple[Array, Array],
    attend: Callable[[Array, Array, Array], Array],
  ) -> Array:
    """One layer; `attend(q_BLQH, k_BLKH, v_BLKH)` mixes values: BLQH."""
    B, L, _ = x_BLD.shape
    H = self.config.head_dim
    y_BLD = self.attention_norm(x_BLD)
    q_BLQH = _rotate(self.q_proj(y_BLD).reshape(B, L, -1, H), rotation)
    k_BLKH = _rotate(self.k_proj(y_BLD).reshape(B, L, -1, H), rotation)
    v_BLKH = self.v_proj(y_BLD).reshape(B, L, -1, H)
    mixed_BLQH = attend(q_BLQH, k_BLKH, v_BLKH)
    x_BLD = x_BLD + self.o_proj(mixed_BLQH.reshape(B, L, -1))
    y_BLD = self.mlp_norm(x_BLD)
    gated = jax.nn.silu(self.gate_proj(y_BLD)) * self.up_proj(y_BLD)
    return x_BLD + self.down_proj(gated)


class Transformer(nnx.Module):
  """Embedding, stacked blocks, norm, and a head.

  Args:
    config: the shape.
    head: 'vocabulary' (a policy: an output matrix unless tied) or 'scalar' (a
      value model: one number per token, starting at zero).
    rngs: source of the initial weights.
  """

  def __init__(
    self, config: model_config.ModelConfig, *, head: str, rngs: nnx.Rngs
  ):
    self.config = config
    shape = (config.vocab_size, config.hidden_size)
    self.embedding = nnx.Param(_INITIALIZER(rngs.params(), shape))

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs):
      return Block(config, rngs=rngs)

    self.layers = stack(rngs)
    self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
    if head == 'scalar':
      self.scalar_head = nnx.Param(jnp.zeros((config.hidden_size, 1)))
    elif head == 'vocabulary':
      if not config.tie_embeddings:
        self.lm_head = nnx.Param(_INITIALIZER(rngs.params(), shape))
    else:
      raise ValueError(f'head={head!r}; choices: vocabulary, scalar')

  def __call__(self, tokens_BL: Array) -> Array:
    """Final hidden states [B, L, D] of whole sequences, causal."""
    L = tokens_BL.shape[1]
    positions_BL = jnp.broadcast_to(jnp.arange(L), tokens_BL.shape)
    rotation = _rotation(self.config, positions_BL)
    causal_LL = jnp.tril(jnp.ones((L, L), bool))
    graph, stacked = nnx.split(self.layers)

    def layer(x_BLD, params):
      attend = lambda q, k, v: _attention(
        q, k.swapaxes(1, 2), v.swapaxes(1, 2), causal_LL[None]
      )
      return nnx.merge(graph, params)(x_BLD, rotation, attend), None

    if self.config.remat == 'full':
      layer = jax.checkpoint(layer)
    x_BLD, _ = jax.lax.scan(
      layer,
      self._embed(tokens_BL),
      stacked,
      unroll=self.config.scan_unroll,
    )
    return self.norm(x_BLD)

  def extend(
    self, tokens_BC: Array, cache: Cache, lengths_B: Array, counts_B: Array
  ) -> tuple[Array, Cache]:
    """Appends tokens to cached rows; decoding is the case C = 1.

    Args:
      tokens_BC: the first counts_B of each row are appended, the rest ignored.
      cache: keys and values of the first lengths_B tokens.
      lengths_B: tokens in the cache; lengths_B + counts_B <= S.
      counts_B: tokens to append, 0..C.

    Returns:
      Hidden states [B, C, D] (meaningless past counts_B) and the new cache.
    """
    B, C = tokens_BC.shape
    size = cache[0][0].shape[2]
    positions_BC = lengths_B[:, None] + jnp.arange(C)[None]
    rotation = _rotation(self.config, positions_BC)
    visible_BCS = jnp.arange(size)[None, None] <= positions_BC[:, :, None]
    # Slots past the end are dropped by the scatter.
    valid_BC = jnp.arange(C)[None] < counts_B[:, None]
    slots_BC = jnp.where(valid_BC, positions_BC, size)
    rows_BC = jnp.broadcast_to(jnp.arange(B)[:, None], slots_BC.shape)
    graph, stacked = nnx.split(self.layers)

    x_BCD, updated = self._embed(tokens_BC), []
    for index, (keys_BKSH, values_BKSH) in enumerate(cache):

      def attend(q, k, v, keys=keys_BKSH, values=values_BKSH):
        at = (rows_BC, slice(None), slots_BC)
        keys = keys.at[at].set(k.astype(keys.dtype), mode='drop')
        values = values.at[at].set(v.astype(values.dtype), mode='drop')
        updated.append((keys, values))
        return _attention(q, keys, values, visible_BCS)

      params = jax.tree.map(lambda p: p[index], stacked)
      x_BCD = nnx.merge(graph, params)(x_BCD, rotation, attend)
    return self.norm(x_BCD), tuple(updated)

  def _embed(self, tokens_BL: Array) -> Array:
    return self.embedding[...][tokens_BL].astype(self.config.dtype)


def empty_cache(
  config: model_config.ModelConfig, rows: int, size: int
) -> Cache:
  """Zeroed keys and values for `rows` sequences of at most `size` tokens."""
  shape = (rows, config.num_kv_heads, size, config.head_dim)
  zeros = lambda: jnp.zeros(shape, config.dtype)
  return tuple((zeros(), zeros()) for _ in range(config.num_layers))


def _attention(
  q_BLQH: Array, k_BKSH: Array, v_BKSH: Array, visible_BLS: Array
) -> Array:
  """softmax(q k / √H) v in float32 scores; keys are shared, never repeated."""
  B, L, Q, H = q_BLQH.shape
  K = k_BKSH.shape[1]
  q_BLKGH = q_BLQH.reshape(B, L, K, Q // K, H)
  scores = jnp.einsum(
    'blkgh,bksh->bkgls',
    q_BLKGH * H**-0.5,
    k_BKSH,
    preferred_element_type=jnp.float32,
  )
  scores = jnp.where(visible_BLS[:, None, None], scores, _MASKED)
  # Normalised after the product with v: H divisions a query, not S.
  largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
  weights = jnp.exp(scores - largest)
  mixed = jnp.einsum('bkgls,bksh->bkglh', weights.astype(v_BKSH.dtype), v_BKSH)
  mixed = mixed / jnp.sum(weights, axis=-1, keepdims=True).astype(mixed.dtype)
  return mixed.transpose(0, 3, 1, 2, 4).reshape(B, L, Q, H)


def _rotation(
  config: model_config.ModelConfig, positions_BL: Array
) -> tuple[Array, Array]:
  """cos and sin [B, L, 1, H/2] of the rotary angles."""
  half = config.head_dim // 2
  exponents = jnp.arange(half, dtype=jnp.float32) / half
  frequencies = config.rope_theta**-exponents
  angles = positions_BL[:, :, None, None] * frequencies[None, None, None]
  return jnp.cos(angles), jnp.sin(angles)


def _rotate(x_BLNH: Array, rotation: tuple[Array, Array]) -> Array:
  """Rotary positions: halves (a, b) -> (a cos - b sin, b cos + a sin)."""
  cos, sin = (part.astype(x_BLNH.dtype) for part in rotation)
  a, b = jnp.split(x_BLNH, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
