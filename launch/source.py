"""The source of a run: an archive of the code and of files for its config.

A worker unpacks the archive and runs the code there. The archive has the files
as they are on this machine, committed or not: the package, the config file, and
the files of the current folder that the config has imported or names. The name
of the archive has the hash of its content, so equal sources have one name.
"""

import bz2
from collections.abc import Iterator, Mapping
import functools
import hashlib
import io
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
from typing import NamedTuple

from launch import launchers
from stppo_jax import exits

_ROOT = launchers.ROOT
_PACKAGE = 'stppo_jax'
# In a clone, the package has links of these names. An installed package has
# folders of these names.
_LINKED = ('assets', 'configs')
_FOLDERS = (*_LINKED, 'launch', 'studies', _PACKAGE)
_LEFT_OUT = ('.pyc', '.png')
_DIFF = 'source.diff'  # the commit, and the changes since


class Source(NamedTuple):
  """An archive in the formats tar and bzip2, and the name of its file."""

  data: bytes
  name: str


def config_flag(config: str) -> str:
  """Returns FILE.py[:ALGORITHM] with the path of the file in the archive."""
  file, colon, algorithm = config.partition(':')
  path = pathlib.Path(os.path.abspath(file))
  if not path.is_file():
    return config  # a config file of the package
  here = pathlib.Path.cwd()
  name = path.relative_to(here) if path.is_relative_to(here) else path.name
  return f'{name}{colon}{algorithm}'


def pack(
  config: str, paths: Mapping[str, str], *, assets: bool = True
) -> Source:
  """Returns the source of a run whose config was loaded by this process.

  Args:
    config: FILE.py[:ALGORITHM].
    paths: the files and folders that the config names, by their keys.
    assets: whether the source has the models that are installed with the
      package.

  Raises:
    Misconfigured: if workers could not read a path; the message has a line for
      each such path.
  """
  files, errors = dict(_own()), []
  here = pathlib.Path.cwd()
  file = pathlib.Path(config.partition(':')[0])
  if file.is_file():
    files[config_flag(str(file))] = file
  names = []
  for key, text in paths.items():
    path = pathlib.Path(text)
    if path.is_absolute() or '://' in text:
      continue
    is_own = path.parts[0] in _FOLDERS and path.exists()
    if not path.is_file() and not is_own or '..' in path.parts:
      errors.append(
        f'--config.{key}={text}: must be a file of this machine, which is sent '
        'to the workers, or an absolute path or an address that they can read'
      )
    names.append(text)
  if errors:
    raise exits.Misconfigured('\n'.join(errors))
  # Modules in other folders of the clone were imported by this program, not by
  # a config.
  own = *_FOLDERS, 'benchmarks', 'tests'
  known = [sys.prefix, sys.base_prefix, *(f'{_ROOT}/{x}/' for x in own)]
  modules = [getattr(x, '__file__', None) for x in [*sys.modules.values()]]
  names += [x for x in modules if x and not x.startswith(tuple(known))]
  for name in names:
    path = pathlib.Path(os.path.abspath(name))
    if path.is_file() and path.is_relative_to(here):
      files[str(path.relative_to(here))] = path
  if not assets:
    files = {
      x: path for x, path in files.items() if x.split('/')[0] != 'assets'
    }
  with io.BytesIO() as raw:
    with tarfile.open(fileobj=raw, mode='w') as archive:
      for name in _LINKED:
        link = tarfile.TarInfo(f'{_PACKAGE}/{name}')
        link.type, link.linkname = tarfile.SYMTYPE, f'../{name}'
        archive.addfile(link)
      for name, path in sorted(files.items()):
        if name.startswith(tuple(f'{_PACKAGE}/{x}/' for x in _LINKED)):
          continue  # workers find this file through the link
        _add(archive, name, path.read_bytes(), os.access(path, os.X_OK))
      _add(archive, _DIFF, _difference(), False)
    data = _compressed(raw.getvalue())
  digest = hashlib.sha256(data).hexdigest()[:16]
  return Source(data, f'source-{digest}.tar.bz2')


# The runs of a sweep have the same source.
@functools.lru_cache(maxsize=4)
def _compressed(archive: bytes) -> bytes:
  # For so many texts, the result of bzip2 is a quarter smaller than that of
  # gzip. bzip2 writes no time, so equal files give equal bytes, whose hash is
  # in the name of the source.
  return bz2.compress(archive)


def unpack(source: Source, folder: pathlib.Path) -> pathlib.Path:
  """Unpacks a source into a new folder in `folder`; returns the new folder."""
  target = folder / source.name.partition('.')[0]
  # Several submissions may unpack the same source. Each writes a folder of its
  # own, and only a complete folder gets the name that jobs read.
  part = target.with_name(f'{target.name}.{os.getpid()}')
  if not target.exists():
    with tarfile.open(fileobj=io.BytesIO(source.data)) as archive:
      archive.extractall(part, filter='data')
    part.rename(target)
  return target


def _own() -> Iterator[tuple[str, pathlib.Path]]:
  """Yields each file of the package: its name in the archive, and its path."""
  for name in _FOLDERS:
    folder = _ROOT / name
    if name in _LINKED and not folder.exists():
      folder = _ROOT / _PACKAGE / name
    for parent, _, files in os.walk(folder):
      for file in files:
        path = pathlib.Path(parent, file)
        if path.suffix not in _LEFT_OUT:
          yield str(name / path.relative_to(folder)), path


def _add(
  archive: tarfile.TarFile, name: str, data: bytes, executable: bool
) -> None:
  entry = tarfile.TarInfo(name)
  entry.size, entry.mode = len(data), 0o755 if executable else 0o644
  archive.addfile(entry, io.BytesIO(data))


def _difference() -> bytes:
  """Returns the clone's commit and the changes since; b'' without git."""
  if not (_ROOT / '.git').exists() or not shutil.which('git'):
    return b''
  words = ['git', '-C', _ROOT, 'show', '--no-patch', '--format=%H', 'HEAD']
  commit = subprocess.run(words, capture_output=True, check=False).stdout
  words = ['git', '-C', _ROOT, 'diff', 'HEAD', '--', *_FOLDERS]
  return commit + subprocess.run(words, capture_output=True, check=False).stdout
