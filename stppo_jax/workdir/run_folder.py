"""Identifies the command that wrote a folder, and refuses unsuitable folders.

    WORKDIR/run.json      the command that writes the folder, and the run's id
           /aside-1/      files that a later start has moved away
           /compiled/     compiled programs, which every start may use
    EXPORT/export.json    says that the folder is an exported policy

A command writes to a folder only if the folder is new or empty, or if the same
command wrote the folder before. So a command never replaces the files of a
model, of a data set, or of another program.
"""

from collections.abc import Container, Mapping
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
from typing import Any
import uuid

from stppo_jax import buckets
from stppo_jax.workdir import atomic_files
from stppo_jax.workdir import lock

EXPORT = 'export'
# The version of the file formats of a run. If a later version of this program
# changes a format in such a way that this version would misread it, run.json
# has a higher number.
SCHEMA = 1
_RUNS = ('train', 'sft', 'prefer')  # the commands that can write to a bucket
IDENTITY, _EXPORTED = 'run.json', 'export.json'
MARKS = IDENTITY, _EXPORTED
ASIDE = 'aside-'
# The names of probe files begin with this word. The first host writes such a
# file, by which `agreement` checks that all hosts see the same folder.
PROBE = 'probe-'
# If a folder of this machine stands for a folder in a bucket, this file in it
# contains the address of the folder in the bucket.
ADDRESS = '.address'
COMPILED = 'compiled'
METRICS = 'metrics.jsonl'  # a file with a line for each step
# The file in a checkpoint that describes the checkpoint's content.
MANIFEST = 'manifest/metadata'
# Sections of the config that the record of every run has.
_SECTIONS = ('algorithm', 'model', 'rollout')
# The first bytes of every file of a kind.
_BEGINNINGS = {'npz': b'PK', 'png': b'\x89PNG'}
_ADVICE = 'give a folder that is new or empty'


@dataclasses.dataclass(frozen=True)
class Run:
  """The identity of the run that a folder belongs to.

  Attributes:
    command: the command that writes the folder.
    run_id: an id that no other run has.
    config_digest: the digest of the config keys that define the run.
    has_older_checkpoints: whether the run may have checkpoints without a run
      id, because an earlier version, which wrote no ids, began the run.
    has_saved: whether the run has saved a checkpoint.
  """

  command: str
  run_id: str
  config_digest: str
  has_older_checkpoints: bool = False
  has_saved: bool = False


def problems(
  folder: str | pathlib.Path,
  *,
  flag: str,
  command: str,
  reads: Mapping[str, pathlib.Path],
  may_lie_inside: bool = False,
  expected: Container[str] = (),
) -> list[str]:
  """Returns a line for each reason why a command must not write to a folder.

  Args:
    folder: the folder that a flag names; it may not exist yet.
    flag: the flag, such as '--workdir'.
    command: the command that would write to the folder.
    reads: directories that the command reads and must not change, keyed by the
      flag or config key that names them.
    may_lie_inside: whether the folder may lie in one of these directories.
    expected: names of files that may be in the folder even if the command did
      not write the folder before.
  """
  path, start = pathlib.Path(folder), f'{flag}={folder}: '
  # An address such as gs://bucket/run must not be read as a path, which would
  # lie in a folder named `gs:` on this machine.
  if path.parts and path.parts[0].endswith(':'):
    return _address_problems(str(folder), start, command)
  try:
    for place in (path, *path.parents):
      if place.exists() and not place.is_dir():
        where = '' if place == path else f'{place} '
        return [f'{start}{where}exists and is not a folder']
    for name, directory in reads.items():
      relation = _relation(path, directory)
      if relation and not (may_lie_inside and relation == 'lies in'):
        end = f'the folder of {name}; {_ADVICE}'
        return [f'{start}{relation} {directory}, {end}']
    owner = command_of(path)
    others = [name for name in _others(path) if name not in expected]
  except OSError as error:  # no permission, or an impossible name
    return [f'{start}{error.strerror}']
  if owner and owner != command:
    return [f'{start}was written by {owner}, not by {command}; {_ADVICE}']
  if others and not owner:
    return [
      f'{start}is not empty and was not written by {command}: it holds '
      f'{others[0]}; {_ADVICE}'
    ]
  return []


def _address_problems(place: str, start: str, command: str) -> list[str]:
  """Returns the lines of `problems` if an address is named, not a folder.

  Args:
    place: the address, such as gs://bucket/run.
    start: the beginning of each line.
    command: the command that would write to the address.
  """
  if command not in _RUNS:
    return [f'{start}an address, not a folder; name a folder of this machine']
  if not re.fullmatch(r'gs://[^/?@]+(/[^/?@]+)+/?', place):
    return [f'{start}must be a folder, or an address as gs://BUCKET/RUN']
  try:
    buckets.Bucket(place)
  except buckets.BucketError as error:
    return [f'{start}{str(error).removeprefix(f"{place}: ")}']
  return []


def file_problems(
  file: str | pathlib.Path,
  *,
  flag: str,
  kind: str,
  reads: Mapping[str, pathlib.Path],
) -> list[str]:
  """Returns a line for each reason why a command must not write to a file.

  Args:
    file: the file that a flag names.
    flag: the flag, such as '--out'.
    kind: the kind of the file, npz or png.
    reads: directories that the command must not change, as in `problems`.
  """
  path, start = pathlib.Path(file), f'{flag}={file}: '
  if path.is_dir():
    return [f'{start}is a folder']
  if not path.parent.is_dir():
    return [f'{start}no such folder: {path.parent}']
  for name, directory in reads.items():
    if _relation(path, directory):
      return [f'{start}lies in {directory}, the folder of {name}']
  if path.exists():
    beginning = _BEGINNINGS[kind]
    with open(path, 'rb') as opened:
      if opened.read(len(beginning)) != beginning:
        return [f'{start}exists and is not a {kind} file']
  return []


