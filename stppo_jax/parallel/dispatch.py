"""Computes tokens' visits on the devices that hold the visited experts.

n tokens of a device, N of all devices along `expert`, D width, E visits of a
token, x experts of a device, R rows of a block.

A device gathers the tokens of all devices along `expert`, computes the visits
to its own experts, and the sums of a token's visits are scattered back:

    [n, D]  -- all-gather -->  [N, D]  -- own visits -->  [N, D]
            -- reduce-scatter -->  [n, D]

What is sent depends neither on the loads of experts nor on a capacity. With
fewer devices than visits of a token it is not more than an exchange of visits
would send: nearly every device has an expert of a token.

How many visits are a device's own is data. They are computed in blocks of R,
and the number of blocks is data too. So no visit is dropped, and a block has
room for some more than an equal load.
"""

from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Tree = Any
# (rows [R, D], the expert of each of them or x, weights of experts) -> [R, D].
Rows = Callable[[Array, Array, Tree], Array]
# (rows, matrices, rows of each matrix) -> products, see `moe.ragged_dot`.
Product = Callable[..., Any]

# Rows of a block for each visit of a device if loads are equal.
_ROOM = 1.5
# Tokens whose visits one product with a matrix adds up.
_TILE = 256
_LANES = 128
# Added to a token's number and searched for among the sorted tokens of visits,
# they give the place of its first visit, and the place behind its last one.
_ENDS = np.arange(2)[:, None]


class _Visits(NamedTuple):
  """The visits to a device's own experts, in the order of tokens.

  Attributes:
    tokens: the token of each visit; N behind the last visit.
    slots: which of its E visits it is.
    experts: the expert; x behind the last visit.
    number: how many there are.
  """

  tokens: Array
  slots: Array
  experts: Array
  number: Array


class _Sums(NamedTuple):
  """How the rows of tokens are added up.

  Attributes:
    tokens, rows, visits: N, R and E.
    product: see `exchanged`.
  """

  tokens: int
  rows: int
  visits: int
  product: Product | None


