"""Routes each token to a few of many gated MLPs: a mixture of experts.

Shape letters: B rows, L tokens of a row, D width, X experts, E experts that a
token visits, U = B L E visits, F width of one expert's MLP. As in Qwen3-MoE:

    p = softmax(x router)                             over all experts, float32
    w_e = p_e, or p_e / sum p over visited experts    as the config says
    y = sum_e w_e down_e(silu(gate_e x) * up_e x)     over visited experts

Experts have no capacity limit, so no token is dropped. On TPU, a kernel
computes the gradient of the experts' matrices, see `ragged_dot`.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from stppo_jax.models import config as model_config
from stppo_jax.models import layers
from stppo_jax.parallel import activations
from stppo_jax.parallel import dispatch
from stppo_jax.parallel import mesh as mesh_lib

Array = jax.Array
# (rows, matrices, number of rows of each matrix) -> products, see `ragged_dot`.
Product = Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
  """Holds the experts that tokens visited, and sums for the load-balance loss.

  The fields describe one layer or a whole model. For a model the ids have an
  axis over layers, and the sums are over the layers too.

  Attributes:
    expert_ids: int32, the experts that each token visited, [B, L, E] or
      [B, L, layers, E].
    visits_BX: float32, for each row the number of visits of counted tokens to
      each expert; no gradient. [B, S, X] if each row has S separate sums.
    probs_BX: float32, the sums of the router's probabilities p of these tokens;
      differentiable.
  """

  expert_ids: Array
  visits_BX: Array
  probs_BX: Array


class MixtureOfExperts(nnx.Module):
  """Routes tokens to experts, in place of the gated MLP of a layer.

  Args:
    config: the model's config; its `moe` is a key of `IMPLEMENTATIONS`.
    mesh: mesh that activations are laid out on; None: one device.
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
    X, D, F = c.num_experts, c.hidden_size, c.moe_intermediate_size
    self.router = layers.Kernel(D, X, rngs=rngs)
    self.gate_proj = layers.Experts(X, D, F, rngs=rngs)
    self.up_proj = layers.Experts(X, D, F, rngs=rngs)
    self.down_proj = layers.Experts(X, F, D, rngs=rngs)

  def __call__(
    self,
    x_BLD: Array,
    *,
    expert_ids_BLE: Array | None = None,
    counted_BSL: Array | None = None,
  ) -> tuple[Array, Routing]:
    """Returns y for every token [B, L, D], and the routing.

    Args:
      x_BLD: hidden states.
      expert_ids_BLE: the experts to visit. The router's probabilities, with
        gradient, still weigh the experts. None, or a negative id at a token:
        the token visits the experts that the router ranks highest.
      counted_BSL: bool, the tokens that count in each of the S sums of a row
        in `Routing`; None: a row has one sum, in which all tokens count.
    """
    B, L, D = x_BLD.shape
    c = self.config
    probs_BLX = self._probabilities(x_BLD)
    ids_BLE = _highest(probs_BLX, c.num_experts_per_tok, self.mesh)
    if expert_ids_BLE is not None:
      free_BL1 = jnp.any(expert_ids_BLE < 0, axis=-1, keepdims=True)
      ids_BLE = jnp.where(free_BL1, ids_BLE, expert_ids_BLE)
    weights_BLE = jnp.take_along_axis(probs_BLX, ids_BLE, axis=-1)
    if c.norm_topk_prob:
      weights_BLE = weights_BLE / jnp.sum(weights_BLE, axis=-1, keepdims=True)
    experts = self.gate_proj, self.up_proj, self.down_proj
    kernels = tuple(x.matrices(x_BLD.dtype) for x in experts)
    y_BLD = IMPLEMENTATIONS[c.moe](
      x_BLD, ids_BLE, weights_BLE.astype(x_BLD.dtype), kernels, self.mesh
    )
    return y_BLD, _routing(ids_BLE, probs_BLX, counted_BSL)

  def _probabilities(self, x_BLD: Array) -> Array:
    """Returns p [B, L, X] in full float32, to keep the ranks of the experts."""
    logits_BLX = jnp.einsum(
      'bld,dx->blx',
      x_BLD.astype(jnp.float32),
      self.router.kernel[...].astype(jnp.float32),
      precision=jax.lax.Precision.HIGHEST,
    )
    return jax.nn.softmax(logits_BLX, axis=-1)


