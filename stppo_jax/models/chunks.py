"""Computes the vocabulary head in chunks of tokens, on one device or many.

B rows, M tokens of each, C tokens of a chunk on one device (of all its rows
together), D width, V vocabulary, W vocabulary entries that one device holds.

Logits [B, M, V] are the largest array of training by far, so they are never
formed. A scan takes one chunk of tokens after the other: it forms the chunk's
logits [C, W], reduces them to a few numbers per token, and drops them. The
backward pass forms them again (`vocabulary`).

Chunks are cut along M, so that devices keep their own rows. On a mesh the
output matrix is gathered over `fsdp` once, before the scan, and its gradient,
which is summed in float32 over the chunks, is scattered once, after it, in the
dtype of the matrix. Within a chunk, devices along the axis `tensor` hold
different vocabulary entries; they exchange sums over the entries, a number per
token, and never logits.
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

Array = jax.Array
_TENSOR, _WIDTH = mesh_lib.AXES[-1], mesh_lib.WEIGHT_AXES
# To scatter a sum, the compiler for TPU (libtpu 0.0.42) cuts it into equal
# blocks. Where it finds none, as for the 151,936 = 128 x 1187 entries of Qwen,
# every device gets the whole sum, which takes twice the bytes. It finds blocks
# for multiples of this number, whatever the other factor.
_SCATTERED = 1024


class Options(NamedTuple):
  """Says how logits are formed; static under jit.

  Attributes:
    temperature: divides the logits.
    chunk: tokens of a device whose logits are held at once, at least one of
      each of its rows; 0: all.
    mesh: mesh that the arrays are laid out on; None: one device.
  """

  temperature: float
  chunk: int
  mesh: jax.sharding.Mesh | None


class VocabularyShard(NamedTuple):
  """Computes logits of this device's entries of the vocabulary.

  Its reductions are over all entries, on all devices.

  Attributes:
    matrices: one or several output matrices [W, D], in the dtype of the hidden
      states.
    temperature: divides the logits.
    axis: the mesh axis over which the vocabulary is sharded; None: this device
      has all entries.
  """

  matrices: Sequence[Array]
  temperature: float
  axis: str | None

  def logits(self, hidden_CD: Array, number: int = 0) -> Array:
    """Returns logits / temperature [C, W], float32, by the numbered matrix."""
    return logits(hidden_CD, self.matrices[number]) / self.temperature

  def max(self, x_CW: Array) -> Array:
    """Returns the largest number of each token over all entries [C]."""
    top_C = jnp.max(x_CW, axis=-1)
    return jax.lax.pmax(top_C, self.axis) if self.axis else top_C

  def sums(self, *arrays: Array) -> tuple[Array, ...]:
    """Returns the sums over all entries [C] of arrays [C, W]."""
    return self._psum(tuple(jnp.sum(x_CW, axis=-1) for x_CW in arrays))

  def chosen(self, x_CW: Array, tokens_C: Array) -> Array:
    """Returns x at each token's own entry [C]."""
    places_C1 = self._places(tokens_C)[:, None]
    # Only the device that holds the entry contributes a number that is not 0.
    # (A select over all entries would read all logits once more.)
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
    """Returns the gradients of hidden states and of this device's matrix.

    Args:
      d_logits_CW: gradient of the logits, correct except at each token's own
        entry.
      d_chosen_C: gradient of the logit at each token's own entry.
      hidden_CD, tokens_C: hidden states and tokens of the chunk.

    Returns:
      The gradient of the hidden states [C, D] in their dtype, summed over all
      entries; that of the matrix [W, D], float32, over this chunk.
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
    # A device has the gradient of its own entries only, so that of the hidden
    # states is summed over the devices. That of the matrix is complete: no
    # other device has these entries.
    d_hidden_CD = product(d_logits_CW, self.matrices[0])
    d_matrix_WD = product(d_logits_CW.T, hidden_CD)
    return self._psum(d_hidden_CD).astype(dtype), d_matrix_WD

  def _places(self, tokens_C: Array) -> Array:
    """Returns the index of each token's entry here; W for entries elsewhere."""
    count = self.matrices[0].shape[0]
    if self.axis:
      tokens_C = tokens_C - jax.lax.axis_index(self.axis) * count
    here_C = (tokens_C >= 0) & (tokens_C < count)
    return jnp.where(here_C, tokens_C, count)

  def _psum(self, x):
    """Returns the sum over the devices that share the vocabulary."""
    return jax.lax.psum(x, self.axis) if self.axis else x