def _others(folder: pathlib.Path) -> list[str]:
  """Returns the names in a folder, without leftovers of a killed start.

  A start that was killed early may leave its lock, a probe file, an incomplete
  run.json, the file `ADDRESS`, compiled programs, and folders of files that the
  start moved aside.
  """
  names = os.listdir(folder) if folder.is_dir() else []
  return sorted(
    name
    for name in names
    if name not in (lock.NAME, f'{IDENTITY}.new', COMPILED, ADDRESS)
    and not name.startswith((ASIDE, PROBE))
  )


def address(folder: pathlib.Path) -> str:
  """Returns the address in a bucket that a folder stands for, or ''.

  The folder may lie inside the folder that has the file `ADDRESS`.
  """
  for parent in (folder, *folder.parents):
    with contextlib.suppress(OSError):
      place = (parent / ADDRESS).read_text()
      below = folder.relative_to(parent)
      return f'{place}/{below}' if below.parts else place
  return ''


def _relation(path: pathlib.Path, other: pathlib.Path) -> str:
  """Returns how a path relates to another path.

  Returns:
    'is', 'holds' or 'lies in', as the verb between the two paths; '' if neither
    contains the other.
  """
  path, other = path.resolve(), other.resolve()
  if path == other:
    return 'is'
  if other.is_relative_to(path):
    return 'holds'
  return 'lies in' if path.is_relative_to(other) else ''


def command_of(folder: pathlib.Path) -> str:
  """Returns which command of this program wrote a folder; '' for no command.

  A run of an earlier version has no run.json and is known by its config.json.
  """
  run = read(folder)
  if run is not None:
    return run.command
  if (folder / _EXPORTED).is_file():
    return EXPORT
  record = _json(folder / 'config.json')
  if all(isinstance(record.get(name), dict) for name in _SECTIONS):
    return command_of_record(record)
  return ''


def command_of_record(config: Mapping[str, Any]) -> str:
  """Returns the command that recorded a config: train, sft or prefer."""
  if 'command' in config:
    return config['command']
  return 'prefer' if 'batch_sha256' in config else 'train'


def read(folder: pathlib.Path) -> Run | None:
  """Returns the identity of a folder's run; None without a valid run.json."""
  try:
    return Run(**_json(folder / IDENTITY))
  except TypeError:
    return None


def schema(folder: pathlib.Path) -> int:
  """Returns the version of the file formats of a run, see `SCHEMA`."""
  number = _json(folder / IDENTITY).get('schema', SCHEMA)
  # -1 stands for an unknown version, which no code reads.
  return number if isinstance(number, int) else -1


def write(folder: pathlib.Path, run: Run) -> None:
  """Records the identity of a folder's run in run.json."""
  text = json.dumps(dataclasses.asdict(run), indent=2) + '\n'
  atomic_files.replace(folder / IDENTITY, text.encode())


def mark(folder: pathlib.Path, command: str, digest: str = '') -> None:
  """Records the command that writes a folder, if there is no record yet."""
  if read(folder) is None:
    write(folder, Run(command, uuid.uuid4().hex, digest))


def mark_export(folder: pathlib.Path) -> None:
  """Marks a folder as an exported policy, which a later export may replace."""
  text = json.dumps({'program': 'stppo_jax'}) + '\n'
  (folder / _EXPORTED).write_text(text, 'utf-8')


def newest_step(folder: pathlib.Path) -> int:
  """Returns the step of the newest checkpoint of a run; 0 if it has none."""
  checkpoints = folder / 'checkpoints'
  names = os.listdir(checkpoints) if checkpoints.is_dir() else []
  return max((int(name) for name in names if name.isdecimal()), default=0)


def make_aside(folder: pathlib.Path) -> pathlib.Path:
  """Makes the next folder aside-N, for files that a start moves away."""
  asides = (folder / f'{ASIDE}{number}' for number in itertools.count(1))
  aside = next(path for path in asides if not path.exists())
  aside.mkdir()
  return aside


def move_all_aside(folder: pathlib.Path) -> pathlib.Path | None:
  """Moves the files of a run into a new folder aside-N in the same folder.

  The lock, compiled programs and earlier folders aside-N stay in their place.

  Returns:
    The new folder; None if there were no files to move.
  """
  names = _others(folder)
  if not names:
    return None
  aside = make_aside(folder)
  # run.json is moved last. If a start is killed in between, the folder is still
  # known as the folder of a run.
  for name in sorted(names, key=lambda name: name == IDENTITY):
    (folder / name).rename(aside / name)
  return aside


def _json(path: pathlib.Path) -> dict[str, Any]:
  """Returns the JSON object in a file; {} if it cannot be read."""
  try:
    return parse(path.read_bytes())
  except OSError:
    return {}


def parse(data: bytes) -> dict[str, Any]:
  """Returns the object that JSON text describes; {} if it is no object."""
  try:
    content = json.loads(data)
  except (ValueError, RecursionError):
    return {}
  return content if isinstance(content, dict) else {}
