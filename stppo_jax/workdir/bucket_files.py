"""The files of a run in a bucket, and how they are downloaded.

    gs://BUCKET/RUN/checkpoints/40/...    a checkpoint, written by Orbax itself
                   /metrics.jsonl/000000-000000000000    first lines of the file
                   /metrics.jsonl/000000-000000004711    later lines of the file
                   /lease                 the holder, see `workdir.lease`
                   /...                   every other file, as an object

Nothing can be appended to an object. So a file to which a run appends lines is
kept in parts, each of which is an object. The first number in the name of a
part says how often the file was rewritten as a whole before, and only the parts
with the greatest such number count. The second number is the byte of the file
at which the part begins.
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

# Matches the names of files to which a run appends lines.
GROWS = re.compile(r'(?:[^/]+/)?(?:metrics|config_changes)\.jsonl')
DIALOGUES = re.compile(r'(?:trajectories|evaluation)-(\d+)[^/]*')
_PART = re.compile(rf'({GROWS.pattern})/(\d+)-(\d+)')
_CHECKPOINT = re.compile(r'((?:[^/]+/)?checkpoints/[^/]+)/.+')
# Orbax writes this file last, when the rest of a checkpoint is complete.
_COMMITTED = 'commit_success.txt'


class Grown(NamedTuple):
  """The state, in the bucket, of a file to which a run appends lines.

  Attributes:
    number: how often the file was rewritten as a whole.
    size: the number of bytes of the file that are in the bucket.
    checksum: the checksum of these bytes.
    parts: the names of all objects with parts of the file, outdated or not.
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
  """Yields the folder of a run; downloads it first if the run is in a bucket.

  The downloaded files are deleted at the end of the `with` block.

  Args:
    place: the folder of the run, or its address in a bucket.
    dialogues: whether to download the dialogues.
    arrays: whether to download the arrays of checkpoints. If False, the files
      of the arrays are made with the right size and without content.
    start: whether to download the folder start/policy. A run that makes the
      policy from which it starts has the policy in this folder.

  Raises:
    BucketError: the bucket cannot be read, or has no objects at this address.
  """
  if not buckets.is_address(place):
    yield pathlib.Path(place)
    return
  bucket = buckets.Bucket(place)
  entries = bucket.entries()
  # A bucket has no folders, so reading a misspelt address is no error: it only
  # finds no objects.
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

  The downloaded folder of a run lacks dialogues and the arrays of checkpoints;
  `run_folder.address` returns the address where the bucket has these files. The
  downloaded folder of a run is deleted when the process ends.

  Raises:
    BucketError: the bucket cannot be read, or has no objects at this address.
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
  """Returns the steps whose checkpoints are committed.

  Args:
    names: the names of the objects of a run.
  """
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
  """Downloads the needed files of a run, and joins files that are in parts.

  If a file of a committed checkpoint is not needed, a file with the right size
  and without content is made, so that the list of checkpoints is complete.

  Args:
    bucket: the bucket.
    folder: the folder of this machine that gets the files.
    entries: the objects of the bucket by name.
    is_needed: returns whether the file with a given name is needed.

  Returns:
    A dict from the name of each joined file to its state in the bucket.
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
  # These sparse files have the sizes and times of the objects, so commands can
  # show them without downloading the arrays.
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
  """Writes the joined parts of a file at `path`; returns the file's state."""
  # If a file was rewritten, its new parts count only once the part at byte 0 is
  # in the bucket, because other new parts may arrive earlier.
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
