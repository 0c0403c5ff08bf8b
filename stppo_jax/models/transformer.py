"""The decoder: one definition for policy and value.

B rows, L tokens, M of them that are asked about, N layers, D width, Q query
heads, K key/value heads, H head size, X experts, E of them that a token visits.

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
from stppo_jax.models import moe
from stppo_jax.models import remat
from stppo_jax.models import rotary
from stppo_jax.parallel import activations

Array = jax.Array

HEADS = ('vocabulary', 'scalar', 'both')


class Block(nnx.Module):
  """Attention and gated MLP, each with a norm before and a residual around.

  Where the config has experts, a mixture of them is in the MLP's place.
  """

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
    if c.num_experts:
      self.moe = moe.MixtureOfExperts(c, mesh, rngs=rngs)
      return
    self.gate_proj = layers.Linear(c.hidden_size, c.intermediate_size, **plain)
    self.up_proj = layers.Linear(c.hidden_size, c.intermediate_size, **plain)
    self.down_proj = layers.Linear(c.intermediate_size, c.hidden_size, **plain)

  def __call__(
    self,
    x_BLD: Array,
    rotation: tuple[Array, Array],
    attend: Callable[[Array, Array, Array], Array],
    expert_ids_BLE: Array | None = None,
    mask_BL: Array | None = None,
    places_BM: Array | None = None,
  ) -> tuple[Array, moe.Routing | None]:
    """One layer, and its routing; None without experts.

    Args:
      x_BLD: the residual stream.
      rotation: see `rotary.rotation`.
      attend: (q_BLQH, k_BLKH, v_BLKH) to mixed values BLQH.
      expert_ids_BLE, mask_BL: see `moe.MixtureOfExperts`.
      places_BM: see `at`: what comes after attention is of these alone.
    """
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
    mixed = attend(q_BLQH, k_BLKH, v_BLKH).reshape(B, L, -1)
    if places_BM is not None:
      x_BLD, mixed = at(x_BLD, places_BM), at(mixed, places_BM)
    x_BLD = self._residual(x_BLD + self.o_proj(mixed))
    y_BLD, routing = self.mlp_norm(x_BLD), None
    if self.config.num_experts:
      y_BLD, routing = self.moe(y_BLD, expert_ids_BLE, mask_BL)
    else:
      y_BLD = self._mlp(y_BLD)
    return self._residual(x_BLD + y_BLD), routing

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

  def __call__(
    self, tokens_BL: Array, *, lengths_B: Array | None = None
  ) -> Array:
    """Final hidden states [B, L, D] of whole sequences, causal.

    Args:
      tokens_BL: right-padded.
      lengths_B: tokens of each row without padding. Only saves work: states of
        padding are meaningless with them, and unread without.
    """
    return self.hidden_and_routing(tokens_BL, lengths_B=lengths_B)[0]

  def hidden_and_routing(
    self,
    tokens_BL: Array,
    *,
    lengths_B: Array | None = None,
    expert_ids: Array | None = None,
    places_BM: Array | None = None,
  ) -> tuple[Array, moe.Routing | None]:
    """Hidden states, and the routing of a mixture of experts.

    Args:
      tokens_BL, lengths_B: as above; the sums of the routing are over tokens
        that are no padding.
      expert_ids: experts to visit in each layer, see
        `moe.MixtureOfExperts`; None leaves them to the routers.
      places_BM: see `at`; only states there are wanted. Where the layers are
        unrolled, the last one's products are of those alone. None: of all.

    Returns:
      Hidden states [B, L, D], or [B, M, D] at the places; expert_ids, and
      visits and probabilities [B, X] summed over the layers. None without
      experts.
    """
    L = tokens_BL.shape[1]
    positions_1L = jnp.arange(L)[None]
    rotation = rotary.rotation(self.config, positions_1L)
    attend = attention.whole(self.config.attention, L, lengths_B, self.mesh)
    graph, stacked = nnx.split(self.layers)

    mask_BL = None
    if lengths_B is not None:
      mask_BL = positions_1L < lengths_B[:, None]
    given_ids = None
    if expert_ids is not None:
      given_ids = jnp.moveaxis(expert_ids, 2, 0)

    def layer(x_BLD, of_layer, places_BM=None):
      params, given_BLE = of_layer
      block = nnx.merge(graph, params)
      return block(x_BLD, rotation, attend, given_BLE, mask_BL, places_BM)

    unroll = self.config.scan_unroll
    layer = remat.recomputed(layer, self.config.remat, unrolled=unroll > 1)
    x_BLD = self.embed(tokens_BL)
    if places_BM is None or not self._ends_apart:
      x_BLD, routing = jax.lax.scan(
        layer, x_BLD, (stacked, given_ids), unroll=unroll
      )
      if places_BM is not None:
        x_BLD = at(x_BLD, places_BM)
    else:
      before, last = (
        jax.tree.map(lambda x: x[part], stacked) for part in (slice(-1), -1)
      )
      x_BLD, _ = jax.lax.scan(layer, x_BLD, (before, None), unroll=unroll)
      x_BLD, routing = layer(x_BLD, (last, None), places_BM)
    if routing is not None:
      routing = moe.Routing(
        jnp.moveaxis(routing.expert_ids, 0, 2),
        jnp.sum(routing.visits_BX, axis=0),
        jnp.sum(routing.probs_BX, axis=0),
      )
    return self.norm(x_BLD), routing

  @property
  def _ends_apart(self) -> bool:
    """Whether the last layer may be another program than those before.

    Cut out of a loop, its weights would be copied. What experts are visited has
    to be known of all tokens.
    """
    config = self.config
    return (
      config.scan_unroll >= config.num_layers > 1 and not config.num_experts
    )

  def embed(self, tokens_BL: Array) -> Array:
    """[B, L, D] of the first layer."""
    # Whole rows, of the ids at hand: looked up there, summed over `tensor`.
    embedding_VD = activations.constrain(
      self.embedding[...], self.mesh, activations.TENSOR
    )
    x_BLD = _looked_up(embedding_VD, tokens_BL).astype(self.config.dtype)
    return activations.constrain(x_BLD, self.mesh, activations.ROWS)


def at(x_BLD: Array, places_BM: Array) -> Array:
  """[B, M, D]: what stands there; 0 at places outside, all of them distinct."""
  take = lambda x_LD, places_M: x_LD.at[places_M].get(
    mode='fill', fill_value=0, unique_indices=True
  )
  return jax.vmap(take)(x_BLD, places_BM)


@jax.custom_vjp
def _looked_up(table_VD: Array, tokens_BL: Array) -> Array:
  """Rows of the table. Their gradients add up in float32.

  The gradient of an index adds them one by one in the dtype of the table: in
  bfloat16 the row of a frequent token soon is too large to grow.
  """
  return table_VD[tokens_BL]


def _looked_up_forward(table_VD, tokens_BL):
  # Of the table only kind and shape are kept.
  kind = jnp.zeros((0, *table_VD.shape), table_VD.dtype)
  return table_VD[tokens_BL], (kind, tokens_BL)


def _looked_up_backward(kept, gradient_BLD):
  kind, tokens_BL = kept
  sums_VD = jnp.zeros(kind.shape[1:], jnp.float32)
  sums_VD = sums_VD.at[tokens_BL].add(gradient_BLD.astype(jnp.float32))
  return sums_VD.astype(kind.dtype), None


_looked_up.defvjp(_looked_up_forward, _looked_up_backward)
