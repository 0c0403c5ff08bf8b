"""A mixture of experts: each token visits a few of many gated MLPs.

B rows, L tokens of a row, M = B L, D width, X experts, E experts that a token
visits, S = M E visits, F width of one expert. As in Qwen3-MoE:

    p = softmax(x router)                                  over all X, float32
    w_e = p_e, divided by the sum over the visited ones if the config says so
    y = sum_e w_e down_e(silu(gate_e x) * up_e x)          over the visited ones

No expert has a capacity: no token is dropped.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from stppo_jax.models import config as model_config
from stppo_jax.models import layers
from stppo_jax.parallel import activations

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
  """Where the tokens went, and what the load-balance loss is made of.

  Of one layer, or of a whole model: then N layers have an axis in the ids, and
  the sums are over them too.

  Attributes:
    expert_ids: int32, the experts that each token visited, [B, L, E] or
      [B, L, N, E].
    visits_BX: float32, the row's visits of each expert, a sum over the tokens
      that count; no gradient.
    probs_BX: float32, the sum of p over the same tokens; differentiable.
  """

  expert_ids: Array
  visits_BX: Array
  probs_BX: Array


class Kernel(nnx.Module):
  """The router [D, X], or a matrix of every expert, stacked: [X, in, out].

  No `layers.Linear`: adapters have no part in it.
  """

  def __init__(self, *shape: int, rngs: nnx.Rngs):
    self.kernel = nnx.Param(layers.INITIALIZER(rngs.params(), shape))


class MixtureOfExperts(nnx.Module):
  """Router and experts in the place of the gated MLP.

  Args:
    config: `moe` there names the implementation, a key of `IMPLEMENTATIONS` or
      'auto', see `implementation`.
    mesh: that activations are laid out on; None leaves them alone.
    rngs: source of the initial weights.
  """

  def __init__(
    self,
    config: model_config.ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
    *,
    rngs: nnx.Rngs,
  ):
    c = config
    self.config = c
    self.mesh = mesh
    self.implementation = implementation(c.moe)
    X, D, F = c.num_experts, c.hidden_size, c.moe_intermediate_size
    self.router = Kernel(D, X, rngs=rngs)
    self.gate_proj = Kernel(X, D, F, rngs=rngs)
    self.up_proj = Kernel(X, D, F, rngs=rngs)
    self.down_proj = Kernel(X, F, D, rngs=rngs)

  def __call__(
    self,
    x_BLD: Array,
    expert_ids_BLE: Array | None = None,
    mask_BL: Array | None = None,
  ) -> tuple[Array, Routing]:
    """The mixture [B, L, D] at every token, and where the tokens went.

    Args:
      x_BLD: the tokens.
      expert_ids_BLE: experts to visit instead of those the router ranks
        highest; its probabilities still weigh them, with gradient. A negative
        id leaves its token to the router.
      mask_BL: tokens that count in the sums of `Routing`; None: all.
    """
    B, L, D = x_BLD.shape
    c = self.config
    probs_BLX = self._probabilities(x_BLD)
    _, ids_BLE = jax.lax.top_k(probs_BLX, c.num_experts_per_tok)
    if expert_ids_BLE is not None:
      free_BL1 = jnp.any(expert_ids_BLE < 0, axis=-1, keepdims=True)
      ids_BLE = jnp.where(free_BL1, ids_BLE, expert_ids_BLE)
    weights_BLE = jnp.take_along_axis(probs_BLX, ids_BLE, axis=-1)
    if c.norm_topk_prob:
      weights_BLE = weights_BLE / jnp.sum(weights_BLE, axis=-1, keepdims=True)
    kernels = tuple(
      module.kernel[...].astype(x_BLD.dtype)
      for module in (self.gate_proj, self.up_proj, self.down_proj)
    )
    y_BLD = self.implementation(
      x_BLD, ids_BLE, weights_BLE.astype(x_BLD.dtype), kernels, self.mesh
    )
    return y_BLD, _routing(ids_BLE, probs_BLX, mask_BL)

  def _probabilities(self, x_BLD: Array) -> Array:
    """p [B, L, X]; in full float32, for a tie decides where a token goes."""
    logits_BLX = jnp.einsum(
      'bld,dx->blx',
      x_BLD.astype(jnp.float32),
      self.router.kernel[...].astype(jnp.float32),
      precision=jax.lax.Precision.HIGHEST,
    )
    return jax.nn.softmax(logits_BLX, axis=-1)


def load_balance(visits_X: Array, probs_X: Array, tokens: Array) -> Array:
  """X sum_x (visits_x / tokens) (probs_x / tokens): E when all are alike.

  The load-balance loss of Switch Transformer (arXiv 2101.03961, equations 4 to
  6) over E visits, as in `transformers`. Only `probs_X` carries a gradient. It
  is linear in them: where a minibatch is cut, pass the visits and the number
  of tokens of all of it and the probabilities of a part, and add up the parts.

  Args:
    visits_X, probs_X: see `Routing`; sums over layers and rows.
    tokens: how many the sums are over, each counted once in every layer.
  """
  tokens = jnp.maximum(tokens, 1)
  return visits_X.size * jnp.sum(visits_X / tokens * (probs_X / tokens))


def dense(x_BLD, ids_BLE, weights_BLE, kernels, mesh) -> Array:
  """Every expert on every token: one MLP, X F wide, mostly weighted by 0.

  The oracle, and the fastest on CPU, where grouped products are computed in
  full.
  """
  gate_XDF, up_XDF, down_XFD = kernels
  X, D, F = gate_XDF.shape
  one_hot_BLEX = jax.nn.one_hot(ids_BLE, X, dtype=x_BLD.dtype)
  weights_BLX = jnp.einsum('ble,blex->blx', weights_BLE, one_hot_BLEX)
  # As matrices: on CPU three times as fast as products with three axes. X last,
  # for a mesh cuts F.
  x_MD = x_BLD.reshape(-1, D)
  wide = lambda kernel_XDF: kernel_XDF.transpose(1, 2, 0).reshape(D, F * X)
  gated = jax.nn.silu(x_MD @ wide(gate_XDF)) * (x_MD @ wide(up_XDF))
  gated_BLFX = activations.constrain(
    gated.reshape(*x_BLD.shape[:2], F, X) * weights_BLX[:, :, None],
    mesh,
    activations.ROWS,
    None,
    activations.TENSOR,
  )
  down = down_XFD.transpose(1, 0, 2).reshape(F * X, D)
  return (gated_BLFX.reshape(-1, F * X) @ down).reshape(x_BLD.shape)


def grouped(x_BLD, ids_BLE, weights_BLE, kernels, mesh) -> Array:
  """Only the visited experts: visits sorted by expert, products by group.

  On a mesh every device sorts the tokens of its own rows, for a slice of F of
  all experts: the tokens do not travel.
  """
  rows = x_BLD.shape[0]
  if mesh is None or mesh.size == 1:
    return _grouped(x_BLD, ids_BLE, weights_BLE, *kernels)
  whole = rows % activations.extent(mesh, activations.ROWS) != 0
  row = P(None if whole else activations.ROWS)
  width = kernels[0].shape[2] % mesh.shape[activations.TENSOR] == 0
  axis = activations.TENSOR if width else None

  def local(*args):
    y_BLD = _grouped(*args)
    return jax.lax.psum(y_BLD, axis) if axis else y_BLD

  wide, narrow = P(None, None, axis), P(None, axis)
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(row, row, row, wide, wide, narrow),
    out_specs=row,
  )(x_BLD, ids_BLE, weights_BLE, *kernels)


def _grouped(x_BLD, ids_BLE, weights_BLE, gate_XDF, up_XDF, down_XFD):
  B, L, D = x_BLD.shape
  num_experts, E = gate_XDF.shape[0], ids_BLE.shape[-1]
  ids_S = ids_BLE.reshape(-1)
  order_S = jnp.argsort(ids_S, stable=True)
  place_S = jnp.argsort(order_S)  # of each visit in the sorted order
  sizes_X = jnp.bincount(ids_S, length=num_experts).astype(jnp.int32)
  visits = jnp.broadcast_to(x_BLD[:, :, None], (B, L, E, D)).reshape(-1, D)
  x_SD = _permuted(visits, order_S, place_S)
  gated_SF = jax.nn.silu(jax.lax.ragged_dot(x_SD, gate_XDF, sizes_X))
  gated_SF = gated_SF * jax.lax.ragged_dot(x_SD, up_XDF, sizes_X)
  y_SD = jax.lax.ragged_dot(gated_SF, down_XFD, sizes_X)
  y_BLED = _permuted(y_SD, place_S, order_S).reshape(B, L, E, D)
  return jnp.einsum('bled,ble->bld', y_BLED, weights_BLE)


@jax.custom_vjp
def _permuted(x_SD: Array, order_S: Array, inverse_S: Array) -> Array:
  """x[order]. Its gradient is g[inverse], and not the scatter of a take."""
  del inverse_S  # of the gradient
  return x_SD[order_S]


def _permuted_forward(x_SD, order_S, inverse_S):
  return x_SD[order_S], inverse_S


def _permuted_backward(inverse_S, gradient_SD):
  return gradient_SD[inverse_S], None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)

Implementation = Callable[..., Array]
IMPLEMENTATIONS: Mapping[str, Implementation] = {
  'dense': dense,
  'grouped': grouped,
}


def implementation(name: str) -> Implementation:
  """By name; 'auto': grouped where there are grouped products, dense on CPU.

  Raises:
    ValueError: no such implementation.
  """
  if name == 'auto':
    name = 'dense' if jax.default_backend() == 'cpu' else 'grouped'
  if name not in IMPLEMENTATIONS:
    raise ValueError(
      f'moe={name!r}; choices: auto, ' + ', '.join(IMPLEMENTATIONS)
    )
  return IMPLEMENTATIONS[name]


def _routing(
  ids_BLE: Array, probs_BLX: Array, mask_BL: Array | None
) -> Routing:
  num_experts = probs_BLX.shape[-1]
  visits_BLX = jnp.sum(jax.nn.one_hot(ids_BLE, num_experts), axis=2)
  if mask_BL is not None:
    visits_BLX, probs_BLX = (
      jnp.where(mask_BL[..., None], x, 0.0) for x in (visits_BLX, probs_BLX)
    )
  return Routing(
    ids_BLE.astype(jnp.int32),
    jax.lax.stop_gradient(jnp.sum(visits_BLX, axis=1)),
    jnp.sum(probs_BLX, axis=1),
  )