def _highest(probs_BLX: Array, number: int, mesh) -> Array:
  """Returns the ids of the most probable experts, the most probable first."""
  top = lambda probs_BLX: jax.lax.top_k(probs_BLX, number)[1]
  if mesh is None or mesh.size == 1:
    return top(probs_BLX)
  # Without `shard_map`, the compilers for CPU and GPU would gather the
  # probabilities of all rows on every device.
  rows = activations.fitting((activations.ROWS,), probs_BLX.shape, mesh)
  return jax.shard_map(top, mesh=mesh, in_specs=rows, out_specs=rows)(
    jax.lax.stop_gradient(probs_BLX)
  )


def load_balance(visits_X: Array, probs_X: Array, tokens: Array) -> Array:
  """Returns X Σ_x (visits_x / tokens) (probs_x / tokens).

  The loss is E if all experts have the same load. It is the load-balance loss
  of Switch Transformer (arXiv 2101.03961, equations 4 to 6) with E visits per
  token, as in `transformers`. Only `probs_X` carries a gradient, and the loss
  is linear in `probs_X`. So to split a minibatch, pass `visits_X` and `tokens`
  of the minibatch and `probs_X` of one microbatch, and add up the results.

  Args:
    visits_X, probs_X: see `Routing`; sums over layers and rows.
    tokens: number of tokens in the sums; a token counts once for each layer.
  """
  tokens = jnp.maximum(tokens, 1)
  return visits_X.size * jnp.sum(visits_X / tokens * (probs_X / tokens))


def dense(x_BLD, ids_BLE, weights_BLE, kernels, mesh) -> Array:
  """Returns y [B, L, D] by computing every expert for every token.

  The experts form one MLP of width X F, in which the experts that a token does
  not visit have weight 0. Tests compare `grouped` with this function, which is
  also the fastest on CPU: there, XLA's grouped products compute every expert.
  """
  gate, up, down = kernels
  X, D, F = gate[0].shape
  one_hot_BLEX = jax.nn.one_hot(ids_BLE, X, dtype=x_BLD.dtype)
  weights_BLX = jnp.einsum('ble,blex->blx', weights_BLE, one_hot_BLEX)
  # Products of two matrices are three times as fast on a CPU as products with a
  # third axis. F comes before X in the merged axis because a mesh shards F.
  flat = x_BLD.reshape(-1, D)
  wide = lambda kernel_XDF: kernel_XDF.transpose(1, 2, 0).reshape(D, F * X)

  def product(w_XDF, a_XDR=None, b_XRF=None):
    y = flat @ wide(w_XDF)
    if a_XDR is not None:
      low_NXR = jnp.einsum('nd,xdr->nxr', flat, a_XDR)
      y += jnp.einsum('nxr,xrf->nfx', low_NXR, b_XRF).reshape(y.shape)
    return y

  gated = jax.nn.silu(product(*gate)) * product(*up)
  gated_BLFX = activations.constrain(
    gated.reshape(*x_BLD.shape[:2], F, X) * weights_BLX[:, :, None],
    mesh,
    activations.ROWS,
    None,
    activations.TENSOR,
  )
  down_XFD, *adapter = down
  y = gated_BLFX.reshape(-1, F * X) @ down_XFD.transpose(1, 0, 2).reshape(-1, D)
  if adapter:
    low_BLXR = jnp.einsum('blfx,xfr->blxr', gated_BLFX, adapter[0])
    y += jnp.einsum('blxr,xrd->bld', low_BLXR, adapter[1]).reshape(y.shape)
  return y.reshape(x_BLD.shape)


