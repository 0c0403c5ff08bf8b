"""The files of a run in a bucket, and how they are downloaded.

    gs://BUCKET/RUN/checkpoints/40/...    the arrays, which Orbax writes there
                   /metrics.jsonl/000000-000000000000    lines of metrics.jsonl,
                   /metrics.jsonl/000000-000000004711    those that came later
                   /lease                 who writes there, see `workdir.lease`
                   /...                   every other file, as an object

Objects do not grow. So a file that lines are appended to is kept in parts. The
name of one says at which byte of the file it begins, and how often the file was
rewritten as a whole: only the parts of the greatest number count.
"""

import atexit
from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import functools
import os
import pathlib
import re
import tempfile
from typing import NamedTuple
import zlib

from stppo_jax import buckets
from stppo_jax.workdir import run_folder

# Files that lines are appended to.
GROWS = re.compile(r'(?:[^/]+/)?(?:metrics|config_changes)\.jsonl')
DIALOGUES = re.compile(r'(?:trajectories|evaluation)-(\d+)[^/]*')
_PART = re.compile(rf'({GROWS.pattern})/(\d+)-(\d+)')
_CHECKPOINT = re.compile(r'((?:[^/]+/)?checkpoints/[^/]+)/.+')
_COMMITTED = 'commit_success.txt'  # Orbax writes it when all else is there


class Grown(NamedTuple):
  """The bytes that a bucket has of a file that lines are appended to.

  Attributes:
    number: how often the file was rewritten.
    size: the bytes that are there.
    checksum: the checksum of these bytes.
    parts: the names of all parts.
  """

  number: int = 0
  size: int = 0
  checksum: int = 0
  parts: tuple[str, ...] = ()


@contextlib.contextmanager
def downloaded(
  place: str,
  *,
  dialogues: bool = False,
  arrays: bool = False,
  start: bool = False,
) -> Iterator[pathlib.Path]:
  """Yields the folder of a run, downloaded from its bucket if it is in one.

  The downloaded files are deleted when the body ends.

  Args:
    place: the folder, or its address.
    dialogues: whether to download the dialogues too.
    arrays: whether to download the arrays of checkpoints; if not, their files
      have the right size and no content.
    start: whether to download the policy that the run has made to start from.

  Raises:
    BucketError: the bucket cannot be read, or holds nothing there.
  """
  if not buckets.is_address(place):
    yield pathlib.Path(place)
    return
  bucket = buckets.Bucket(place)
  entries = bucket.entries()
  # A bucket has no folders: an address that was misspelt is just empty.
  if not entries:
    raise buckets.BucketError(
      f'{place}: nothing is stored at this address; check its spelling, or '
      'whether the run has begun',
      2,
    )

  def is_needed(name: str) -> bool:
    if _CHECKPOINT.fullmatch(name):
      return arrays or name.endswith(f'/{run_folder.MANIFEST}')
    if name.startswith('start/policy/'):
      return start
    is_small = '/' not in name and name.endswith(('.json', '.jsonl'))
    return is_small and (dialogues or not DIALOGUES.fullmatch(name))

  with tempfile.TemporaryDirectory(prefix='stppo_jax-run-') as temporary:
    folder = pathlib.Path(temporary) / place.rstrip('/').rpartition('/')[2]
    folder.mkdir()
    (folder / run_folder.ADDRESS).write_text(place.rstrip('/'))
    download(bucket, folder, entries, is_needed)
    yield folder


@functools.cache
def opened(place: str) -> pathlib.Path:
  """Returns the folder of a run or a model, downloaded if it is in a bucket.

  Of a run, everything is there but dialogues and the arrays of checkpoints, and
  `run_folder.address` tells where these are. It is deleted when the process
  ends.

  Raises:
    BucketError: the bucket cannot be read, or holds nothing there.
  """
  is_run = buckets.is_address(place) and buckets.Bucket(place).read(
    run_folder.IDENTITY
  )
  if not is_run:
    return buckets.local_folder(place)
  stack = contextlib.ExitStack()
  atexit.register(stack.close)
  return stack.enter_context(downloaded(place, start=True))


def committed(names: Iterable[str]) -> list[int]:
  """Returns the steps of the committed checkpoints of a run's objects."""
  folders = (name.split('/') for name in names)
  return [
    int(x[1])
    for x in folders
    if x[0] == 'checkpoints' and x[2:] == [_COMMITTED] and x[1].isdecimal()
  ]


def download(
  bucket: buckets.Bucket,
  folder: pathlib.Path,
  entries: Mapping[str, buckets.Entry],
  is_needed: Callable[[str], bool],
) -> dict[str, Grown]:
  """Downloads files of a run; those that lines are appended to are joined.

  The other files of committed checkpoints are made here too, with their size
  and without content: their names tell which steps there are.

  Args:
    bucket: the bucket.
    folder: gets the files.
    entries: its objects.
    is_needed: returns whether the file of a name is needed.

  Returns:
    What the bucket has of each growing file.
  """
  parts: dict[str, list[re.Match[str]]] = {}
  wanted, empty = [], []
  for name in sorted(entries):
    if match := _PART.fullmatch(name):
      if is_needed(match[1]):
        parts.setdefault(match[1], []).append(match)
    elif match := _CHECKPOINT.fullmatch(name):
      if f'{match[1]}/{_COMMITTED}' in entries:
        (wanted if is_needed(name) else empty).append(name)
    elif is_needed(name):
      wanted.append(name)
  bucket.download(wanted, folder)
  # Sparse files: sizes and times of a checkpoint are known without its arrays.
  for name in empty:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, entries[name].size)
    os.utime(path, (entries[name].time, entries[name].time))
  return {
    name: _join(bucket, folder / name, matches)
    for name, matches in parts.items()
  }


def _join(
  bucket: buckets.Bucket,
  path: pathlib.Path,
  parts: list[re.Match[str]],
) -> Grown:
  """Joins the parts of a file that lines are appended to, and writes it."""
  # A rewritten file begins with a part at byte 0. Its other parts may arrive
  # earlier.
  begun = (int(part[2]) for part in parts if not int(part[3]))
  number = max(begun, default=0)
  data = b''
  for part in parts:
    if int(part[2]) == number and int(part[3]) == len(data):
      data += bucket.read(part[0])
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(data)
  names = tuple(part[0] for part in parts)
  return Grown(number, len(data), zlib.crc32(data), names)