def exchanged(
  compute: Rows,
  x_BLD: Array,
  ids_BLE: Array,
  weights_BLE: Array,
  *experts: tuple[Array, ...],
  axis: str,
  product: Product | None,
) -> Array:
  """Returns the weighted sum of each token's visits, [B, L, D].

  It runs on every device, in a `shard_map` over all axes.

  Args:
    compute: the experts of a device.
    x_BLD: the tokens of this device, n in all.
    ids_BLE: the experts that each token visits.
    weights_BLE: the weight of each visit.
    *experts: the matrices of this device's experts [x, ...], those of adapters
      behind each.
    axis: the axis along which devices have different experts.
    product: multiplies sorted rows with matrices. Where its gradient by the
      matrices is a kernel, sums over visits are computed with this gradient;
      None: they are computed by gathers.
  """

  def gather(a_BL):
    a_n = a_BL.reshape(-1, a_BL.shape[-1])
    return jax.lax.all_gather(a_n, axis, tiled=True)

  held, num_devices = len(experts[0][0]), jax.lax.axis_size(axis)
  x_ND, weights_NE = gather(x_BLD), gather(weights_BLE)
  ids_NE = gather(ids_BLE) - jax.lax.axis_index(axis) * held
  N, E = ids_NE.shape
  rows = math.ceil(_ROOM * N * E / num_devices)
  visits = _own(ids_NE, held, rows)
  y_ND = _in_blocks(
    functools.partial(_block, compute, _Sums(N, rows, E, product)),
    (x_ND, weights_NE, experts),
    visits,
    -(-visits.number // rows),
  )
  return jax.lax.psum_scatter(y_ND, axis, tiled=True).reshape(x_BLD.shape)


def _own(ids_NE: Array, held: int, rows: int) -> _Visits:
  """Returns the visits to experts 0..held - 1, filled up to whole blocks."""
  N, E = ids_NE.shape
  ids_U = ids_NE.reshape(-1)
  own_U = (ids_U >= 0) & (ids_U < held)
  numbers_U = jnp.where(own_U, jnp.arange(N * E), N * E)
  # Sorted because gathers and scatters of single numbers are slow on TPUs.
  numbers, experts = jax.lax.sort(
    (numbers_U, jnp.where(own_U, ids_U, held)), num_keys=1
  )
  widths = (0, -(N * E) % rows)
  numbers = jnp.pad(numbers, widths, constant_values=N * E)
  experts = jnp.pad(experts, widths, constant_values=held)
  return _Visits(numbers // E, numbers % E, experts, jnp.sum(own_U))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_blocks(
  block: Callable[..., Array], inputs: Tree, visits: _Visits, count: Array
) -> Array:
  """Returns the sum of `block(n, inputs, visits)` over n < count.

  JAX does not differentiate a loop whose number of rounds is data. Nothing of a
  block is kept for the backward pass, which computes it again.
  """
  add = lambda n, y_ND: y_ND + block(n, inputs, visits)
  return jax.lax.fori_loop(0, count, add, jnp.zeros_like(inputs[0]))


def _in_blocks_forward(block, inputs, visits, count):
  return _in_blocks(block, inputs, visits, count), (inputs, visits, count)


def _in_blocks_backward(block, residuals, gradient_ND):
  inputs, visits, count = residuals

  def add(n, sums):
    _, pull = jax.vjp(lambda inputs: block(n, inputs, visits), inputs)
    return jax.tree.map(jnp.add, sums, pull(gradient_ND)[0])

  zeros = jax.tree.map(jnp.zeros_like, inputs)
  nothing = jax.tree.map(
    lambda x: np.zeros(x.shape, jax.dtypes.float0), (visits, count)
  )
  return jax.lax.fori_loop(0, count, add, zeros), *nothing


_in_blocks.defvjp(_in_blocks_forward, _in_blocks_backward)


def _block(
  compute: Rows, sums: _Sums, n: Array, inputs: Tree, visits: _Visits
) -> Array:
  """Returns what the n-th block of visits adds to each token, [N, D]."""
  x_ND, weights_NE, experts = inputs
  tokens_R, slots_R, experts_R = (
    jax.lax.dynamic_slice_in_dim(a, n * sums.rows, sums.rows)
    for a in visits[:3]
  )
  # A kernel needs rows that fill whole lanes.
  weights_NE = jnp.pad(weights_NE, ((0, 0), (0, -weights_NE.shape[1] % _LANES)))
  lanes_1E = jnp.arange(weights_NE.shape[1])[None]
  weights_RE: Any = _taken(sums, weights_NE, tokens_R)
  weights_RE = jnp.where(slots_R[:, None] == lanes_1E, weights_RE, 0)
  y_RD = compute(_taken(sums, x_ND, tokens_R), experts_R, experts)
  # Products do not write the rows that belong to no expert.
  y_RD = jnp.where(tokens_R[:, None] < sums.tokens, y_RD, 0)
  return _added(
    sums, y_RD * jnp.sum(weights_RE, axis=1, keepdims=True), tokens_R
  )


# Each of the two is the gradient of the other. JAX would derive a scatter-add,
# which is slow and, on a GPU, adds in any order.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _taken(sums: _Sums, x_ND: Array, tokens_R: Array) -> Array:
  """Returns x[tokens]; 0 for token N."""
  del sums  # only the gradient needs it
  return x_ND.at[tokens_R].get(
    mode='fill', fill_value=0, indices_are_sorted=True
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _added(sums: _Sums, y_RD: Array, tokens_R: Array) -> Array:
  """Returns the sum of the rows of each token, [N, D]; tokens are sorted."""
  N, product = sums.tokens, sums.product
  if product is None:
    first_N, end_N = jnp.searchsorted(tokens_R, jnp.arange(N)[None] + _ENDS)
    total_ND = jnp.zeros((N, y_RD.shape[1]), jnp.float32)
    for n in range(sums.visits):
      place_N = jnp.where(first_N + n < end_N, first_N + n, sums.rows)
      total_ND += y_RD.at[place_N].get(mode='fill', fill_value=0)
    return total_ND.astype(y_RD.dtype)
  # A product with a matrix of zeros and ones adds up the rows of each token of
  # a tile. It is computed as the gradient by the matrix of `product`, which has
  # a kernel for it.
  tiles = -(-N // _TILE)
  tile_R = jnp.where(tokens_R < N, tokens_R // _TILE, tiles)
  ones_RT = jax.nn.one_hot(tokens_R % _TILE, _TILE, dtype=y_RD.dtype)
  sizes = jnp.sum(tile_R[:, None] == jnp.arange(tiles)[None], 0, jnp.int32)
  matrices = jnp.zeros((tiles, _TILE, y_RD.shape[1]), y_RD.dtype)
  _, pull = jax.vjp(lambda w: product(ones_RT, w, sizes), matrices)
  return pull(y_RD)[0].reshape(tiles * _TILE, -1)[:N]


_taken.defvjp(
  lambda sums, x_ND, tokens_R: (_taken(sums, x_ND, tokens_R), tokens_R),
  lambda sums, tokens_R, dx_RD: (_added(sums, dx_RD, tokens_R), None),
)
_added.defvjp(
  lambda sums, y_RD, tokens_R: (_added(sums, y_RD, tokens_R), tokens_R),
  lambda sums, tokens_R, dy_ND: (_taken(sums, dy_ND, tokens_R), None),
)


# JAX does not know that `order` is a permutation: its derivative of x[order]
# would be a scatter-add, which is slow and, on a GPU, adds in any order. With
# the inverse permutation at hand the gradient is another gather.
@jax.custom_vjp
def permuted(x_UD: Array, order_U: Array, inverse_U: Array) -> Array:
  """Returns x[order]; its gradient is g[inverse]."""
  del inverse_U  # only the gradient needs it
  return x_UD[order_U]


permuted.defvjp(
  lambda x_UD, order_U, inverse_U: (x_UD[order_U], inverse_U),
  lambda inverse_U, gradient_UD: (gradient_UD[inverse_U], None, None),
)
