"""Reads files with a JSON object on every line, plain or compressed."""

from collections.abc import Callable
import gzip
import json
import os
from typing import Any
from typing import Protocol
from typing import TypeVar
import zlib


class _Record(Protocol):
  @property
  def id(self) -> str: ...


T = TypeVar('T', bound=_Record)


def read(
  path: str | os.PathLike[str],
  parse: Callable[[Any, int], T],
  *,
  noun: str,
  space: Callable[[T], str] = lambda _: '',
) -> list[T]:
  """Returns the record of each line, in order; empty lines are skipped.

  Args:
    path: the file, which is compressed by gzip if its name ends in `.gz`.
    parse: makes a record of the value and the number of a line; raises
      ValueError if it cannot.
    noun: what the records are, for messages.
    space: the part of the file in which the id of a record is unique.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if a line is no record, an id occurs twice, there is no record,
      or the file cannot be decompressed; names the file and the line.
  """
  if not os.path.isfile(path):
    raise FileNotFoundError(f'{path}: no such file')
  records = []
  line_of_id: dict[tuple[str, str], int] = {}
  compressed = os.fspath(path).endswith('.gz')
  number = 0
  try:
    with (gzip.open if compressed else open)(path, 'rt', encoding='utf-8') as f:
      for number, line in enumerate(f, start=1):
        if not line.strip():
          continue
        record = parse(json.loads(line), number)
        first = line_of_id.setdefault((space(record), record.id), number)
        if first != number:
          raise ValueError(f'duplicate id {record.id!r}, first on line {first}')
        records.append(record)
  except UnicodeDecodeError as error:
    # Text is decoded in large buffers, so the line is not known.
    raise ValueError(f'{path}: not UTF-8: {error}') from error
  except (gzip.BadGzipFile, EOFError, zlib.error) as error:
    raise ValueError(f'{path}: not a complete gzip file: {error}') from error
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path}:{number}: {error}') from error
  if not records:
    raise ValueError(f'{path}: no {noun}')
  return records
