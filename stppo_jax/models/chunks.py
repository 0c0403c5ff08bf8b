"""Chunks of tokens against the words of a vocabulary, on one device or many.

B rows, M tokens of each, C of them in a chunk, N = B C tokens of a chunk on one
device, D width, V vocabulary, W words of one device. Chunks are cut along M, so
that devices keep their own rows. On a mesh the output matrix is gathered over
`fsdp` once, before the chunks, and its gradient, which grows in float32 as they
go by, is scattered once, after them. In between, devices of the axis `tensor`
tell each other sums over words, a number per token; scores stay where they are.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from stppo_jax.parallel import mesh as mesh_lib

Array = jax.Array
_FSDP, _TENSOR = mesh_lib.AXES[1:]


class Options(NamedTuple):
  """How scores are formed; static.

  Attributes:
    temperature: divides the scores.
    chunk: tokens of a device whose scores are held at once, one of each of its
      rows at the least; 0 = all.
    mesh: that the arrays are laid out on; None: one device.
  """

  temperature: float
  chunk: int
  mesh: jax.sharding.Mesh | None


class Words(NamedTuple):
  """The words of this device, and what it takes to hear of the others.

  Attributes:
    matrices: [W, D], one or several, in the dtype of the hidden states.
    temperature: divides the scores.
    axis: of the mesh, along which words are spread; None: all are here.
  """

  matrices: Sequence[Array]
  temperature: float
  axis: str | None

  def scores(self, hidden_ND: Array, number: int = 0) -> Array:
    """[N, W] float32, with the matrix of that number."""
    return logits(hidden_ND, self.matrices[number]) / self.temperature

  def top(self, x_NW: Array) -> Array:
    """[N], the largest of all words."""
    top_N = jnp.max(x_NW, axis=-1)
    return jax.lax.pmax(top_N, self.axis) if self.axis else top_N

  def sums(self, *parts: Array) -> tuple[Array, ...]:
    """Of each [N, W] the sum [N] over all words."""
    return self._total(tuple(jnp.sum(x_NW, axis=-1) for x_NW in parts))

  def chosen(self, x_NW: Array, tokens_N: Array) -> Array:
    """[N]: x of each token's word."""
    places_N1 = self._places(tokens_N)[:, None]
    # A select over all words would read all scores once more.
    found_N1 = jnp.take_along_axis(
      x_NW, places_N1, axis=1, mode='fill', fill_value=0
    )
    return self._total(found_N1[:, 0])

  def pull(
    self,
    of_scores_NW: Array,
    of_chosen_N: Array,
    hidden_ND: Array,
    tokens_N: Array,
  ) -> tuple[Array, Array]:
    """From the gradient of scores to those of states and of the own matrix.

    Args:
      of_scores_NW: right but at each token's word.
      of_chosen_N: there.
      hidden_ND, tokens_N: of the chunk.

    Returns:
      [N, D] in the dtype of the hidden states; [W, D] float32.
    """
    dtype = hidden_ND.dtype
    scaled = lambda x: (x / self.temperature).astype(dtype)
    places_N = self._places(tokens_N)
    of_scores_NW = (
      scaled(of_scores_NW)
      .at[jnp.arange(len(places_N)), places_N]
      .set(scaled(of_chosen_N), mode='drop', unique_indices=True)
    )
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    of_hidden_ND = product(of_scores_NW, self.matrices[0])
    of_matrix_WD = product(of_scores_NW.T, hidden_ND)
    return self._total(of_hidden_ND).astype(dtype), of_matrix_WD

  def _places(self, tokens_N: Array) -> Array:
    """Where each token is among the words here; W: it is not."""
    count = self.matrices[0].shape[0]
    if self.axis:
      tokens_N = tokens_N - jax.lax.axis_index(self.axis) * count
    here_N = (tokens_N >= 0) & (tokens_N < count)
    return jnp.where(here_N, tokens_N, count)

  def _total(self, x):
    return jax.lax.psum(x, self.axis) if self.axis else x


def logits(hidden: Array, output_VD: Array) -> Array:
  """[..., V] float32 scores of the token that follows each hidden state."""
  return jnp.einsum(
    '...d,vd->...v',
    hidden,
    output_VD.astype(hidden.dtype),
    preferred_element_type=jnp.float32,
  )


def forward(
  options: Options,
  about: Callable[..., tuple[Array, ...]],
  matrices: Sequence[Array],
  parts: Sequence[Array],
) -> tuple[Array, ...]:
  """Some numbers about each token.

  Args:
    options: see `Options`.
    about: (words, chunk [N, ...] of each part) to arrays [N].
    matrices: [V, D] each.
    parts: [B, M, ...] each; the first are the hidden states.

  Returns:
    What `about` returns, [B, M] each.
  """

  def local(matrices, parts):
    words = Words(matrices, options.temperature, layout.tensor)
    step = lambda _, chunk: (None, about(words, *chunk))
    return _over_chunks(step, None, parts, options.chunk)[1]

  layout = _Layout.of(options.mesh, matrices, parts)
  matrices = tuple(x.astype(parts[0].dtype) for x in matrices)
  return layout.spread(local, layout.rows)(matrices, tuple(parts))


