"""Exact dense search: finds the passages with the largest inner products.

The vectors of the corpus are divided among the devices. Each device goes over
its vectors in tiles and keeps the best passages so far, so no array ever has a
product for every passage.

N passages, Q queries, D width, P passages that are found, T rows of a tile, C
tiles of a device (of all devices outside `shard_map`).
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from stppo_jax import types

Array = jax.Array
Encode = Callable[[Sequence[str]], np.ndarray]

DTYPES = {
  'float32': np.dtype(np.float32),
  'bfloat16': np.dtype(ml_dtypes.bfloat16),
}
# Numpy's file format has no bfloat16, so its bits are stored as integers.
_STORED: Mapping[str, np.dtype[Any]] = {
  **DTYPES,
  'bfloat16': np.dtype(np.uint16),
}
_VECTORS = 'vectors.npy'
_TILE = 4096  # rows of a tile
_ENCODED_AT_ONCE = 2048  # passages whose vectors are in memory before a write


class DenseIndex:
  """Searches vectors of passages with the vectors of queries."""

  def __init__(
    self,
    vectors_ND: np.ndarray,
    passages: Sequence[types.Passage],
    encode: Encode,
    *,
    query_prefix: str = '',
    devices: Sequence[Any] | None = None,
    tile: int = _TILE,
  ):
    """Copies the vectors to the devices.

    Args:
      vectors_ND: a vector for each passage, float32 or bfloat16.
      passages: the N passages; they are read when they are found.
      encode: returns the vectors of Q texts, [Q, D].
      query_prefix: written in front of every query, as the encoder expects it.
      devices: the devices to use; None = all of this process.
      tile: the number of rows whose products are computed at once.

    Raises:
      ValueError: if the numbers of vectors and of passages differ.
    """
    if len(vectors_ND) != len(passages):
      raise ValueError(
        f'{len(vectors_ND)} vectors for {len(passages)} passages'
      )
    self._passages = passages
    self._encode = encode
    self._query_prefix = query_prefix
    devices = list(devices or jax.local_devices())
    mesh = jax.sharding.Mesh(np.array(devices), ('rows',))
    self._tiles_CTD = _tiles(vectors_ND, mesh, tile)
    self._search = jax.jit(
      functools.partial(_search, mesh=mesh, num_rows=len(passages)),
      static_argnames='topk',
    )

  def __len__(self) -> int:
    return len(self._passages)

  def search(
    self, queries: Sequence[str], topk: int
  ) -> list[list[types.Passage]]:
    """Returns the passages with the largest products, ties in corpus order."""
    if not queries:
      return []
    queries_QD = self._encode([self._query_prefix + q for q in queries])
    scores_QP, rows_QP = self.nearest(queries_QD, topk)
    return [
      [
        dataclasses.replace(self._passages[n], score=float(score))
        for score, n in zip(scores, rows)
      ]
      for scores, rows in zip(scores_QP, rows_QP)
    ]

  def nearest(
    self, queries_QD: np.ndarray, topk: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the largest products, [Q, P] float32, and their rows, [Q, P].

    Args:
      queries_QD: the vectors of the queries.
      topk: the most rows per query; P is the less of it and N.
    """
    num_queries, topk = len(queries_QD), min(topk, len(self))
    # Sizes are rounded up to powers of two, so that few programs are compiled.
    height = 1 << (num_queries - 1).bit_length()
    padded_QD = np.zeros((height, queries_QD.shape[1]), np.float32)
    padded_QD[:num_queries] = queries_QD
    scores_QP, rows_QP = self._search(
      padded_QD, self._tiles_CTD, topk=1 << (topk - 1).bit_length()
    )
    return (
      np.asarray(scores_QP)[:num_queries, :topk],
      np.asarray(rows_QP)[:num_queries, :topk],
    )


def write_vectors(
  folder: str | os.PathLike[str],
  passages: Sequence[types.Passage],
  encode: Encode,
  *,
  size: int,
  dtype: str,
  passage_prefix: str = '',
) -> None:
  """Writes the vector of each passage's title and text to a folder.

  Args:
    folder: an existing folder.
    passages: the passages.
    encode: returns the vectors of texts.
    size: the width D of the vectors.
    dtype: a key of `DTYPES`.
    passage_prefix: written in front of every passage.
  """
  stored = _STORED[dtype]
  vectors_ND = np.lib.format.open_memmap(
    pathlib.Path(folder) / _VECTORS,
    mode='w+',
    dtype=stored,
    shape=(len(passages), size),
  )
  for begin in range(0, len(passages), _ENCODED_AT_ONCE):
    some = passages[begin : begin + _ENCODED_AT_ONCE]
    texts = [f'{passage_prefix}{p.title}\n{p.text}' for p in some]
    vectors = np.asarray(encode(texts), DTYPES[dtype])
    vectors_ND[begin : begin + len(some)] = vectors.view(stored)
  vectors_ND.flush()


