"""Recorded answers, so that a run can be repeated without its server.

A recording is a file of JSON lines: {"corpus", "query", "topk", "passages"}.
`Recorder` writes the file while a run asks its server, and `Recording` answers
from it.
"""

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
from typing import Any

from stppo_jax import exits
from stppo_jax import types
from stppo_jax.data import passages as passages_lib
from stppo_jax.data import tables

_Key = tuple[str, str]  # corpus, query
_BEGINNING = b'{"corpus": "'  # the first bytes of every line


class RecordingFailed(Exception):
  """Raised if an answer cannot be recorded, such as on a full disk.

  The run ends, because without the answer it could not be repeated. The message
  is one line.
  """

  exit_code = exits.TRY_AGAIN


class Recorder:
  """Appends the first answer to each query to a file."""

  def __init__(self, path: str | os.PathLike[str], *, topk: int):
    """Opens the file to append to it, or makes it.

    If a process was killed while it wrote the last line, the rest of that line
    is removed.

    Args:
      path: the file.
      topk: the number of passages that were asked for.

    Raises:
      OSError: if the file cannot be written.
      ValueError: if the file is no recording, or was recorded with another
        topk; the message is one line.
    """
    self._topk = topk
    self._recorded: set[_Key] = set()
    self._path = path = pathlib.Path(path)
    if path.exists():
      torn = _torn_line(path)
      known = _read(path, but_last=bool(torn))
      if torn:  # `_read` has accepted all lines before it
        os.truncate(path, path.stat().st_size - len(torn))
      self._recorded = set(known)
      other = {answer.topk for answer in known.values()} - {topk}
      if other:
        raise ValueError(
          f'{path}: recorded with topk {min(other)}, not {topk}; choose '
          'another file'
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a buffer, so that a full disk is noticed at once.
    self._file = open(path, 'ab', buffering=0)

  def record(
    self, corpus: str, query: str, passages: Sequence[types.Passage]
  ) -> None:
    """Writes an answer, unless the query has one.

    Raises:
      RecordingFailed: if the answer cannot be written.
    """
    if (corpus, query) in self._recorded:
      return
    fields = {
      'corpus': corpus,
      'query': query,
      'topk': self._topk,
      'passages': [dataclasses.asdict(passage) for passage in passages],
    }
    # Everything beyond ASCII is escaped, because a query may hold halves of
    # surrogate pairs, which UTF-8 cannot encode.
    line = json.dumps(fields).encode() + b'\n'
    try:
      while line:
        line = line[self._file.write(line) :]
    except OSError as error:
      raise RecordingFailed(
        f'retrieval.record={self._path}: {error.strerror}'
      ) from error
    self._recorded.add((corpus, query))

  def close(self) -> None:
    self._file.close()


@dataclasses.dataclass(frozen=True)
class _Answer:
  topk: int
  passages: list[types.Passage]


class Recording:
  """The answers of a file that a `Recorder` wrote."""

  def __init__(self, path: str | os.PathLike[str]):
    """Reads the file.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if a line is no answer, with the file and the line, or if
        there is none.
    """
    path = pathlib.Path(path)
    if not path.is_file():
      raise FileNotFoundError(f'{path}: no such file')
    self._path = path
    self._answers = _read(path)
    if not self._answers:
      raise ValueError(f'{path}: holds no recorded answer')

  def find(self, corpus: str, query: str, topk: int) -> list[types.Passage]:
    """Returns the recorded passages of a query.

    Raises:
      LookupError: if the query was not recorded, or was with fewer passages.
    """
    try:
      answer = self._answers[corpus, query]
    except KeyError:
      raise LookupError(
        f'{self._path} has no answer to {query[:80]!r}: it was recorded in '
        'another run'
      ) from None
    if topk > answer.topk:
      raise LookupError(
        f'{self._path} was recorded with topk {answer.topk}, not {topk}'
      )
    return answer.passages[:topk]


def _read(path: pathlib.Path, *, but_last: bool = False) -> dict[_Key, _Answer]:
  """Returns the answers of a file, or those of all lines but the last."""
  answers = {}
  with open(path, encoding='utf-8') as file:
    for number, line in tables.numbered_lines(file, path):
      if but_last and not line.endswith('\n'):
        break
      try:
        key, answer = _parse(json.loads(line))
      except (ValueError, RecursionError) as error:
        raise ValueError(f'{path}:{number}: {error}') from error
      answers.setdefault(key, answer)
  return answers


def _parse(fields: Any) -> tuple[_Key, _Answer]:
  if not isinstance(fields, dict):
    raise ValueError('expected an object')
  for name, kind in (
    ('corpus', str),
    ('query', str),
    ('topk', int),
    ('passages', list),
  ):
    if name not in fields or not isinstance(fields[name], kind):
      raise ValueError(f'"{name}": expected a value of type {kind.__name__}')
  passages = []
  for item in fields['passages']:
    score = item.get('score', 0.0) if isinstance(item, dict) else 0.0
    if isinstance(score, bool) or not isinstance(score, int | float):
      raise ValueError('"score": expected a number')
    passages.append(passages_lib.passage_of(item, score=float(score)))
  key = fields['corpus'], fields['query']
  return key, _Answer(fields['topk'], passages)


def _torn_line(path: pathlib.Path) -> bytes:
  """Returns the last line if it is not complete, else nothing.

  Raises:
    ValueError: if the line does not begin like an answer; the message is one
      line.
  """
  torn = path.read_bytes().rpartition(b'\n')[2]
  if torn[: len(_BEGINNING)] != _BEGINNING[: len(torn)]:
    raise ValueError(f'{path}: no recording: its last line is no answer')
  return torn
