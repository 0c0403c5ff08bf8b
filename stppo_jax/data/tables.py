"""Reads rows from files: JSONL, JSON, CSV, TSV and parquet.

A file may be compressed by gzip, or lie in a zip or tar archive, from which it
is read without being extracted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import csv
import dataclasses
import fnmatch
import gzip
import io
import json
import os
import pathlib
import tarfile
from typing import Any, IO, Protocol, TextIO, TypeVar
import zipfile
import zlib

SUFFIXES = ('.jsonl', '.json', '.csv', '.tsv', '.parquet')
ARCHIVES = ('.zip', '.tar', '.tar.gz', '.tgz')
_BATCH = 1024  # the number of rows of a parquet file that are read together


class _Record(Protocol):
  @property
  def id(self) -> str: ...


T = TypeVar('T', bound=_Record)


@dataclasses.dataclass(frozen=True)
class TableFile:
  """A file of rows.

  Attributes:
    path: the file, or the archive that holds the file.
    member: the name of the file in the archive; '' if `path` is the file
      itself.
    columns: the names of the columns of a CSV file that has no header line.
  """

  path: pathlib.Path
  member: str = ''
  columns: Sequence[str] = ()

  def __str__(self) -> str:
    return f'{self.path}!{self.member}' if self.member else str(self.path)

  @property
  def suffix(self) -> str:
    """The last suffix of the name in lower case; `.gz` does not count."""
    name = (self.member or self.path.name).lower().removesuffix('.gz')
    return pathlib.PurePosixPath(name).suffix


def find(place: pathlib.Path, pattern: str) -> list[TableFile]:
  """Returns the files whose path ends in a pattern, sorted.

  The archives of a folder are searched only if no file of the folder matches.

  Args:
    place: a folder, an archive, or a single file. A single file is returned
      whatever its name.
    pattern: the end of the path, with `*` for any characters, such as
      `test/anatomy_*.csv`. A file with `.gz` after this end is found too.
  """
  if place.is_dir():
    files = sorted(path for path in place.rglob('*') if path.is_file())
    found = [
      TableFile(path)
      for path in files
      if _ends_in(path.relative_to(place).as_posix(), pattern)
    ]
    archives = [path for path in files if _is_archive(path)]
    return found or [f for path in archives for f in find(path, pattern)]
  if _is_archive(place):
    with _archive_errors(place):
      return [
        TableFile(place, name)
        for name in sorted(_members(place))
        if _ends_in(name, pattern)
      ]
  return [TableFile(place)]


def _ends_in(name: str, pattern: str) -> bool:
  if name.rpartition('/')[2].startswith('.'):
    return False  # some systems add hidden files to an archive
  # With the slash in front, train.json does not match retrain.json.
  plain = f'/{name.removesuffix(".gz")}'
  return fnmatch.fnmatchcase(plain, f'*/{pattern}')


def _is_archive(path: pathlib.Path) -> bool:
  return path.name.lower().endswith(ARCHIVES)


def _members(archive: pathlib.Path) -> list[str]:
  if archive.suffix.lower() == '.zip':
    with zipfile.ZipFile(archive) as opened:
      return [i.filename for i in opened.infolist() if not i.is_dir()]
  with tarfile.open(archive) as opened:
    return [member.name for member in opened if member.isfile()]


@contextlib.contextmanager
def _archive_errors(path: pathlib.Path) -> Iterator[None]:
  try:
    yield
  except (zipfile.BadZipFile, tarfile.TarError) as error:
    raise ValueError(f'{path}: not a complete archive: {error}') from error


@contextlib.contextmanager
def _opened(file: TableFile) -> Iterator[IO[bytes]]:
  """Opens a file, and yields a stream of its decompressed bytes."""
  with contextlib.ExitStack() as stack:
    name = file.member or file.path.name
    if not file.member:
      stream = stack.enter_context(open(file.path, 'rb'))
    elif file.path.suffix.lower() == '.zip':
      archive = stack.enter_context(zipfile.ZipFile(file.path))
      stream = stack.enter_context(archive.open(file.member))
    else:
      archive = stack.enter_context(tarfile.open(file.path))
      stream = archive.extractfile(file.member)
      assert stream is not None  # the member is a file, not a folder
      stack.enter_context(stream)
    if name.endswith('.gz'):
      stream = stack.enter_context(gzip.open(stream))
    yield stream  # type: ignore[misc]


def read(
  file: TableFile | str | os.PathLike[str],
  parse: Callable[[Any, int], T],
  *,
  noun: str,
  space: Callable[[T], str] = lambda _: '',
) -> list[T]:
  """Returns the record of each row, in order.

  Args:
    file: the file. A suffix that is one of SUFFIXES decides the format. A file
      with any other suffix must have a JSON value on every line.
    parse: the function that makes a record from the value and the number of a
      row; raises ValueError for a bad row.
    noun: the word for the records in error messages.
    space: the function that returns the namespace of a record. No two records
      of a namespace may have the same id.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if a row is not a record, an id occurs twice, there is no
      record, or the file cannot be read; the message names the file and the
      line or the row.
  """
  if not isinstance(file, TableFile):
    file = TableFile(pathlib.Path(file))
  if not file.path.is_file():
    raise FileNotFoundError(f'{file}: no such file')
  records = []
  first_place: dict[tuple[str, str], str] = {}
  for place, number, value in _rows(file):
    try:
      record = parse(value, number)
      first = first_place.setdefault((space(record), record.id), place)
      if first != place:
        raise ValueError(f'duplicate id {record.id!r}, first at {first}')
    except ValueError as error:
      raise ValueError(f'{place}: {error}') from error
    records.append(record)
  if not records:
    raise ValueError(f'{file}: no {noun}')
  return records


def keys(file: TableFile) -> set[str]:
  """Returns the keys of the object in a JSON file.

  Raises:
    ValueError: if the file cannot be read or holds no object; the message names
      the file.
  """
  with _file_errors(file), _opened(file) as stream, _text(stream) as text:
    content = _loads(text.read(), str(file))
  if not isinstance(content, Mapping):
    raise ValueError(f'{file}: expected an object')
  return set(content)


def _rows(file: TableFile) -> Iterator[tuple[str, int, Any]]:
  """Yields the place, the number and the value of each row.

  The place is a text for error messages. If a row is a line of the file, the
  place is `FILE:7`, a form with which editors open the line. Otherwise the
  place is `FILE: row 7`.

  Raises:
    ValueError: if the file cannot be read; the message is one line that names
      the file.
  """
  with _file_errors(file), _opened(file) as stream:
    yield from _READERS.get(file.suffix, _lines)(file, stream)


@contextlib.contextmanager
def _file_errors(file: TableFile) -> Iterator[None]:
  """Turns decoding errors into a ValueError that names the file."""
  try:
    with _archive_errors(file.path):
      yield
  except UnicodeDecodeError as error:
    # Text is decoded in large buffers, so the line is not known.
    raise ValueError(f'{file}: not UTF-8: {error}') from error
  except (gzip.BadGzipFile, EOFError, zlib.error) as error:
    raise ValueError(f'{file}: not a complete gzip file: {error}') from error


def _lines(file: TableFile, stream: IO[bytes]) -> Iterator[tuple]:
  """Yields the rows of a JSON Lines file; empty lines are skipped."""
  with _text(stream) as text:
    for number, line in numbered_lines(text, file):
      if line.strip():
        place = f'{file}:{number}'
        yield place, number, _loads(line.rstrip(), place)


def _json(file: TableFile, stream: IO[bytes]) -> Iterator[tuple]:
  """Yields the rows of a file whose name ends in .json.

  The file may hold a list of rows, an object with such a list under `Data`
  (TriviaQA), or an object that maps ids to rows (PubMedQA). It may also be a
  JSON Lines file, with a row on every line.
  """
  with _text(stream) as opened:
    text = opened.read()
  # In a JSON Lines file the first line alone is valid JSON. If one value is
  # spread over several lines, the first line alone is not.
  first, _, more = text.partition('\n')
  if more.strip() and _is_json(first):
    yield from _lines(file, io.BytesIO(text.encode()))
    return
  rows = _loads(text, str(file))
  if isinstance(rows, Mapping):
    data = rows.get('Data')
    if isinstance(data, list):
      rows = data
    elif all(isinstance(row, Mapping) for row in rows.values()):
      rows = [{'id': key} | row for key, row in rows.items()]
  if not isinstance(rows, list):
    raise ValueError(f'{file}: expected a list of rows, or an object of rows')
  for number, row in enumerate(rows, start=1):
    yield f'{file}: row {number}', number, row


def _is_json(line: str) -> bool:
  try:
    json.loads(line)
  except (ValueError, RecursionError):
    return False
  return True


def _loads(text: str, where: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{where}: {error}') from error


def _table(file: TableFile, stream: IO[bytes]) -> Iterator[tuple]:
  """Yields the rows of a CSV or TSV file; each value is a dict of strings."""
  # Spreadsheet programs begin a file with a byte order mark, which this
  # encoding skips.
  with _text(stream, encoding='utf-8-sig', newline='') as text:
    reader = csv.DictReader(
      (line for _, line in numbered_lines(text, file)),
      fieldnames=list(file.columns) or None,
      delimiter='\t' if file.suffix == '.tsv' else ',',
      # Without this option, the reader would read all text after a quote that
      # is never closed as one cell, without an error.
      strict=True,
    )
    try:
      for row in reader:
        place = f'{file}:{reader.line_num}'
        # The reader puts surplus values under the key None, and gives missing
        # values the value None.
        if None in row or None in row.values():
          names = len(reader.fieldnames or ())
          raise ValueError(f'{place}: expected {names} columns')
        yield place, reader.line_num, row
    except csv.Error as error:
      # `reader.line_num` is the line of the last row that has no error, and
      # `reader.reader.line_num` is the line of the error.
      number = reader.reader.line_num
      raise ValueError(f'{file}:{number}: {error}') from error


def _parquet(file: TableFile, stream: IO[bytes]) -> Iterator[tuple]:
  """Yields the rows of a parquet file."""
  # These imports are made here, because most runs read no parquet file.
  import pyarrow
  from pyarrow import parquet

  number = 0
  try:
    for batch in parquet.ParquetFile(stream).iter_batches(_BATCH):
      for row in batch.to_pylist():
        number += 1
        yield f'{file}: row {number}', number, row
  except pyarrow.ArrowException as error:
    reason = ' '.join(str(error).split())
    raise ValueError(f'{file}: not a complete parquet file: {reason}') from None


def _text(
  stream: IO[bytes], *, encoding: str = 'utf-8', newline: str | None = None
) -> io.TextIOWrapper:
  return io.TextIOWrapper(stream, encoding=encoding, newline=newline)


_READERS = {
  '.json': _json,
  '.csv': _table,
  '.tsv': _table,
  '.parquet': _parquet,
}


# The largest number of characters of a line. A recorded dialogue of 100,000
# tokens, with all details of each token, takes half of this number.
MAX_LINE_LENGTH = 32 << 20


def numbered_lines(text: TextIO, name: object) -> Iterator[tuple[int, str]]:
  """Yields the number of each line, from 1, and the line with its line break.

  Args:
    text: the open file.
    name: the name of the file in the error message.

  Raises:
    ValueError: if a line is too long; the message names the file and the line.
  """
  number = 0
  # The length of a line is limited, because a file without line breaks would be
  # read as one line, which could fill the memory.
  while line := text.readline(MAX_LINE_LENGTH + 1):
    number += 1
    if len(line) > MAX_LINE_LENGTH:
      raise ValueError(
        f'{name}:{number}: longer than {MAX_LINE_LENGTH} characters, the most '
        'that a line may have'
      )
    yield number, line
