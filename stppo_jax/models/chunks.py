"""Chunks of tokens against the words of a vocabulary, on one device or many.

B rows, M tokens of each, C of them in a chunk, D width, V vocabulary, W words
of one device. Chunks are cut along M, so that rows stay whole and devices keep
their own. On a mesh the output matrix is gathered over `fsdp` once, before the
chunks, and its gradient, which grows in float32 as they go by, is scattered
once, after them. In between, devices of the axis `tensor` tell each other sums
over words, a number per token; scores stay where they are.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import math
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec as P
import jax.numpy as jnp

from stppo_jax.parallel import mesh as mesh_lib

Array = jax.Array
_FSDP, _TENSOR = mesh_lib.AXES[1:]


class Options(NamedTuple):
  """How scores are formed; static.

  Attributes:
    temperature: divides the scores.
    chunk: tokens of a row whose scores are held at once; 0 = all.
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

  def scores(self, hidden_BCD: Array, number: int = 0) -> Array:
    """[B, C, W] float32, with the matrix of that number."""
    matrix_WD = self.matrices[number]
    return logits(hidden_BCD, matrix_WD) / self.temperature

  def are(self, tokens_BC: Array) -> Array:
    """bool [B, C, W]: which word each token is."""
    count = self.matrices[0].shape[0]
    first = jax.lax.axis_index(self.axis) * count if self.axis else 0
    words_W = first + jnp.arange(count, dtype=tokens_BC.dtype)
    return tokens_BC[..., None] == words_W[None, None]

  def max(self, x_BCW: Array) -> Array:
    """[B, C, 1], over all words."""
    top_BC1 = jnp.max(x_BCW, axis=-1, keepdims=True)
    return jax.lax.pmax(top_BC1, self.axis) if self.axis else top_BC1

  def sum(self, *parts: Array) -> tuple[Array, ...]:
    """Of each [B, C, W] the sum [B, C] over all words."""
    return self._total(tuple(jnp.sum(x_BCW, axis=-1) for x_BCW in parts))

  def pull(
    self, of_scores_BCW: Array, hidden_BCD: Array
  ) -> tuple[Array, Array]:
    """The gradients of hidden states, and of the words' own matrix.

    Returns:
      [B, C, D] in the dtype of the hidden states; [W, D] float32.
    """
    dtype = hidden_BCD.dtype
    of_scores_BCW = (of_scores_BCW / self.temperature).astype(dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    of_hidden_BCD = product('bcw,wd->bcd', of_scores_BCW, self.matrices[0])
    of_matrix_WD = product('bcw,bcd->wd', of_scores_BCW, hidden_BCD)
    return self._total(of_hidden_BCD).astype(dtype), of_matrix_WD

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
    about: (words, chunk [B, C, ...] of each part) to arrays [B, C].
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
  pull: Callable[..., Array],
  matrices: Sequence[Array],
  parts: Sequence[Array],
) -> tuple[Array, Array]:
  """The gradients of the first part, hidden states, and of the first matrix.

  Args:
    options: see `Options`.
    pull: (words, chunk of each part) to the gradient of the scores [B, C, W].
    matrices, parts: as for `forward`.

  Returns:
    [B, M, D] and [V, D], in the dtypes of hidden states and matrix.
  """

  def local(matrices, parts):
    words = Words(matrices, options.temperature, layout.tensor)

    def step(sum_WD, chunk):
      hidden_BCD = chunk[0]
      of_hidden_BCD, of_matrix_WD = words.pull(pull(words, *chunk), hidden_BCD)
      return sum_WD + of_matrix_WD, (of_hidden_BCD,)

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
  """Scans `step` over chunks along axis 1; no loop for a single one.

  The last chunk is filled up with zeros: no token.
  """
  size = parts[0].shape[1]
  count = -(-size // chunk) if chunk else 1
  if count <= 1:
    return step(carry, parts)
  cut = lambda x_BM: jnp.moveaxis(
    jnp.pad(
      x_BM, [(0, 0), (0, count * chunk - size)] + [(0, 0)] * (x_BM.ndim - 2)
    ).reshape(x_BM.shape[0], count, chunk, *x_BM.shape[2:]),
    1,
    0,
  )
  carry, stacked = jax.lax.scan(step, carry, tuple(cut(x) for x in parts))
  whole = lambda x_nBC: jnp.moveaxis(x_nBC, 0, 1).reshape(
    x_nBC.shape[1], count * chunk, *x_nBC.shape[3:]
  )
  return carry, tuple(whole(x)[:, :size] for x in stacked)
