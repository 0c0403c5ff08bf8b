"""Exact dense search: finds the passages with the largest inner products.

The vectors of the corpus are divided among the devices. Each device goes over
its vectors in tiles and keeps the best passages so far, so no array ever holds
the products of all passages.

Shape letters: P passages of the corpus, D width of a vector. Arrays with axes
of queries, found passages or tiles have no suffix; docstrings give their
shapes. A *row* is the index of a passage in the corpus, and of its vector.
"""

from collections.abc import Callable, Mapping, Sequence
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
# Numpy's file format has no bfloat16, so vectors in bfloat16 are stored as
# integers with the same bits.
_STORED: Mapping[str, np.dtype[Any]] = {
  **DTYPES,
  'bfloat16': np.dtype(np.uint16),
}
_VECTORS = 'vectors.npy'
_TILE = 4096  # the number of vectors of a tile
_ENCODED_AT_ONCE = 2048  # the number of passages encoded before each write


class VectorIndex:
  """Finds the passages with the largest inner products with a query's vector.

  Args:
    passages: the P passages; a passage is read only when a search finds it.
    encode: a function that returns the vectors of texts, [texts, D].
    query_prefix: the text that the encoder expects in front of every query.
  """

  def __init__(
    self, passages: Sequence[types.Passage], encode: Encode, query_prefix: str
  ):
    self._passages = passages
    self._encode = encode
    self._query_prefix = query_prefix

  def __len__(self) -> int:
    return len(self._passages)

  def search(
    self, queries: Sequence[str], topk: int
  ) -> list[list[types.Passage]]:
    """Returns each query's passages with the largest products, best first.

    A query has at most `topk` passages, in the order of `nearest`.
    """
    if not queries:
      return []
    vectors = self._encode([self._query_prefix + q for q in queries])
    return [
      [
        dataclasses.replace(self._passages[int(n)], score=float(score))
        for score, n in zip(scores, rows)
        if n >= 0  # FAISS pads its results with -1.
      ]
      for scores, rows in zip(*self.nearest(vectors, topk))
    ]

  def nearest(
    self, query_vectors: np.ndarray, topk: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the largest inner products in float32, and their rows.

    Both arrays are [queries, min(topk, P)].

    Args:
      query_vectors: the vectors of the queries, [queries, D].
      topk: the most products per query.
    """
    raise NotImplementedError


class DenseIndex(VectorIndex):
  """Searches vectors of passages exactly, on the devices of this process.

  Passages with equal products are in the order of the corpus.
  """

  def __init__(
    self,
    vectors_PD: np.ndarray,
    passages: Sequence[types.Passage],
    encode: Encode,
    *,
    query_prefix: str = '',
    devices: Sequence[Any] | None = None,
    tile: int = _TILE,
  ):
    """Copies the vectors to the devices.

    Args:
      vectors_PD: a vector for each passage, float32 or bfloat16.
      passages, encode, query_prefix: see `VectorIndex`.
      devices: the devices to use; None for all devices of this process.
      tile: the number of vectors whose products are computed at once.

    Raises:
      ValueError: if the numbers of vectors and of passages differ.
    """
    if len(vectors_PD) != len(passages):
      raise ValueError(
        f'{len(vectors_PD)} vectors for {len(passages)} passages'
      )
    super().__init__(passages, encode, query_prefix)
    devices = list(devices or jax.local_devices())
    mesh = jax.sharding.Mesh(np.array(devices), ('rows',))
    self._tiles = _tiles(vectors_PD, mesh, tile)
    self._search = jax.jit(
      functools.partial(_search, mesh=mesh, num_rows=len(passages)),
      static_argnames='topk',
    )

  def nearest(
    self, query_vectors: np.ndarray, topk: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """See `VectorIndex`."""
    num_queries, topk = len(query_vectors), min(topk, len(self))
    # The number of queries and `topk` are rounded up to powers of two, so that
    # few programs are compiled.
    height = 1 << (num_queries - 1).bit_length()
    padded = np.zeros((height, query_vectors.shape[1]), np.float32)
    padded[:num_queries] = query_vectors
    scores, rows = self._search(
      padded, self._tiles, topk=1 << (topk - 1).bit_length()
    )
    return (
      np.asarray(scores)[:num_queries, :topk],
      np.asarray(rows)[:num_queries, :topk],
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
    encode: a function that returns the vectors of texts.
    size: the width D of the vectors.
    dtype: the dtype of the stored vectors, a key of `DTYPES`.
    passage_prefix: the text that the encoder expects in front of every passage.
  """
  stored = _STORED[dtype]
  vectors_PD = np.lib.format.open_memmap(
    pathlib.Path(folder) / _VECTORS,
    mode='w+',
    dtype=stored,
    shape=(len(passages), size),
  )
  for begin in range(0, len(passages), _ENCODED_AT_ONCE):
    some = passages[begin : begin + _ENCODED_AT_ONCE]
    texts = [f'{passage_prefix}{p.title}\n{p.text}' for p in some]
    vectors = np.asarray(encode(texts), DTYPES[dtype])
    vectors_PD[begin : begin + len(some)] = vectors.view(stored)
  vectors_PD.flush()


def read_vectors(
  folder: str | os.PathLike[str], dtype: str, *, size: int
) -> np.ndarray:
  """Returns the vectors [P, D] that `write_vectors` wrote, memory-mapped.

  Args:
    folder: the folder.
    dtype: the dtype of the stored vectors, a key of `DTYPES`.
    size: the width D that the vectors must have.

  Raises:
    ValueError: if the file is missing or damaged; the message is one line.
  """
  path = pathlib.Path(folder) / _VECTORS
  if dtype not in DTYPES:
    raise ValueError(
      f'{path}: dtype {dtype!r}: must be one of {", ".join(DTYPES)}'
    )
  try:
    vectors_PD = np.load(path, mmap_mode='r', allow_pickle=False)
  except (OSError, ValueError, EOFError) as error:
    raise ValueError(f'{path}: damaged vectors: {error}') from error
  stored = _STORED[dtype]
  if (vectors_PD.dtype, vectors_PD.shape[1:]) != (stored, (size,)):
    raise ValueError(
      f'{path}: damaged vectors: {vectors_PD.dtype} of shape '
      f'{vectors_PD.shape}, not {stored} of shape (passages, {size})'
    )
  return vectors_PD.view(DTYPES[dtype])


def _tiles(vectors_PD: np.ndarray, mesh: jax.sharding.Mesh, tile: int) -> Array:
  """Returns the vectors as [tiles, tile, D], sharded over the tiles.

  The last tiles are padded with zeros. Each device reads only its own vectors.
  """
  num_rows, size = vectors_PD.shape
  per_device = -(-num_rows // mesh.size)
  tile = max(min(tile, per_device), 1)
  num_tiles = mesh.size * -(-per_device // tile)

  def read(place: Any) -> np.ndarray:
    begin, end, _ = place[0].indices(num_tiles)
    shard = np.zeros(((end - begin) * tile, size), vectors_PD.dtype)
    rows = vectors_PD[begin * tile : end * tile]
    shard[: len(rows)] = rows
    return shard.reshape(end - begin, tile, size)

  sharding = jax.sharding.NamedSharding(
    mesh, jax.sharding.PartitionSpec('rows')
  )
  return jax.make_array_from_callback((num_tiles, tile, size), sharding, read)


def _search(
  query_vectors: Array,
  tiles: Array,
  *,
  mesh: jax.sharding.Mesh,
  num_rows: int,
  topk: int,
) -> tuple[Array, Array]:
  """Returns the largest inner products and their rows, [queries, topk] each.

  If there are fewer rows than `topk`, the last products are -inf.
  """
  num_queries, tile = len(query_vectors), tiles.shape[1]
  spec = jax.sharding.PartitionSpec

  def on_device(query_vectors: Array, tiles: Array) -> tuple[Array, Array]:
    first = jax.lax.axis_index('rows') * (tiles.shape[0] * tile)

    def step(best, numbered):
      number, tile_vectors = numbered
      products = jnp.einsum(
        'qd,td->qt',
        query_vectors.astype(tile_vectors.dtype),
        tile_vectors,
        preferred_element_type=jnp.float32,
        # By default, accelerators would round float32 vectors.
        precision=jax.lax.Precision.HIGHEST,
      )
      rows = (first + number * tile + jnp.arange(tile))[None]
      products = jnp.where(rows < num_rows, products, -jnp.inf)
      # Of equal products, `top_k` takes the first. The best products so far are
      # from earlier rows, so they come first, which keeps ties in corpus order.
      return _best(
        jnp.concatenate([best[0], products], axis=1),
        jnp.concatenate(
          [best[1], jnp.broadcast_to(rows, products.shape)], axis=1
        ),
        topk,
      ), None

    # The carry of the scan differs between devices. Its initial value is equal
    # on all devices, so it has to be declared as varying.
    none = jax.lax.pcast(
      (
        jnp.full((num_queries, topk), -jnp.inf),
        jnp.full((num_queries, topk), num_rows),
      ),
      'rows',
      to='varying',
    )
    numbers = jnp.arange(tiles.shape[0])
    (scores, rows), _ = jax.lax.scan(step, none, (numbers, tiles))
    return scores, rows

  # The results of the devices are concatenated in the order of the devices, so
  # the last `top_k` keeps ties in corpus order, too.
  scores, rows = jax.shard_map(
    on_device,
    mesh=mesh,
    in_specs=(spec(), spec('rows')),
    out_specs=spec(None, 'rows'),
  )(query_vectors, tiles)
  return _best(scores, rows, topk)


def _best(scores: Array, rows: Array, topk: int) -> tuple[Array, Array]:
  best, places = jax.lax.top_k(scores, topk)
  return best, jnp.take_along_axis(rows, places, axis=1)
