"""Defines the decoder that both the policy and the value model use.

Shape letters: B rows, L tokens of a row, M states of a row that the caller
wants, D width, N query heads, K key and value heads, H size of a head, V
vocabulary entries, X experts, E experts that a token visits, S sequences.

Sequences are right-padded. A causal mask hides from a token all later tokens.
So padding changes only the states at padding, and needs no mask of its own.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from stppo_jax.models import attention
from stppo_jax.models import config as model_config
from stppo_jax.models import embedding
from stppo_jax.models import layers
from stppo_jax.models import moe
from stppo_jax.models import rotary
from stppo_jax.parallel import activations
from stppo_jax.parallel import mesh as mesh_lib

Array = jax.Array

# The functions that can be applied to the gate of the MLP, by name in a config.
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
  'silu': jax.nn.silu,
  'gelu_tanh': jax.nn.gelu,  # JAX's default is the approximation by tanh
}


class DecoderLayer(nnx.Module):
  """Applies attention and a gated MLP, each with norms and a residual sum.

  If the config has experts, a mixture of experts takes the place of the MLP.
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
    D, width = c.hidden_size, c.intermediate_size
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def norm(size: int, exists: bool = True) -> nnx.Module:
      if not exists:
        return layers.Identity()
      return layers.RMSNorm(size, eps=c.rms_norm_eps, offset=c.norm_offset)

    before, after = c.norms != 'after', c.norms != 'before'
    self.attention_norm = norm(D, before)
    bias = {'use_bias': c.qkv_bias, 'rngs': rngs}
    self.q_proj = layers.Linear(D, queries, **bias)
    self.k_proj = layers.Linear(D, keys, **bias)
    self.v_proj = layers.Linear(D, keys, **bias)
    self.o_proj = layers.Linear(queries, D, use_bias=c.o_bias, rngs=rngs)
    if c.qk_norm:
      self.q_norm = norm(queries if c.qk_norm_whole else c.head_dim)
      self.k_norm = norm(keys if c.qk_norm_whole else c.head_dim)
    self.attention_post_norm = norm(D, after)
    self.mlp_norm, self.mlp_post_norm = norm(D, before), norm(D, after)
    if c.num_experts:
      self.moe = moe.MixtureOfExperts(c, mesh, rngs=rngs)
      return
    bias = {'use_bias': c.mlp_bias, 'rngs': rngs}
    self.gate_proj = layers.Linear(D, width, **bias)
    self.up_proj = layers.Linear(D, width, **bias)
    self.down_proj = layers.Linear(width, D, **bias)

  def __call__(
    self,
    x_BLD: Array,
    rotation: tuple[Array, Array],
    attend: Callable[[Array, Array, Array], Array],
    *,
    expert_ids_BLE: Array | None = None,
    counted_BSL: Array | None = None,
    places_BM: Array | None = None,
  ) -> tuple[Array, moe.Routing | None]:
    """Returns the new residual stream and the routing (None without experts).

    Args:
      x_BLD: the residual stream.
      rotation: see `rotary.rotation`.
      attend: function of (q_BLNH, k_BLKH, v_BLKH) that returns the result of
        attention [B, L, N, H].
      expert_ids_BLE, counted_BSL: see `moe.MixtureOfExperts`.
      places_BM: positions of the states that the caller wants, see
        `gather_states`. After attention, only these states are computed, and
        the result is [B, M, D].
    """
    c = self.config
    B, L, _ = x_BLD.shape
    H = c.head_dim

    def split_heads(x):
      x_BLNH = x.reshape(B, L, -1, H)
      rows, tensor = activations.ROWS, activations.TENSOR
      return activations.constrain(x_BLNH, self.mesh, rows, None, tensor)

    y_BLD = self.attention_norm(x_BLD)
    q = self.q_proj(y_BLD)
    q_BLNH = split_heads(self.q_norm(q) if c.qk_norm_whole else q)
    k = self.k_proj(y_BLD)
    k_BLKH = split_heads(self.k_norm(k) if c.qk_norm_whole else k)
    if c.qk_norm and not c.qk_norm_whole:
      q_BLNH, k_BLKH = self.q_norm(q_BLNH), self.k_norm(k_BLKH)
    q_BLNH, k_BLKH = (rotary.rotate(x, rotation) for x in (q_BLNH, k_BLKH))
    if c.query_pre_attn_scalar:  # replaces the √H by which `attend` divides
      q_BLNH = q_BLNH * (H / c.query_pre_attn_scalar) ** 0.5
    v_BLKH = split_heads(self.v_proj(y_BLD))
    mixed = attend(q_BLNH, k_BLKH, v_BLKH).reshape(B, L, -1)
    if places_BM is not None:
      x_BLD, mixed = (gather_states(x, places_BM) for x in (x_BLD, mixed))
    attended_BLD = self.attention_post_norm(self.o_proj(mixed))
    x_BLD = self._residual(x_BLD + attended_BLD)
    y_BLD, routing = self.mlp_norm(x_BLD), None
    if c.num_experts:
      y_BLD, routing = self.moe(
        y_BLD, expert_ids_BLE=expert_ids_BLE, counted_BSL=counted_BSL
      )
    else:
      y_BLD = self._mlp(y_BLD)
    return self._residual(x_BLD + self.mlp_post_norm(y_BLD)), routing

  def _mlp(self, x_BLD: Array) -> Array:
    """Returns down(activation(gate x) * up x)."""
    activation = ACTIVATIONS[self.config.activation]
    gated = activation(self.gate_proj(x_BLD)) * self.up_proj(x_BLD)
    gated = activations.constrain(
      gated, self.mesh, activations.ROWS, None, activations.TENSOR
    )
    # Without the barrier, the compiler for TPU fuses the up projection into the
    # down projection. By its own estimate, both then cost a third more.
    if mesh_lib.platform(self.mesh) == 'tpu':
      gated = jax.lax.optimization_barrier(gated)
    return self.down_proj(gated)

  def _residual(self, x_BLD: Array) -> Array:
    """Returns the residual stream, with its rows sharded if there is a mesh."""
    return activations.constrain(x_BLD, self.mesh, activations.ROWS)


