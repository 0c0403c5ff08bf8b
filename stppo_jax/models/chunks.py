"""Applies the vocabulary head to chunks of tokens, on one device or many.

Shape letters: B rows, M tokens of a row, C tokens of a chunk on one device
(counted over all its rows), D width of the states, V vocabulary entries, W
vocabulary entries on one device.

The logits [B, M, V] would be by far the largest array of training, so they are
never formed as a whole. A scan goes through the chunks of tokens. For each
chunk it forms the logits [C, W], reduces them to a few numbers per token, and
drops them. The backward pass forms the logits again, see `vocabulary`.

Chunks are cut along M, so that each device keeps its own rows. On a mesh, the
output matrix is all-gathered over `fsdp` once, before the scan. Its gradient is
summed over the chunks in float32, and after the scan it is reduce-scattered
once, in the dtype of the matrix. Within a chunk, devices along the axis
`tensor` hold different vocabulary entries. These devices exchange sums over
their entries, but never logits: a few numbers per token in the forward pass,
and the gradient of the hidden states in the backward pass.
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from stppo_jax.parallel import activations
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import pieces

Array = jax.Array
_TENSOR, _WIDTH = mesh_lib.AXES[-1], mesh_lib.WEIGHT_AXES
# For a reduce-scatter, the compiler for TPU (libtpu 0.0.42) cuts the sum into
# equal blocks. If it finds no such blocks, as for the 151,936 = 128 x 1187
# vocabulary entries of Qwen, every device gets the whole sum, which takes twice
# the bytes. It finds blocks for every multiple of this number, so the entries
# are padded to a multiple.
_SCATTERED = 1024


class Options(NamedTuple):
  """Says how logits are formed; static under jit.

  Attributes:
    temperature: the number that divides the logits.
    chunk: the most tokens on a device whose logits are held at once; 0: all
      tokens. A chunk has at least one token of each row, so if the device has
      more rows than this number, the chunk has one token of each row.
    mesh: mesh that the arrays are laid out on; None: one device.
  """

  temperature: float
  chunk: int
  mesh: jax.sharding.Mesh | None


class VocabularyShard(NamedTuple):
  """Computes the logits of the vocabulary entries that this device holds.

  The methods `max`, `sums` and `chosen` reduce over all vocabulary entries, on
  all devices along `axis`.

  Attributes:
    matrices: one or several output matrices [W, D], in the dtype of the hidden
      states.
    temperature: the number that divides the logits.
    axis: the mesh axis over which the vocabulary is sharded; None: this device
      has all entries.
  """

  matrices: Sequence[Array]
  temperature: float
  axis: str | None

  def logits(self, hidden_CD: Array, number: int = 0) -> Array:
    """Returns float32 logits / temperature [C, W] by matrices[number]."""
    return logits(hidden_CD, self.matrices[number]) / self.temperature

  def max(self, x_CW: Array) -> Array:
    """Returns the maximum [C] of x over all vocabulary entries."""
    top_C = jnp.max(x_CW, axis=-1)
    return jax.lax.pmax(top_C, self.axis) if self.axis else top_C

  def sums(self, *arrays: Array) -> tuple[Array, ...]:
    """Returns the sums [C] of arrays [C, W] over all vocabulary entries."""
    return self._psum(tuple(jnp.sum(x_CW, axis=-1) for x_CW in arrays))

  def chosen(self, x_CW: Array, tokens_C: Array) -> Array:
    """Returns the values [C] of x at the vocabulary entry of each token."""
    places_C1 = self._places(tokens_C)[:, None]
    # In the sum over devices, only the device that holds the entry contributes
    # a number other than 0. (Selecting the entry by a mask over all entries
    # would read all logits once more.)
    x_C1 = jnp.take_along_axis(
      x_CW, places_C1, axis=1, mode='fill', fill_value=0
    )
    return self._psum(x_C1[:, 0])

  def pull_back(
    self,
    d_logits_CW: Array,
    d_chosen_C: Array,
    hidden_CD: Array,
    tokens_C: Array,
  ) -> tuple[Array, Array]:
    """Returns the gradients of the hidden states and of matrices[0].

    Args:
      d_logits_CW: gradient of the logits of this device's vocabulary entries.
        The entries for `tokens_C` are ignored; `d_chosen_C` replaces them.
      d_chosen_C: gradient of the logits of `tokens_C`.
      hidden_CD: the hidden states of the chunk.
      tokens_C: for each hidden state, the token that follows.

    Returns:
      The gradient of the hidden states [C, D], in the dtype of the hidden
      states, summed over all vocabulary entries; and the float32 gradient of
      this device's shard of the matrix [W, D], summed over the tokens of the
      chunk.
    """
    dtype = hidden_CD.dtype
    scaled = lambda x: (x / self.temperature).astype(dtype)
    places_C = self._places(tokens_C)
    d_logits_CW = (
      scaled(d_logits_CW)
      .at[jnp.arange(len(places_C)), places_C]
      .set(scaled(d_chosen_C), mode='drop', unique_indices=True)
    )
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    # A device has the gradient of the logits of its own entries only. So the
    # gradient of the hidden states is summed over devices. The gradient of the
    # matrix is complete, because no other device has these entries.
    d_hidden_CD = product(d_logits_CW, self.matrices[0])
    d_matrix_WD = product(d_logits_CW.T, hidden_CD)
    return self._psum(d_hidden_CD).astype(dtype), d_matrix_WD

  def _places(self, tokens_C: Array) -> Array:
    """Returns each token's index among this device's vocabulary entries.

    If another device has the entry of a token, the index is W.
    """
    count = self.matrices[0].shape[0]
    if self.axis:
      tokens_C = tokens_C - jax.lax.axis_index(self.axis) * count
    here_C = (tokens_C >= 0) & (tokens_C < count)
    return jnp.where(here_C, tokens_C, count)

  def _psum(self, x):
    """Returns x summed over the devices that hold parts of the vocabulary."""
    return jax.lax.psum(x, self.axis) if self.axis else x


def logits(hidden: Array, output_VD: Array | pieces.Pieces) -> Array:
  """Returns float32 logits [..., V] of the token after each hidden state.

  For decoding, the matrix may be given in pieces; then `hidden` is [S, D].
  """
  if isinstance(output_VD, tuple):
    return pieces.logits(hidden, output_VD)
  return jnp.einsum(
    '...d,vd->...v',
    hidden,
    output_VD.astype(hidden.dtype),
    preferred_element_type=jnp.float32,
  )


def forward(
  options: Options,
  per_token: Callable[..., tuple[Array, ...]],
  matrices: Sequence[Array],
  inputs: Sequence[Array],
) -> tuple[Array, ...]:
  """Returns the numbers that a function computes from each token's logits.

  Args:
    options: see `Options`.
    per_token: function that takes a `VocabularyShard` and a chunk [C, ...] of
      each input, and returns arrays [C].
    matrices: output matrices [V, D].
    inputs: arrays [B, M, ...]; the first one is the hidden states.

  Returns:
    The results of `per_token` for all tokens, as arrays [B, M].
  """

  def local(matrices, inputs):
    shard = VocabularyShard(matrices, options.temperature, layout.tensor)
    step = lambda _, chunk: (None, per_token(shard, *chunk))
    return _over_chunks(step, None, inputs, options.chunk)[1]

  layout = _Layout.of(options.mesh, matrices, inputs)
  matrices = tuple(x.astype(inputs[0].dtype) for x in matrices)
  return layout.spread(local, layout.rows)(matrices, tuple(inputs))


def backward(
  options: Options,
  pull_back: Callable[..., tuple[Array, Array]],
  matrices: Sequence[Array],
  inputs: Sequence[Array],
) -> tuple[Array, Array]:
  """Returns the gradients of the hidden states and of the first output matrix.

  Args:
    options: see `Options`.
    pull_back: function that takes a `VocabularyShard` and a chunk [C, ...] of
      each input, and returns the result of `VocabularyShard.pull_back`.
    matrices, inputs: see `forward`.

  Returns:
    The gradient of the hidden states [B, M, D], in the dtype of the hidden
    states; and the gradient of matrices[0] [V, D], in the dtype of this matrix.
  """

  def local(matrices, inputs):
    shard = VocabularyShard(matrices, options.temperature, layout.tensor)

    def step(sum_WD, chunk):
      d_hidden_CD, d_matrix_WD = pull_back(shard, *chunk)
      return sum_WD + d_matrix_WD, (d_hidden_CD,)

    zeros_WD = jnp.zeros(matrices[0].shape, jnp.float32)
    d_matrix_WD, (d_hidden_BMD,) = _over_chunks(
      step, zeros_WD, inputs, options.chunk
    )
    return d_hidden_BMD, layout.sum_rows(d_matrix_WD.astype(dtype))

  layout = _Layout.of(options.mesh, matrices, inputs)
  dtype = matrices[0].dtype
  matrices = tuple(x.astype(inputs[0].dtype) for x in matrices)
  d_hidden_BMD, d_matrix_VD = layout.spread(
    local, (layout.rows, layout.scattered)
  )(matrices, tuple(inputs))
  # Some versions of the compiler for TPU fail when they move the sum over
  # devices out of a loop over microbatches. The barrier prevents this move.
  return d_hidden_BMD, jax.lax.optimization_barrier(d_matrix_VD)


class _Layout(NamedTuple):
  """Names the mesh axes that arrays are sharded along.

  If the mesh axes of a dimension do not divide its size, the dimension is not
  sharded, see `activations.fitting`.

  Attributes:
    mesh: the mesh; None: one device.
    batch: mesh axes along which rows are sharded.
    tensor: the mesh axis along which vocabulary entries are sharded, or None.
    width: mesh axes along which the columns of a matrix's gradient are
      scattered.
  """

  mesh: jax.sharding.Mesh | None
  batch: tuple[str, ...]
  tensor: str | None
  width: tuple[str, ...]

  @classmethod
  def of(cls, mesh, matrices, inputs) -> '_Layout':
    """Returns the layout of output matrices and per-token inputs on a mesh.

    See `forward` for `matrices` and `inputs`.
    """
    if mesh is None or mesh.size == 1:
      return cls(None, (), None, ())
    batch, tensor, width = activations.fitting(
      (activations.ROWS, _TENSOR, _WIDTH),
      (inputs[0].shape[0], *matrices[0].shape),
      mesh,
    )
    rows = activations.names(batch)
    return cls(mesh, rows, tensor, activations.names(width) if rows else ())

  @property
  def rows(self) -> P:
    """The partition spec of arrays [B, ...]."""
    return P(self.batch)

  @property
  def scattered(self) -> P:
    """The partition spec of the gradient of a matrix [V, D]."""
    return P(self.tensor, self.width)

  def spread(self, local, out_specs):
    """Returns a function that runs `local` on each device's own shards.

    Args:
      local: function of (matrices, inputs) of one device.
      out_specs: the partition specs of the results.
    """
    if self.mesh is None:
      return local
    return jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=(P(self.tensor), self.rows),
      out_specs=out_specs,
      check_vma=False,
    )

  def sum_rows(self, x_WD: Array) -> Array:
    """Returns the sum of x over the devices that hold different rows.

    Along the mesh axes in `width` the sum is scattered, so that each device
    keeps only its own columns. Along the other axes every device gets the whole
    sum.
    """
    if self.width:
      entries = len(x_WD)
      if mesh_lib.platform(self.mesh) == 'tpu':
        x_WD = jnp.pad(x_WD, ((0, -entries % _SCATTERED), (0, 0)))
      x_WD = jax.lax.psum_scatter(
        x_WD, self.width, scatter_dimension=1, tiled=True
      )[:entries]
    axes = tuple(axis for axis in self.batch if axis not in self.width)
    return jax.lax.psum(x_WD, axes) if axes else x_WD


def _over_chunks(step, carry, inputs, chunk: int):
  """Scans `step` over chunks [C, ...] of inputs [B, M, ...].

  All chunks have the same size, the smallest that does not increase the number
  of chunks. Zeros fill up the last chunk, and the results for these zeros are
  cut off again. A single chunk needs no loop.

  Args:
    step: function of (carry, chunk of each input) that returns the new carry
      and arrays [C, ...].
    carry: the first carry.
    inputs: arrays [B, M, ...].
    chunk: see `Options`.

  Returns:
    The last carry, and the results for all tokens [B, M, ...].
  """
  rows, size = inputs[0].shape[:2]
  count = 1
  if chunk and size:
    # `chunk` limits memory, so it counts the tokens of all rows together.
    count = math.ceil(size / max(chunk // rows, 1))
  length = math.ceil(size / count)

  def split(x_BM):
    """Returns an array [B, M, ...] as [chunks, C, ...], filled up with 0."""
    missing = count * length - size
    padding = [(0, 0), (0, missing)] + [(0, 0)] * (x_BM.ndim - 2)
    x = jnp.pad(x_BM, padding).reshape(rows, count, length, *x_BM.shape[2:])
    return jnp.moveaxis(x, 1, 0).reshape(count, rows * length, *x_BM.shape[2:])

  def join(x):
    """Returns results [chunks, C, ...] as [B, M, ...].

    The results for the zeros that fill up the last chunk are cut off.
    """
    x = jnp.moveaxis(x.reshape(count, rows, length, *x.shape[2:]), 0, 1)
    return x.reshape(rows, count * length, *x.shape[3:])[:, :size]

  chunks = tuple(split(x) for x in inputs)
  # Hidden states of zero are safe: their logits are finite, and in a backward
  # pass the gradients that belong to them are zero too.
  if count == 1:
    carry, results = step(carry, tuple(x[0] for x in chunks))
    return carry, tuple(join(x[None]) for x in results)
  carry, stacked = jax.lax.scan(step, carry, chunks)
  return carry, tuple(join(x) for x in stacked)
