"""The folders that commands write to: which are refused, and who wrote them.

    WORKDIR/run.json      the command that writes there, and the run's id
           /aside-1/      files that a later start has moved away
           /compiled/     compiled programs, which every start may use
    EXPORT/export.json    says that the folder is an exported policy

A command writes to a folder only if it is new or empty, or if the same command
wrote it before. So it never replaces the files of a model, of a data set, or of
another program.
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
# The version of the files of a run. Files that a reader of today would
# misunderstand get a higher number, which run.json then has.
SCHEMA = 1
_RUNS = ('train', 'sft', 'prefer')  # commands that can write to a bucket
IDENTITY, _EXPORTED = 'run.json', 'export.json'
MARKS = IDENTITY, _EXPORTED
ASIDE = 'aside-'
PROBE = 'probe-'  # a file that all hosts of a run must see
# Names the bucket, in a folder of this machine that stands for a folder there.
ADDRESS = '.address'
COMPILED = 'compiled'
METRICS = 'metrics.jsonl'  # a line for each step
MANIFEST = 'manifest/metadata'  # the file of a checkpoint that describes it
# Sections of the config that every record of a run has.
_SECTIONS = ('algorithm', 'model', 'rollout')
# The bytes that every file of a kind begins with.
_BEGINNINGS = {'npz': b'PK', 'png': b'\x89PNG'}
_ADVICE = 'give a folder that is new or empty'


@dataclasses.dataclass(frozen=True)
class Run:
  """The identity of the run of a folder.

  Attributes:
    command: the command that writes there.
    run_id: an id that no other run has.
    config_digest: the digest of the config keys that define the run.
    has_older_checkpoints: whether checkpoints without an id are the run's own,
      since a version that wrote no ids began it.
    has_saved: whether it has saved a checkpoint.
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
  """Returns the reasons, one line each, why a command must not write there.

  Args:
    folder: the folder that a flag names; it may not exist yet.
    flag: the flag, such as '--workdir'.
    command: the command that would write there.
    reads: directories that the command reads and must not change, keyed by the
      flag or config key that names them.
    may_lie_inside: whether the folder may lie in one of these directories.
    expected: names of files that the folder may hold although the command has
      not written them.
  """
  path, start = pathlib.Path(folder), f'{flag}={folder}: '
  # As a path, gs://bucket/run would be a folder named `gs:` here.
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
  except OSError as error:  # no permission, or no possible name
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
  """Returns the reasons why a command must not write to an address."""
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
  """Returns the reasons why a command must not write to a file.

  Args:
    file: the file that a flag names.
    flag: the flag, such as '--out'.
    kind: npz or png.
    reads: directories that must stay as they are, as in `problems`.
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
  """Returns all names in a folder except those that a killed start may leave.

  A start that was killed early leaves its lock, a probe, an incomplete
  run.json, compiled programs, and what it moved aside.
  """
  names = os.listdir(folder) if folder.is_dir() else []
  return sorted(
    name
    for name in names
    if name not in (lock.NAME, f'{IDENTITY}.new', COMPILED, ADDRESS)
    and not name.startswith((ASIDE, PROBE))
  )


def address(folder: pathlib.Path) -> str:
  """Returns the address that a folder stands for; '' for other folders."""
  for parent in (folder, *folder.parents):
    with contextlib.suppress(OSError):
      place = (parent / ADDRESS).read_text()
      below = folder.relative_to(parent)
      return f'{place}/{below}' if below.parts else place
  return ''


def _relation(path: pathlib.Path, other: pathlib.Path) -> str:
  """Returns 'is', 'holds' or 'lies in'; '' for separate folders."""
  path, other = path.resolve(), other.resolve()
  if path == other:
    return 'is'
  if other.is_relative_to(path):
    return 'holds'
  return 'lies in' if path.is_relative_to(other) else ''


def command_of(folder: pathlib.Path) -> str:
  """Returns the command that wrote a folder; '' if none of ours did.

  The runs of earlier versions are known by their config.
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
  """Returns the command that recorded a config."""
  if 'command' in config:
    return config['command']
  return 'prefer' if 'batch_sha256' in config else 'train'


def read(folder: pathlib.Path) -> Run | None:
  """Returns the identity of the run of a folder; None if there is none."""
  try:
    return Run(**_json(folder / IDENTITY))
  except TypeError:
    return None


def schema(folder: pathlib.Path) -> int:
  """Returns the version of a run's files, see `SCHEMA`."""
  number = _json(folder / IDENTITY).get('schema', SCHEMA)
  # -1 is no version that anything reads.
  return number if isinstance(number, int) else -1


def write(folder: pathlib.Path, run: Run) -> None:
  """Records the identity of the run of a folder."""
  text = json.dumps(dataclasses.asdict(run), indent=2) + '\n'
  atomic_files.replace(folder / IDENTITY, text.encode())


def mark(folder: pathlib.Path, command: str, digest: str = '') -> None:
  """Records which command writes a folder, unless a record is there."""
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
  """Makes the next folder for files that a start moves away."""
  asides = (folder / f'{ASIDE}{number}' for number in itertools.count(1))
  aside = next(path for path in asides if not path.exists())
  aside.mkdir()
  return aside


def move_all_aside(folder: pathlib.Path) -> pathlib.Path | None:
  """Moves all that a run has left aside; returns where, None for nothing."""
  names = _others(folder)
  if not names:
    return None
  aside = make_aside(folder)
  # The identity is last: without it, a folder that a killed start has left half
  # empty would not be known as the run's.
  for name in sorted(names, key=lambda name: name == IDENTITY):
    (folder / name).rename(aside / name)
  return aside


def _json(path: pathlib.Path) -> dict[str, Any]:
  """Returns the object in a file; {} if it cannot be read."""
  try:
    return parse(path.read_bytes())
  except OSError:
    return {}


def parse(data: bytes) -> dict[str, Any]:
  """Returns the object that JSON describes; {} if it is something else."""
  try:
    content = json.loads(data)
  except (ValueError, RecursionError):
    return {}
  return content if isinstance(content, dict) else {}