class Transformer(nnx.Module):
  """Applies embedding, stacked decoder layers, norm, and a head.

  Args:
    config: the model's config.
    head: 'vocabulary' (a policy, whose output matrix may be the embedding),
      'scalar' (a value model, whose outputs are 0 at first) or 'both'.
    mesh: mesh that activations are laid out on; None: the compiler chooses.
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

    def stack(layer: model_config.ModelConfig, count: int) -> DecoderLayer:
      @nnx.split_rngs(splits=count)
      @nnx.vmap(in_axes=0, out_axes=0)
      def make(rngs):
        return DecoderLayer(layer, mesh, rngs=rngs)

      return make(rngs)

    for name, (layer, count) in config.stacks.items():
      setattr(self, name, stack(layer, count))
    self.norm = layers.RMSNorm(
      config.hidden_size, eps=config.rms_norm_eps, offset=config.norm_offset
    )
    if head != 'vocabulary':
      zeros_DY = jnp.zeros((config.hidden_size, config.value_outputs))
      self.scalar_head = nnx.Param(zeros_DY)
    if head != 'scalar' and not config.tie_embeddings:
      self.lm_head = nnx.Param(layers.INITIALIZER(rngs.params(), shape))

  def hidden_and_routing(
    self,
    tokens_BL: Array,
    *,
    lengths_B: Array | None = None,
    segments: attention.Segments | None = None,
    expert_ids: Array | None = None,
    places_BM: Array | None = None,
  ) -> tuple[Array, moe.Routing | None]:
    """Returns final hidden states, and the routing of a mixture of experts.

    Args:
      tokens_BL: token ids, right-padded.
      lengths_B: the number of tokens of each row without padding. The lengths
        save work on padding, whose states mean nothing and are read by nothing.
        The lengths also leave padding out of the sums of the routing.
      segments: the sequences in each row, with separate sums of the routing for
        each sequence, [B, S, X]; None: each row is one sequence.
      expert_ids: int [B, L, layers, E], the experts to visit in each layer with
        experts; None: the routers choose. See `moe.MixtureOfExperts`.
      places_BM: positions of the states that the caller wants, see
        `gather_states`; None: all. If `_last_layer_apart` is true, the last
        layer computes only these states after its attention.

    Returns:
      The hidden states [B, L, D], or [B, M, D] if `places_BM` is given; and the
      routing, with sums over the layers, or None without experts.
    """
    L = tokens_BL.shape[1]
    positions_BL = jnp.arange(L)[None]
    if segments is not None:
      positions_BL = segments.positions_BL
    windows = sorted(set(self.config.layer_windows))
    rotations = [
      rotary.rotation(self.config, positions_BL, local=window > 0)
      for window in windows
    ]
    attends = [
      attention.causal_attention(
        self.config.attention,
        L,
        lengths_B=lengths_B,
        mesh=self.mesh,
        segments=segments,
        window=window,
      )
      for window in windows
    ]
    # If layers have different windows, each layer gets the index of its window,
    # which selects its rotation and its attention when the layer runs.
    kinds = None
    if len(windows) > 1:
      kinds = jnp.array([windows.index(x) for x in self.config.layer_windows])

    counted_BSL = None
    if segments is not None:
      numbers_1S1 = 1 + jnp.arange(segments.count)[None, :, None]
      counted_BSL = segments.ids_BL[:, None] == numbers_1S1
    elif lengths_B is not None:
      counted_BSL = (positions_BL < lengths_B[:, None])[:, None]
    ids_by_layer = None
    if expert_ids is not None:
      ids_by_layer = jnp.moveaxis(expert_ids, 2, 0)

    def layer(graph, x_BLD, inputs, places_BM=None):
      (params, kind), expert_ids_BLE = inputs
      module = nnx.merge(graph, params)
      rotation, attend = rotations[0], attends[0]
      if kind is not None:
        rotation = jax.tree.map(
          lambda *x: jax.lax.select_n(kind, *x), *rotations
        )
        attend = lambda *qkv: jax.lax.switch(kind, attends, *qkv)
      return module(
        x_BLD,
        rotation,
        attend,
        expert_ids_BLE=expert_ids_BLE,
        counted_BSL=counted_BSL,
        places_BM=places_BM,
      )

    unroll = self.config.scan_unroll
    repeats, runs = self.config.pattern
    modules = {x: nnx.split(getattr(self, x)) for x in self.config.stacks}

    def apply(x_BLD, inputs):
      """Applies the layers of one repetition of the pattern."""
      stacks, kinds, ids_by_layer = inputs
      routings = []
      for name, numbers, places in runs:
        ids = ids_by_layer if name == 'layers' else None
        stacked, ids = jax.tree.map(lambda x: x[places], (stacks[name], ids))
        inputs = (stacked, None if kinds is None else kinds[numbers]), ids
        run = rematerialised(
          functools.partial(layer, modules[name][0]),
          self.config.remat,
          # With several runs, a run may have only one layer. The compiler
          # unrolls the loop over this layer, so the layer counts as unrolled.
          unrolled=unroll > 1 or len(runs) > 1,
        )
        # After the attention of the last layer, only states at `places_BM` are
        # needed. Earlier layers compute all states, which the next layer reads.
        if places_BM is None or not self._last_layer_apart:
          x_BLD, routing = jax.lax.scan(run, x_BLD, inputs, unroll=unroll)
          routings += [] if routing is None else [routing]
        else:
          before, last = (
            jax.tree.map(lambda x: x[index], inputs)
            for index in (slice(-1), -1)
          )
          x_BLD, _ = jax.lax.scan(run, x_BLD, before, unroll=unroll)
          x_BLD, _ = run(x_BLD, last, places_BM)
      if not routings:
        return x_BLD, None
      return x_BLD, jax.tree.map(lambda *x: jnp.concatenate(x), *routings)

    stacks = {name: stacked for name, (_, stacked) in modules.items()}
    x_BLD, inputs = self.embed(tokens_BL), (stacks, kinds, ids_by_layer)
    if repeats == 1:
      x_BLD, routing = apply(x_BLD, inputs)
    else:
      # If the repetitions were unrolled, the compiler would all-gather the
      # weights of all layers before the first microbatch.
      fold = lambda x: x.reshape(repeats, -1, *x.shape[1:])
      x_BLD, routing = jax.lax.scan(apply, x_BLD, jax.tree.map(fold, inputs))
      routing = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), routing)
    if places_BM is not None and not self._last_layer_apart:
      x_BLD = gather_states(x_BLD, places_BM)
    if routing is not None:
      sums = (jnp.sum(x, axis=0) for x in (routing.visits_BX, routing.probs_BX))
      if segments is None and lengths_B is not None:
        sums = (x[:, 0] for x in sums)
      routing = moe.Routing(jnp.moveaxis(routing.expert_ids, 0, 2), *sums)
    return self.norm(x_BLD), routing

  @property
  def _last_layer_apart(self) -> bool:
    """Whether the last layer is computed outside the scan over other layers.

    The result is False if the scan is not fully unrolled, because taking the
    last layer out of the stack would then copy the weights of this layer. It is
    also False if the model has experts, because then the last layer must return
    the routing of all tokens.
    """
    config = self.config
    return (
      config.scan_unroll >= config.num_layers > 1 and not config.num_experts
    )

  def embed(self, tokens_BL: Array) -> Array:
    """Returns the input of the first layer [B, L, D]."""
    x_BLD = embedding.look_up(self.embedding[...], tokens_BL, self.mesh)
    x_BLD = x_BLD.astype(self.config.dtype)
    if self.config.scale_embedding:
      x_BLD = x_BLD * self.config.hidden_size**0.5
    return x_BLD


def gather_states(x_BLD: Array, places_BM: Array) -> Array:
  """Returns the states at the places [B, M, D]; 0 at places outside 0..L - 1.

  The places of a row must be distinct, so that the gradient needs no additions.
  """
  take = lambda x_LD, places_M: x_LD.at[places_M].get(
    mode='fill', fill_value=0, unique_indices=True
  )
  return jax.vmap(take)(x_BLD, places_BM)


_policies = jax.checkpoint_policies

# Ordered from the most memory to the least. 'dots' saves the products without
# batch dimensions, which are the products with weights (see `layers.Linear`).
# The products of attention have the batch dimensions rows and heads. 'all_dots'
# saves these products. 'dots' computes them again, because attention's logits
# grow with the square of the length. 'full' saves only the input of a layer.
POLICIES: Mapping[str, Callable[..., Any]] = {
  'none': _policies.everything_saveable,
  'all_dots': _policies.dots_saveable,
  'dots': _policies.dots_with_no_batch_dims_saveable,
  'full': _policies.nothing_saveable,
}


def rematerialised(
  layer: Callable[..., Any], name: str, *, unrolled: bool
) -> Callable[..., Any]:
  """Returns the layer, made to save only the results that a policy selects.

  Args:
    layer: function of one iteration of the scan over layers.
    name: a key of `POLICIES`: 'none' saves everything, 'all_dots' all matrix
      products, 'dots' products with weights, 'full' the layer's input only.
      Attention in tiles needs only the residuals that `blockwise` describes.
    unrolled: whether one iteration may have several layers. Then the compiler
      would notice that a result is computed twice, and would keep the first
      result in memory. `prevent_cse` prevents this. In different iterations,
      the compiler does not notice.
  """
  if name == 'none':
    return layer
  return jax.checkpoint(layer, policy=POLICIES[name], prevent_cse=unrolled)