def logits(hidden: Array, output_VD: Array) -> Array:
  """Returns logits [..., V], float32, of the token after each hidden state."""
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
    per_token: function of (vocabulary shard, a chunk [C, ...] of each input)
      to arrays [C].
    matrices: output matrices [V, D].
    inputs: arrays [B, M, ...], the first of them the hidden states.

  Returns:
    The results of `per_token`, for all tokens [B, M].
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
  """Returns the gradients of the hidden states and of the first matrix.

  Args:
    options: see `Options`.
    pull_back: function of (vocabulary shard, a chunk of each input) to the
      gradients of hidden states and matrix, see `VocabularyShard.pull_back`.
    matrices, inputs: the arguments of `forward`.

  Returns:
    [B, M, D] and [V, D], in the dtypes of hidden states and matrix.
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
  # devices out of a loop over microbatches. The barrier prevents that.
  return d_hidden_BMD, jax.lax.optimization_barrier(d_matrix_VD)


class _Layout(NamedTuple):
  """Names the mesh axes that arrays are sharded along.

  An axis that does not divide its dimension is left out.

  Attributes:
    mesh: the mesh; None: one device.
    batch: axes along which rows are sharded.
    tensor: the axis along which vocabulary entries are sharded, or None.
    width: axes along which a matrix's gradient is scattered.
  """

  mesh: jax.sharding.Mesh | None
  batch: tuple[str, ...]
  tensor: str | None
  width: tuple[str, ...]

  @classmethod
  def of(cls, mesh, matrices, inputs) -> '_Layout':
    """Returns the layout of these arrays on a mesh."""
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
    """The layout of arrays [B, ...]."""
    return P(self.batch)

  @property
  def scattered(self) -> P:
    """The layout of the matrix's gradient [V, D]."""
    return P(self.tensor, self.width)

  def spread(self, local, out_specs):
    """Returns `local(matrices, inputs)` as a function that all devices run."""
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
    """Returns the sum over devices with other rows; each keeps its columns.

    Over `width` the sum is scattered; over the other axes every device gets all
    of it.
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

  All chunks have one size, the smallest that keeps their number. The last is
  filled up with zeros, and their results are cut off again. A single chunk
  needs no loop.

  Returns:
    The last carry, and the results for all tokens [B, M, ...].
  """
  rows, size = inputs[0].shape[:2]
  count = 1
  if chunk and size:
    # `chunk` counts tokens of all rows together, since it bounds memory.
    count = math.ceil(size / max(chunk // rows, 1))
  length = math.ceil(size / count)

  def split(x_BM):
    """Returns an array [B, M, ...] as [chunks, C, ...]."""
    missing = count * length - size
    padding = [(0, 0), (0, missing)] + [(0, 0)] * (x_BM.ndim - 2)
    x = jnp.pad(x_BM, padding).reshape(rows, count, length, *x_BM.shape[2:])
    return jnp.moveaxis(x, 1, 0).reshape(count, rows * length, *x_BM.shape[2:])

  def join(x):
    """Returns an array [chunks, C, ...] as [B, M, ...], without the filler."""
    x = jnp.moveaxis(x.reshape(count, rows, length, *x.shape[2:]), 0, 1)
    return x.reshape(rows, count * length, *x.shape[3:])[:, :size]

  chunks = tuple(split(x) for x in inputs)
  # Zeros are safe filler: their logits are finite, and in a backward pass the
  # gradients of their results are zeros, too.
  if count == 1:
    carry, results = step(carry, tuple(x[0] for x in chunks))
    return carry, tuple(join(x[None]) for x in results)
  carry, stacked = jax.lax.scan(step, carry, chunks)
  return carry, tuple(join(x) for x in stacked)
