"""The folder of an index: its passages, and the parts that search them.

    index.json        {"version", "passages", "sha256"}, written last
    passages.jsonl    {"id", "title", "text"} on each line
    offsets.npy       [N + 1], the byte offsets of the lines and of the end
    bm25/ dense/      parts, each with a part.json

N is the number of passages, and sha256 the checksum of passages.jsonl. A
part.json has this checksum too, so that a part is only used with the passages
from which it was made. Files are memory-mapped: a large index opens at once,
and the processes of one machine share its memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import pathlib
import shutil
from typing import Any

import numpy as np

from stppo_jax import types

_VERSION = 1
_MANIFEST = 'index.json'
_PART_MANIFEST = 'part.json'
_PASSAGES = 'passages.jsonl'
_OFFSETS = 'offsets.npy'
_MAX_MANIFEST_BYTES = 1 << 20


class StoredPassages(Sequence[types.Passage]):
  """The passages of a folder, each read from its line when it is needed."""

  def __init__(self, folder: pathlib.Path, num_passages: int):
    """Memory-maps the files of the passages.

    Raises:
      ValueError: if a file is missing or damaged; the message is one line.
    """
    try:
      mapped = np.load(folder / _OFFSETS, mmap_mode='r', allow_pickle=False)
      with open(folder / _PASSAGES, 'rb') as file:
        self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # An empty file cannot be mapped: `mmap` raises ValueError.
    except (OSError, ValueError, EOFError) as error:
      raise ValueError(f'{folder}: damaged: {error}') from error
    self._offsets = np.asarray(mapped)  # Indexing a memmap is slow.
    if self._offsets.dtype != np.int64 or self._offsets.ndim != 1:
      raise ValueError(f'{folder}: damaged: {_OFFSETS} holds no offsets')
    # Only the length is compared, because a checksum would have to read a large
    # file at every start.
    sizes = num_passages + 1, [len(self._bytes)]
    if (len(self._offsets), self._offsets[-1:].tolist()) != sizes:
      raise ValueError(
        f'{folder}: damaged: {_PASSAGES} has another length than recorded'
      )

  def __len__(self) -> int:
    return len(self._offsets) - 1

  def __getitem__(self, n):
    if isinstance(n, slice):
      return [self[i] for i in range(*n.indices(len(self)))]
    if not 0 <= n < len(self):
      raise IndexError(n)
    line = self._bytes[self._offsets[n] : self._offsets[n + 1]]
    return types.Passage(**json.loads(line))

  def sha256(self) -> str:
    """Returns the checksum of passages.jsonl as the file is now."""
    return hashlib.sha256(self._bytes).hexdigest()


class IndexFolder:
  """A folder with passages, to which parts can be added.

  Attributes:
    path: the folder.
    passages: the passages of the folder.
    sha256: the checksum of the passages.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Opens a folder that `create` made.

    Raises:
      ValueError: if the folder holds no index, or is damaged; the message is
        one line.
    """
    self.path = pathlib.Path(path)
    manifest = _read_manifest(self.path / _MANIFEST)
    if manifest.get('version') != _VERSION:
      raise ValueError(
        f'{self.path}: version {manifest.get("version")!r} of the format, but '
        f'this program reads {_VERSION}: build the index again'
      )
    num_passages, sha256 = manifest.get('passages'), manifest.get('sha256')
    if not isinstance(num_passages, int) or not isinstance(sha256, str):
      raise ValueError(f'{self.path / _MANIFEST}: damaged: fields are missing')
    self.sha256 = sha256
    self.passages = StoredPassages(self.path, num_passages)

  @classmethod
  def create(
    cls, path: str | os.PathLike[str], passages: Sequence[types.Passage]
  ) -> 'IndexFolder':
    """Writes passages to a folder; opens the folder if it has them already.

    Raises:
      ValueError: if the folder holds other passages or other files, or there is
        no passage; the message is one line.
    """
    if not passages:
      raise ValueError('a corpus without passages cannot be indexed')
    path = pathlib.Path(path)
    if (path / _MANIFEST).exists():
      folder = cls(path)
      # A command may be repeated, for another part or after an interruption.
      # But the folder must not be used for another corpus.
      folder.check_corpus(passages)
      return folder
    ours = {_PASSAGES, _OFFSETS}  # an interrupted start may have left these
    if path.exists() and {file.name for file in path.iterdir()} - ours:
      raise ValueError(f'{path}: is not empty, and holds no index')
    path.mkdir(parents=True, exist_ok=True)
    offsets, digest = [0], hashlib.sha256()
    with open(path / _PASSAGES, 'wb') as file:
      for line in _lines(passages):
        file.write(line)
        digest.update(line)
        offsets.append(offsets[-1] + len(line))
    np.save(path / _OFFSETS, np.array(offsets, np.int64))
    manifest = {
      'version': _VERSION,
      'passages': len(passages),
      'sha256': digest.hexdigest(),
    }
    # The manifest is written last. Without the manifest the folder is no index,
    # so an interruption leaves no incomplete index.
    _write_manifest(path / _MANIFEST, manifest)
    return cls(path)

  def check_corpus(self, passages: Iterable[types.Passage]) -> None:
    """Raises ValueError if the folder was not made from these passages."""
    digest = hashlib.sha256()
    for line in _lines(passages):
      digest.update(line)
    if digest.hexdigest() != self.sha256:
      raise ValueError(
        f'{self.path}: the index of another corpus: sha256 '
        f'{self.sha256[:12]}..., but the corpus has '
        f'{digest.hexdigest()[:12]}...'
      )

  def add_part(
    self,
    name: str,
    options: Mapping[str, Any],
    write: Callable[[pathlib.Path], None],
  ) -> bool:
    """Writes a part if the folder does not have the part yet.

    Args:
      name: the name of the part.
      options: JSON values that describe how the part is made.
      write: a function that writes the part's files into an empty folder.

    Returns:
      Whether the part was written.

    Raises:
      ValueError: if the folder has the part with other options; the message is
        one line.
    """
    manifest = {'sha256': self.sha256, **options}
    path = self.path / name
    if path.exists():
      if self.part(name) != options:
        raise ValueError(
          f'{path}: made with other options; remove it to build it again'
        )
      return False
    unfinished = path.with_suffix('.unfinished')
    if unfinished.exists():
      shutil.rmtree(unfinished)
    unfinished.mkdir()
    # The folder of a part gets the part's name when the part is complete, so a
    # killed build leaves no part.
    write(unfinished)
    _write_manifest(unfinished / _PART_MANIFEST, manifest)
    unfinished.rename(path)
    return True

  def part(self, name: str) -> dict[str, Any]:
    """Returns the options with which `add_part` has written a part.

    Raises:
      ValueError: if there is no such part, or the part was made from other
        passages.
    """
    path = self.path / name
    if not path.exists():
      raise ValueError(
        f'{self.path}: no {name} index; the folder has: '
        f'{", ".join(self.parts()) or "no index"}'
      )
    options = _read_manifest(path / _PART_MANIFEST)
    if options.pop('sha256', None) != self.sha256:
      raise ValueError(
        f'{path}: made from other passages than {self.path / _PASSAGES}; '
        'remove it to build it again'
      )
    return options

  def parts(self) -> list[str]:
    """Returns the names of the parts."""
    return sorted(file.parent.name for file in self.path.glob('*/part.json'))


@contextlib.contextmanager
def building(
  path: str | os.PathLike[str], *, waits: Callable[[], None]
) -> Iterator[None]:
  """Makes a folder, and locks it for the body of the `with` statement.

  Another process that wants to build in the folder waits for the lock. Without
  the lock, one process could replace files that another process has mapped.

  Args:
    path: the folder.
    waits: a function that is called if this process has to wait for another
      process.
  """
  pathlib.Path(path).mkdir(parents=True, exist_ok=True)
  folder = os.open(path, os.O_RDONLY)
  try:
    try:
      fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      waits()
      fcntl.flock(folder, fcntl.LOCK_EX)
    except OSError:  # a file system without such locks
      pass
    yield
  finally:
    os.close(folder)


def _lines(passages: Iterable[types.Passage]) -> Iterator[bytes]:
  for passage in passages:
    fields = {'id': passage.id, 'title': passage.title, 'text': passage.text}
    yield json.dumps(fields, ensure_ascii=False).encode() + b'\n'


def _write_manifest(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
  unfinished = path.with_suffix('.unfinished')
  unfinished.write_text(json.dumps(fields, indent=2) + '\n', encoding='utf-8')
  unfinished.replace(path)


def _read_manifest(path: pathlib.Path) -> dict[str, Any]:
  """Returns the fields of a manifest; raises ValueError with one line."""
  if not path.is_file():
    raise ValueError(f'{path.parent}: no index: {path.name} is missing')
  try:
    with open(path, 'rb') as file:
      fields = json.loads(file.read(_MAX_MANIFEST_BYTES))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path}: damaged: {error}') from error
  if not isinstance(fields, dict):
    raise ValueError(f'{path}: damaged: no JSON object')
  return fields