def grouped(
  x_BLD, ids_BLE, weights_BLE, kernels, mesh, *, product: Product | None = None
) -> Array:
  """Returns y [B, L, D] by computing visited experts only.

  On a mesh every device sorts the tokens of its own rows by expert. The device
  has all experts, but of each expert only a slice along F. So no token moves to
  another device. The exception is a mesh with several devices along `expert`.
  These devices hold different experts, and each device all-gathers the tokens
  along `expert`, see `dispatch`.

  Args:
    x_BLD, ids_BLE, weights_BLE: hidden states, visited experts, their weights.
    kernels: the results of `layers.Experts.matrices` for gate, up and down.
    mesh: see `MixtureOfExperts`.
    product: function that multiplies sorted visits with the matrices of their
      experts by a kernel. None: `ragged_dot` on TPU, else `jax.lax.ragged_dot`.
  """
  if product is None and mesh_lib.platform(mesh) == 'tpu':
    product = ragged_dot
  local = functools.partial(_grouped, product or jax.lax.ragged_dot)
  if mesh is None or mesh.size == 1:
    return local(x_BLD, ids_BLE, weights_BLE, *kernels)
  rows, axis = activations.fitting(
    (activations.ROWS, activations.TENSOR),
    (x_BLD.shape[0], kernels[0][0].shape[2]),
    mesh,
  )
  # Each device computes the same slice of F for every expert that it holds. So
  # for any visited experts, its results are terms of a sum over `tensor`.
  apart = 'expert' if 'expert' in activations.names(rows) else None
  wide, narrow, whole = P(apart, None, axis), P(apart, axis), P(apart)
  ups = [(wide, whole, wide)[: len(x)] for x in kernels[:2]]
  downs = (narrow, narrow, whole)[: len(kernels[2])]
  specs = (P(rows), P(rows), P(rows), *ups, downs)
  on_mesh = functools.partial(jax.shard_map, mesh=mesh, out_specs=P(rows))
  total = lambda y_BLD: jax.lax.psum(y_BLD, axis) if axis else y_BLD
  if apart:
    compute = functools.partial(_by_expert, product or jax.lax.ragged_dot)
    local = functools.partial(
      dispatch.exchanged, compute, axis=apart, product=product
    )
  elif product is None:
    summed = on_mesh(lambda *args: total(local(*args)), in_specs=specs)
    return summed(x_BLD, ids_BLE, weights_BLE, *kernels)
  # The sum has a `shard_map` of its own, because a kernel does not declare over
  # which mesh axes its results differ. In the `shard_map` of the kernel, JAX
  # would therefore sum the equal gradients of all devices along `axis`.
  parts = jax.shard_map(
    lambda *args: local(*args)[None],
    mesh=mesh,
    in_specs=specs,
    out_specs=P(axis, rows),
    check_vma=False,
  )
  summed = on_mesh(lambda y_1BLD: total(y_1BLD[0]), in_specs=P(axis, rows))
  return summed(parts(x_BLD, ids_BLE, weights_BLE, *kernels))


def _grouped(product, x_BLD, ids_BLE, weights_BLE, *kernels) -> Array:
  """Returns y [B, L, D] of one device, from the experts that it holds.

  Each token is repeated for its E visits, and visits are sorted by expert. So a
  ragged product multiplies each run of rows with the matrix of one expert.
  """
  B, L, D = x_BLD.shape
  E = ids_BLE.shape[-1]
  visits_UD = jnp.broadcast_to(x_BLD[:, :, None], (B, L, E, D)).reshape(-1, D)
  y_UD = _by_expert(product, visits_UD, ids_BLE.reshape(-1), kernels)
  y_BLED = y_UD.reshape(B, L, E, D)
  return jnp.einsum('bled,ble->bld', y_BLED, weights_BLE)


def _by_expert(product, x_UD: Array, ids_U: Array, kernels) -> Array:
  """Returns each visit's result [U, D]; arbitrary for experts not held here."""
  gate, up, down = kernels
  num_experts = len(gate[0])
  # Shapes are static although the loads of experts vary: there are always U
  # visits, and `sizes_X`, which is data, says how many of them each expert has.
  # So no visit is dropped, and no expert's visits are padded to a capacity.
  order_U = jnp.argsort(ids_U, stable=True)
  place_U = jnp.argsort(order_U)  # the index of each visit in sorted order
  sizes_X = jnp.bincount(ids_U, length=num_experts).astype(jnp.int32)
  x_UD = dispatch.permuted(x_UD, order_U, place_U)

  def adapted(x_UK, w_XKN, a_XKR=None, b_XRN=None):
    y_UN = product(x_UK, w_XKN, sizes_X)
    if a_XKR is not None:
      low_UR = product(x_UK, a_XKR, sizes_X)
      y_UN += product(low_UR, b_XRN, sizes_X)
    return y_UN

  gated_UF = jax.nn.silu(adapted(x_UD, *gate)) * adapted(x_UD, *up)
  return dispatch.permuted(adapted(gated_UF, *down), place_U, order_U)


IMPLEMENTATIONS: Mapping[str, Callable[..., Array]] = {
  'dense': dense,
  'grouped': grouped,
}