def read_vectors(
  folder: str | os.PathLike[str], dtype: str, *, size: int
) -> np.ndarray:
  """Returns [N, D], the vectors that `write_vectors` wrote, memory-mapped.

  Args:
    folder: the folder.
    dtype: a key of `DTYPES`.
    size: the width D that the vectors must have.

  Raises:
    ValueError: if the file is missing or damaged; the message is one line.
  """
  path = pathlib.Path(folder) / _VECTORS
  if dtype not in DTYPES:
    raise ValueError(f'{path}: dtype {dtype!r}: one of {", ".join(DTYPES)}')
  try:
    vectors_ND = np.load(path, mmap_mode='r', allow_pickle=False)
  except (OSError, ValueError, EOFError) as error:
    raise ValueError(f'{path}: damaged vectors: {error}') from error
  stored = _STORED[dtype]
  if (vectors_ND.dtype, vectors_ND.shape[1:]) != (stored, (size,)):
    raise ValueError(
      f'{path}: damaged vectors: {vectors_ND.dtype} of shape '
      f'{vectors_ND.shape}, not {stored} of shape (passages, {size})'
    )
  return vectors_ND.view(DTYPES[dtype])


def _tiles(vectors_ND: np.ndarray, mesh: jax.sharding.Mesh, tile: int) -> Array:
  """Returns [C, T, D], the vectors in tiles, divided among the devices.

  Missing rows of the last tiles are 0. Each device reads its own rows only.
  """
  num_rows, size = vectors_ND.shape
  per_device = -(-num_rows // mesh.size)
  tile = max(min(tile, per_device), 1)
  num_tiles = mesh.size * -(-per_device // tile)

  def read(place: Any) -> np.ndarray:
    begin, end, _ = place[0].indices(num_tiles)
    block = np.zeros(((end - begin) * tile, size), vectors_ND.dtype)
    rows = vectors_ND[begin * tile : end * tile]
    block[: len(rows)] = rows
    return block.reshape(end - begin, tile, size)

  sharding = jax.sharding.NamedSharding(
    mesh, jax.sharding.PartitionSpec('rows')
  )
  return jax.make_array_from_callback((num_tiles, tile, size), sharding, read)


def _search(
  queries_QD: Array,
  tiles_CTD: Array,
  *,
  mesh: jax.sharding.Mesh,
  num_rows: int,
  topk: int,
) -> tuple[Array, Array]:
  """Returns the largest products and their rows, [Q, topk] each.

  If there are fewer rows than `topk`, the last products are -inf.
  """
  num_queries, tile = len(queries_QD), tiles_CTD.shape[1]
  spec = jax.sharding.PartitionSpec

  def on_device(queries_QD: Array, tiles_CTD: Array) -> tuple[Array, Array]:
    first = jax.lax.axis_index('rows') * (tiles_CTD.shape[0] * tile)

    def step(best, numbered):
      number, tile_TD = numbered
      scores_QT = jnp.einsum(
        'qd,td->qt',
        queries_QD.astype(tile_TD.dtype),
        tile_TD,
        preferred_element_type=jnp.float32,
        # Accelerators would round float32 vectors at the default precision.
        precision=jax.lax.Precision.HIGHEST,
      )
      rows_T = first + number * tile + jnp.arange(tile)
      scores_QT = jnp.where(rows_T[None] < num_rows, scores_QT, -jnp.inf)
      rows_QT = jnp.broadcast_to(rows_T[None], scores_QT.shape)
      # `top_k` takes the first of equal products, so the best so far, which are
      # from earlier rows, stand in front.
      return _best(
        jnp.concatenate([best[0], scores_QT], axis=1),
        jnp.concatenate([best[1], rows_QT], axis=1),
        topk,
      ), None

    # The carry of the scan differs between devices, so its first value, which
    # does not, has to be declared as varying.
    none = jax.lax.pcast(
      (
        jnp.full((num_queries, topk), -jnp.inf),
        jnp.full((num_queries, topk), num_rows),
      ),
      'rows',
      to='varying',
    )
    numbers = jnp.arange(tiles_CTD.shape[0])
    (scores_QP, rows_QP), _ = jax.lax.scan(step, none, (numbers, tiles_CTD))
    return scores_QP, rows_QP

  # The best of each device stand side by side in the order of the devices, so
  # the last `top_k` keeps ties in the order of the rows, too.
  scores, rows = jax.shard_map(
    on_device,
    mesh=mesh,
    in_specs=(spec(), spec('rows')),
    out_specs=spec(None, 'rows'),
  )(queries_QD, tiles_CTD)
  return _best(scores, rows, topk)


def _best(scores: Array, rows: Array, topk: int) -> tuple[Array, Array]:
  best, places = jax.lax.top_k(scores, topk)
  return best, jnp.take_along_axis(rows, places, axis=1)
