"""Products of sorted rows and matrices, with gradients by a kernel for TPU.

U rows, X matrices with K rows and N columns each. The rows of the first matrix
come first, then those of the second, and so on:

    y_u = x_u w_x(u)        dx_u = dy_u w_x(u)^T        dw_x = sum_u x_u^T dy_u

The sum is over the rows u of matrix x. The compiler for TPU has kernels for the
first two. The third it computes as a product of all rows for every matrix, with
X masked copies of the rows, so here a kernel computes it that visits each row
once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

# Rows of a tile of the kernel. With fewer it starts more often; with more it
# masks more rows, because a tile is computed again for every matrix in it.
_ROWS = 256
# Columns of a tile, by the bytes of a number: the kernel holds a tile of a
# float32 sum and two of the result. They are to fit in 16 MiB.
_COLUMNS = {2: 1024, 4: 512}
_LANES = 128


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def dot(
  x_UK: Array, w_XKN: Array, sizes_X: Array, interpret: bool = False
) -> Array:
  """Returns y [U, N], as `jax.lax.ragged_dot` does.

  Args:
    x_UK: rows, of the dtype of the matrices: bfloat16 or float32.
    w_XKN: matrices.
    sizes_X: int32, the number of rows of each matrix; their sum is U.
    interpret: whether to run the kernel's program without a TPU.
  """
  del interpret  # only the gradient needs it
  return jax.lax.ragged_dot(x_UK, w_XKN, sizes_X)


def _forward(x_UK, w_XKN, sizes_X, interpret):
  return dot(x_UK, w_XKN, sizes_X, interpret), (x_UK, w_XKN, sizes_X)


def _backward(interpret, saved, dy_UN):
  x_UK, w_XKN, sizes_X = saved
  product = lambda x_UK: jax.lax.ragged_dot(x_UK, w_XKN, sizes_X)
  (dx_UK,) = jax.linear_transpose(product, x_UK)(dy_UN)
  dw_XKN = _sums(x_UK, dy_UN, sizes_X, w_XKN.dtype, interpret)
  return dx_UK, dw_XKN, np.zeros(sizes_X.shape, jax.dtypes.float0)


dot.defvjp(_forward, _backward)


def _sums(x_UK, dy_UN, sizes_X, dtype, interpret: bool) -> Array:
  """Returns dw [X, K, N]."""
  # Imported here because it takes a fifth of a second and only a TPU needs it.
  from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

  # The kernel needs whole tiles of rows. Those that are added are of no matrix.
  widths = (0, -x_UK.shape[0] % _ROWS), (0, 0)
  x_UK, dy_UN = jnp.pad(x_UK, widths), jnp.pad(dy_UN, widths)
  most = _COLUMNS[dtype.itemsize]
  tiles = _ROWS, _tile(x_UK.shape[1], most), _tile(dy_UN.shape[1], most)
  return tgmm(x_UK.T, dy_UN, sizes_X, dtype, tiling=tiles, interpret=interpret)


def _tile(size: int, most: int) -> int:
  """Returns the columns of a tile, if all tiles are as equal as they can be."""
  if size <= most:
    return size
  tiles = -(-size // most)
  return -(-size // (tiles * _LANES)) * _LANES
