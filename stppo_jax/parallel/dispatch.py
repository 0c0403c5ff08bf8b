"""Computes a mixture of experts whose experts are on different devices.

A token is routed to E experts; each of them is one *visit* of the token. Shape
letters: n tokens of a device, N tokens of all devices along the mesh axis
`expert`, D width, E visits of a token, U = N E visits, x experts of a device,
R visits of a block.

Each device all-gathers the tokens along `expert` and computes the visits to its
own experts. A reduce-scatter then sums the visits of each token and returns the
sum to the token's device:

    [n, D]  -- all-gather -->  [N, D]  -- own visits -->  [N, D]
            -- reduce-scatter -->  [n, D]

The amount of data sent depends neither on the loads of experts nor on a
capacity. If there are fewer devices than visits of a token, an exchange of
single visits would not send less, because nearly every device holds an expert
that the token visits.

The number of visits to a device's own experts is known only at run time. The
device computes its visits in blocks of R, in a loop with as many blocks as it
needs, so no visit is dropped. R is somewhat larger than the number of
visits that a device gets under equal loads.
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
# A function of R visits that returns their results [R, D]. The arguments are
# the hidden states of the visits' tokens [R, D], the visits' experts [R] (x for
# padding), and the matrices of the experts of this device.
Rows = Callable[[Array, Array, Tree], Array]
# A function that returns the product of each row with the row's matrix. The
# arguments are rows, matrices, and the number of rows of each matrix, see
# `moe.ragged_dot`.
Product = Callable[..., Any]

# R divided by the number of visits that a device gets under equal loads.
_ROOM = 1.5
# The number of tokens whose visits one matrix product adds up, see `_added`.
_TILE = 256
_LANES = 128
# For a token t, t + _ENDS is t and t + 1. In the sorted tokens of all visits,
# the visits of t begin at the first place of t, and end at the first place of
# t + 1.
_ENDS = np.arange(2)[:, None]


class _Visits(NamedTuple):
  """The visits to a device's own experts, sorted by token and padded.

  Attributes:
    tokens: the index of each visit's token; N for padding.
    slots: the index of each visit among the E visits of its token.
    experts: the index of each visit's expert on this device; x for padding.
    number: the number of visits without padding.
  """

  tokens: Array
  slots: Array
  experts: Array
  number: Array


class _Sums(NamedTuple):
  """Describes how `_added` sums the visits of each token.

  Attributes:
    tokens: N, the number of tokens.
    rows: R, the number of visits of a block.
    visits: E, the number of visits of a token.
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

  Every device calls this function inside a `shard_map` over all mesh axes.

  Args:
    compute: the function that computes the results of a block of visits.
    x_BLD: the hidden states of this device's tokens, in B rows of L; n = B L.
    ids_BLE: the experts that each token visits, numbered over all devices.
    weights_BLE: the weight of each visit.
    *experts: for each projection, the matrices [x, ...] of this device's
      experts and, if there are adapters, the adapters' matrices.
    axis: the mesh axis along which devices hold different experts.
    product: a function that multiplies rows with matrices. The kernel that
      computes the gradient of these matrices also sums the visits of a token.
      None: visits are summed with gathers.
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
  """Returns the visits to this device's experts, padded to whole blocks.

  Args:
    ids_NE: the experts that tokens visit; this device has the experts 0 to
      held - 1.
    held: the number of experts of this device.
    rows: the number of visits of a block.
  """
  N, E = ids_NE.shape
  ids_U = ids_NE.reshape(-1)
  own_U = (ids_U >= 0) & (ids_U < held)
  numbers_U = jnp.where(own_U, jnp.arange(N * E), N * E)
  # A sort moves the visits to this device's experts to the front. Gathers or
  # scatters of single numbers would be slow on TPUs.
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

  JAX cannot differentiate a loop whose number of iterations is known only at
  run time, so the gradient is defined here. The forward pass keeps no results
  of a block, and the backward pass computes each block again.
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
  """Returns the weighted sum of each token's visits in block n, [N, D]."""
  x_ND, weights_NE, experts = inputs
  tokens_R, slots_R, experts_R = (
    jax.lax.dynamic_slice_in_dim(a, n * sums.rows, sums.rows)
    for a in visits[:3]
  )
  # The kernel that sums visits, here for the gradient of the weights, needs
  # rows whose width fills whole lanes.
  weights_NE = jnp.pad(weights_NE, ((0, 0), (0, -weights_NE.shape[1] % _LANES)))
  lanes_1E = jnp.arange(weights_NE.shape[1])[None]
  weights_RE: Any = _taken(sums, weights_NE, tokens_R)
  weights_RE = jnp.where(slots_R[:, None] == lanes_1E, weights_RE, 0)
  y_RD = compute(_taken(sums, x_ND, tokens_R), experts_R, experts)
  # `compute` leaves the results of padding unwritten, so they are set to 0.
  y_RD = jnp.where(tokens_R[:, None] < sums.tokens, y_RD, 0)
  return _added(
    sums, y_RD * jnp.sum(weights_RE, axis=1, keepdims=True), tokens_R
  )


# `_taken` and `_added` are the gradients of each other. JAX would derive a
# scatter-add from `_taken`, which is slow and, on a GPU, adds in any order.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _taken(sums: _Sums, x_ND: Array, tokens_R: Array) -> Array:
  """Returns x[tokens]; zeros for token N, which is padding."""
  del sums  # only the gradient uses `sums`
  return x_ND.at[tokens_R].get(
    mode='fill', fill_value=0, indices_are_sorted=True
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _added(sums: _Sums, y_RD: Array, tokens_R: Array) -> Array:
  """Returns for each token the sum of its rows in y, [N, D].

  `tokens_R`, the tokens of the rows, are sorted.
  """
  N, product = sums.tokens, sums.product
  if product is None:
    first_N, end_N = jnp.searchsorted(tokens_R, jnp.arange(N)[None] + _ENDS)
    total_ND = jnp.zeros((N, y_RD.shape[1]), jnp.float32)
    for n in range(sums.visits):
      place_N = jnp.where(first_N + n < end_N, first_N + n, sums.rows)
      total_ND += y_RD.at[place_N].get(mode='fill', fill_value=0)
    return total_ND.astype(y_RD.dtype)
  # For each tile of tokens, the product of a matrix of zeros and ones with the
  # rows adds up the rows of each token. The gradient of the matrices of
  # `product` is such a product, and a kernel computes it.
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
# the inverse permutation, the gradient is another gather.
@jax.custom_vjp
def permuted(x_UD: Array, order_U: Array, inverse_U: Array) -> Array:
  """Returns x[order]; a gradient g of the result becomes g[inverse]."""
  del inverse_U  # only the gradient uses `inverse_U`
  return x_UD[order_U]


permuted.defvjp(
  lambda x_UD, order_U, inverse_U: (x_UD[order_U], inverse_U),
  lambda inverse_U, gradient_UD: (gradient_UD[inverse_U], None, None),
)