def choose(name: str, *, platform: str, expert: int = 1) -> str:
  """Returns the key of `IMPLEMENTATIONS` that a config selects.

  Args:
    name: a key of `IMPLEMENTATIONS`, or 'auto' for the fastest one on the
      platform: 'dense' on a CPU, 'grouped' elsewhere.
    platform: 'cpu', 'gpu' or 'tpu'.
    expert: number of devices along the axis `expert`. If it is above 1, 'auto'
      is 'grouped', because 'dense' would gather all experts on each device.
  """
  if name != 'auto':
    return name
  return 'dense' if platform == 'cpu' and expert == 1 else 'grouped'


def _routing(
  ids_BLE: Array, probs_BLX: Array, counted_BSL: Array | None
) -> Routing:
  """Returns the routing of one layer; see `MixtureOfExperts.__call__`."""
  num_experts = probs_BLX.shape[-1]
  visits_BLX = jnp.sum(jax.nn.one_hot(ids_BLE, num_experts), axis=2)

  def total(x_BLX):
    if counted_BSL is None:
      return jnp.sum(x_BLX, axis=1)
    # Tokens in no sum are set to 0: padding may hold nan, and 0 * nan is nan.
    counts_BL1 = jnp.any(counted_BSL, axis=1)[..., None]
    return jnp.einsum(
      'bsl,blx->bsx',
      counted_BSL.astype(x_BLX.dtype),
      jnp.where(counts_BL1, x_BLX, 0.0),
      precision=jax.lax.Precision.HIGHEST,
    )

  return Routing(
    ids_BLE.astype(jnp.int32),
    jax.lax.stop_gradient(total(visits_BLX)),
    total(probs_BLX),
  )


# Rows of a tile of the kernel. With fewer rows, the kernel starts more often.
# With more rows, it masks more rows, because a tile is computed again for every
# matrix that has rows in the tile.
_ROWS = 256
# Bytes of a number -> the most columns of a tile. The kernel holds one tile of
# float32 sums and two tiles of results. All three must fit in 16 MiB.
_COLUMNS = {2: 1024, 4: 512}
_LANES = 128


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def ragged_dot(
  x_UK: Array, w_XKN: Array, sizes_X: Array, interpret: bool = False
) -> Array:
  """Returns `jax.lax.ragged_dot` [U, N]; a kernel computes the gradient of w.

  Args:
    x_UK: rows, sorted by matrix, in the matrices' dtype: bfloat16 or float32.
    w_XKN: matrices.
    sizes_X: int32, the number of rows of each matrix; their sum is U.
    interpret: whether to interpret the gradient's kernel; this needs no TPU.
  """
  del interpret  # only `_backward` uses `interpret`
  return jax.lax.ragged_dot(x_UK, w_XKN, sizes_X)


def _forward(x_UK, w_XKN, sizes_X, interpret):
  return ragged_dot(x_UK, w_XKN, sizes_X, interpret), (x_UK, w_XKN, sizes_X)


def _backward(interpret, saved, dy_UN):
  x_UK, w_XKN, sizes_X = saved
  product = lambda x_UK: jax.lax.ragged_dot(x_UK, w_XKN, sizes_X)
  (dx_UK,) = jax.linear_transpose(product, x_UK)(dy_UN)
  dw_XKN = _sums(x_UK, dy_UN, sizes_X, w_XKN.dtype, interpret)
  return dx_UK, dw_XKN, np.zeros(sizes_X.shape, jax.dtypes.float0)


ragged_dot.defvjp(_forward, _backward)


def _sums(x_UK, dy_UN, sizes_X, dtype, interpret: bool) -> Array:
  """Returns the gradient [X, K, N] of the matrices of `ragged_dot`."""
  # Imported here: the import takes a fifth of a second, and only TPUs need it.
  from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

  # The kernel needs whole tiles of rows. The rows of padding belong to no
  # matrix.
  widths = (0, -x_UK.shape[0] % _ROWS), (0, 0)
  x_UK, dy_UN = jnp.pad(x_UK, widths), jnp.pad(dy_UN, widths)
  most = _COLUMNS[dtype.itemsize]
  tiles = _ROWS, _tile(x_UK.shape[1], most), _tile(dy_UN.shape[1], most)
  return tgmm(x_UK.T, dy_UN, sizes_X, dtype, tiling=tiles, interpret=interpret)


def _tile(size: int, most: int) -> int:
  """Returns a tile's columns, for the fewest tiles of nearly equal size."""
  if size <= most:
    return size
  tiles = -(-size // most)
  return -(-size // (tiles * _LANES)) * _LANES
