"""The kinds of search that a server offers over a folder of passages."""

from collections.abc import Sequence
import dataclasses
import functools
import os
from typing import Protocol

from stppo_jax import types
from stppo_jax.retrieval.indexes import bm25
from stppo_jax.retrieval.indexes import index_folder

# Modules that need jax or FAISS are imported inside the functions that use
# them, so that the other kinds of search need neither jax nor FAISS.

BACKENDS = ('bm25', 'dense', 'faiss', 'hybrid')


class Index(Protocol):
  """Searches passages in this process, without a request to a server."""

  def __len__(self) -> int:
    """Returns the number of passages."""
    ...

  def search(
    self, queries: Sequence[str], topk: int
  ) -> list[list[types.Passage]]:
    """Returns at most `topk` passages for each query, best first."""
    ...


@dataclasses.dataclass(frozen=True)
class DenseOptions:
  """The options of a folder's dense part, which has vectors of passages.

  Attributes:
    query_prefix, passage_prefix: the texts that the encoder expects in front of
      queries and passages; for E5, they are 'query: ' and 'passage: '.
    dtype: the dtype of the stored vectors, float32 or bfloat16.
  """

  query_prefix: str = ''
  passage_prefix: str = ''
  dtype: str = 'float32'


def add_bm25(folder: index_folder.IndexFolder, *, k1: float, b: float) -> bool:
  """Adds a BM25 part to a folder; returns False if it was there already."""
  return folder.add_part(
    'bm25',
    {'k1': k1, 'b': b},
    lambda path: bm25.Bm25Index(folder.passages, k1=k1, b=b).save(path),
  )


def add_dense(
  folder: index_folder.IndexFolder,
  encoder_directory: str | os.PathLike[str],
  options: DenseOptions,
) -> bool:
  """Adds the vectors of all passages to a folder.

  Returns False if the folder has the vectors already.

  Raises:
    ValueError: if the directory holds no encoder, or the folder has vectors
      made by another encoder or with other options; the message is one line.
  """
  from stppo_jax.retrieval.indexes import dense
  from stppo_jax.retrieval.indexes import encoder

  model = encoder.TextEncoder(encoder_directory)
  return folder.add_part(
    'dense',
    {'encoder': model.sha256, **dataclasses.asdict(options)},
    lambda path: dense.write_vectors(
      path,
      folder.passages,
      model.encode,
      size=model.size,
      dtype=options.dtype,
      passage_prefix=options.passage_prefix,
    ),
  )


def open_index(
  folder: index_folder.IndexFolder,
  backend: str,
  *,
  encoder_directory: str = '',
  faiss_file: str = '',
  query_prefix: str = '',
) -> Index:
  """Returns an index over the passages of a folder.

  Args:
    folder: the folder.
    backend: one of `BACKENDS`; hybrid joins BM25 with FAISS if `faiss_file` is
      given, else with the dense part.
    encoder_directory: the directory of the encoder; '' for BM25, which needs no
      encoder.
    faiss_file: a file in which FAISS has written an index of the folder's
      passages, in the order of the passages; '' without FAISS.
    query_prefix: the text that the encoder expects in front of queries. Only
      FAISS needs this argument, because a dense part stores its own prefix.

  Raises:
    ValueError: if a part is missing, or does not fit the passages or the
      encoder; the message is one line.
  """
  if backend == 'bm25':
    folder.part('bm25')
    return bm25.Bm25Index.load(folder.path / 'bm25', folder.passages)
  if backend == 'hybrid':
    open_kind = functools.partial(
      open_index,
      folder,
      encoder_directory=encoder_directory,
      faiss_file=faiss_file,
      query_prefix=query_prefix,
    )
    vectors = 'faiss' if faiss_file else 'dense'
    return HybridIndex([open_kind('bm25'), open_kind(vectors)])
  if not encoder_directory:
    raise ValueError(f'{backend}: needs the encoder that made the vectors')
  if backend == 'faiss':
    from stppo_jax.retrieval.indexes import encoder
    from stppo_jax.retrieval.indexes import faiss_index

    model = encoder.TextEncoder(encoder_directory)
    return faiss_index.FaissIndex(
      faiss_file,
      folder.passages,
      model.encode,
      size=model.size,
      query_prefix=query_prefix,
    )
  return _open_dense(folder, encoder_directory)


def _open_dense(
  folder: index_folder.IndexFolder, encoder_directory: str
) -> Index:
  from stppo_jax.retrieval.indexes import dense
  from stppo_jax.retrieval.indexes import encoder

  fields = folder.part('dense')
  model = encoder.TextEncoder(encoder_directory)
  # Products between vectors of two encoders mean nothing: without this check,
  # the search would find arbitrary passages.
  if fields.pop('encoder', None) != model.sha256:
    raise ValueError(
      f'{folder.path / "dense"}: made by another encoder than '
      f'{encoder_directory}'
    )
  path = folder.path / 'dense'
  names = {field.name for field in dataclasses.fields(DenseOptions)}
  if set(fields) != names or not all(
    isinstance(v, str) for v in fields.values()
  ):
    raise ValueError(
      f'{path}: damaged: part.json must hold a string for each of '
      f'{", ".join(sorted(names))}'
    )
  options = DenseOptions(**fields)
  return dense.DenseIndex(
    dense.read_vectors(path, options.dtype, size=model.size),
    folder.passages,
    model.encode,
    query_prefix=options.query_prefix,
  )


# The larger the offset, the less the scores of the first ranks differ. Source:
# Cormack et al. 2009, "Reciprocal Rank Fusion outperforms Condorcet and
# individual rank learning methods".
_RANK_OFFSET = 60
_DEPTH = 100  # each index is asked for at least this many passages


class HybridIndex:
  """Ranks passages by their ranks in several indexes.

  Passages are ordered by the sum of 1 / (60 + rank) over the indexes that find
  the passage. The rank of the best passage is 1.
  """

  def __init__(self, indexes: Sequence[Index]):
    """Joins indexes, which must have the same passages."""
    self._indexes = tuple(indexes)

  def __len__(self) -> int:
    return len(self._indexes[0])

  def search(
    self, queries: Sequence[str], topk: int
  ) -> list[list[types.Passage]]:
    """Returns the best passages of each query, best first.

    Among passages with equal sums, passages of the first index come first.
    """
    # Each index is asked for more passages than `topk`, because a passage far
    # down in both rankings may have a larger sum than the first passage of one
    # ranking.
    depth = max(topk, _DEPTH)
    rankings = [index.search(queries, depth) for index in self._indexes]
    return [_fuse(lists)[:topk] for lists in zip(*rankings)]


def _fuse(lists: Sequence[Sequence[types.Passage]]) -> list[types.Passage]:
  scores: dict[str, float] = {}
  passages: dict[str, types.Passage] = {}
  for ranking in lists:
    for rank, passage in enumerate(ranking, start=1):
      passages.setdefault(passage.id, passage)
      scores.setdefault(passage.id, 0.0)
      scores[passage.id] += 1 / (_RANK_OFFSET + rank)
  order = sorted(scores, key=lambda name: -scores[name])
  return [
    dataclasses.replace(passages[name], score=scores[name]) for name in order
  ]