def backward(
  options: Options,
  pull: Callable[..., tuple[Array, Array]],
  matrices: Sequence[Array],
  parts: Sequence[Array],
) -> tuple[Array, Array]:
  """The gradients of the first part, hidden states, and of the first matrix.

  Args:
    options: see `Options`.
    pull: (words, chunk of each part) to gradients of hidden states and matrix,
      as `Words.pull` gives them.
    matrices, parts: as for `forward`.

  Returns:
    [B, M, D] and [V, D], in the dtypes of hidden states and matrix.
  """

  def local(matrices, parts):
    words = Words(matrices, options.temperature, layout.tensor)

    def step(sum_WD, chunk):
      of_hidden_ND, of_matrix_WD = pull(words, *chunk)
      return sum_WD + of_matrix_WD, (of_hidden_ND,)

    zeros_WD = jnp.zeros(matrices[0].shape, jnp.float32)
    of_matrix_WD, (of_hidden_BMD,) = _over_chunks(
      step, zeros_WD, parts, options.chunk
    )
    return of_hidden_BMD, layout.total(of_matrix_WD)

  layout = _Layout.of(options.mesh, matrices, parts)
  dtype = matrices[0].dtype
  matrices = tuple(x.astype(parts[0].dtype) for x in matrices)
  of_hidden_BMD, of_matrix_VD = layout.spread(
    local, (layout.rows, layout.scattered)
  )(matrices, tuple(parts))
  return of_hidden_BMD, of_matrix_VD.astype(dtype)


class _Layout(NamedTuple):
  """What lies where; an axis that a size does not divide by is left out.

  Attributes:
    mesh: None: one device.
    batch: axes along which rows are spread.
    tensor: the axis along which words are spread, or None.
    fsdp: the axis along which the gradient of a matrix is, or None.
  """

  mesh: jax.sharding.Mesh | None
  batch: tuple[str, ...]
  tensor: str | None
  fsdp: str | None

  @classmethod
  def of(cls, mesh, matrices, parts) -> '_Layout':
    """For those arrays."""
    if mesh is None or mesh.size == 1:
      return cls(None, (), None, None)
    num_words, width = matrices[0].shape
    fits = lambda size, *axes: (
      size % math.prod(mesh.shape[axis] for axis in axes) == 0
    )
    batch = mesh_lib.BATCH_AXES
    batch = batch if fits(parts[0].shape[0], *batch) else ()
    return cls(
      mesh,
      batch,
      _TENSOR if fits(num_words, _TENSOR) else None,
      _FSDP if batch and fits(width, _FSDP) else None,
    )

  @property
  def rows(self) -> P:
    """Of [B, ...]."""
    return P(self.batch)

  @property
  def scattered(self) -> P:
    """Of the gradient [V, D]."""
    return P(self.tensor, self.fsdp)

  def spread(self, local, out_specs):
    """`local(matrices, parts)` on every device."""
    if self.mesh is None:
      return local
    return jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=(P(self.tensor), self.rows),
      out_specs=out_specs,
      check_vma=False,
    )

  def total(self, x_WD: Array) -> Array:
    """The sum over devices with other rows; each keeps its columns."""
    if self.fsdp is not None:
      x_WD = jax.lax.psum_scatter(
        x_WD, self.fsdp, scatter_dimension=1, tiled=True
      )
    axes = tuple(axis for axis in self.batch if axis != self.fsdp)
    return jax.lax.psum(x_WD, axes) if axes else x_WD


def _over_chunks(step, carry, parts, chunk: int):
  """Scans `step` over chunks [N, ...] of parts [B, M, ...].

  No loop for a single one. All have one size, the smallest that does not make
  them more; the last is filled up with zeros: no token.

  Returns:
    The last carry, and what `step` gave about tokens, [B, M, ...].
  """
  rows, size = parts[0].shape[:2]
  count = 1
  if chunk and size:
    count = math.ceil(size / max(chunk // rows, 1))
  length = math.ceil(size / count)

  def cut(x_BM):
    """[n, N, ...]"""
    missing = count * length - size
    padding = [(0, 0), (0, missing)] + [(0, 0)] * (x_BM.ndim - 2)
    x_BnC = jnp.pad(x_BM, padding).reshape(rows, count, length, *x_BM.shape[2:])
    return jnp.moveaxis(x_BnC, 1, 0).reshape(
      count, rows * length, *x_BM.shape[2:]
    )

  def whole(x_nN):
    """[B, M, ...]"""
    x_nBC = x_nN.reshape(count, rows, length, *x_nN.shape[2:])
    x_Bm = jnp.moveaxis(x_nBC, 0, 1).reshape(
      rows, count * length, *x_nN.shape[2:]
    )
    return x_Bm[:, :size]

  cuts = tuple(cut(x) for x in parts)
  if count == 1:
    carry, found = step(carry, tuple(x[0] for x in cuts))
    return carry, tuple(whole(x[None]) for x in found)
  carry, stacked = jax.lax.scan(step, carry, cuts)
  return carry, tuple(whole(x) for x in stacked)
