"""Builds a data set from its original files, which it fetches if needed."""

import http.client
import logging
import pathlib
import re
import shutil
import urllib.request

from stppo_jax.data import catalogue
from stppo_jax.data import layout
from stppo_jax.data import raw_files
from stppo_jax.data import tables

# The name of a data set is part of a path and of the text of a mixture, so it
# has no slash and no space.
_NAME = re.compile(r'[a-zA-Z0-9][\w.-]*', re.ASCII)
_TIMEOUT = 30.0  # the seconds that a server may take to send more data


def build(
  root: pathlib.Path,
  name: str,
  *,
  from_files: str = '',
  mirror: str = '',
):
  """Builds a data set in a folder; returns its `tfds_store.Summary`.

  Args:
    root: the folder of the data sets.
    name: a key of `catalogue.PUBLISHED`; or any other name, for a data set that
      is built from the user's own files of questions.
    from_files: a folder or an archive with the original files, or SPLIT:FILE
      pairs with commas between them; '' to fetch the original files.
    mirror: the address of a web folder that has the original files under their
      names; '' to fetch each file from the address that its authors give.

  Raises:
    OSError, ValueError: if a file is missing, malformed or cannot be fetched;
      the message is one line.
  """
  if not _NAME.fullmatch(name):
    raise ValueError(
      f'{name}: must be a name of letters, digits and _ . -, which begins with '
      'a letter or a digit'
    )
  if mirror and not mirror.startswith(('http://', 'https://')):
    raise ValueError(
      f'--mirror={mirror}: must be an address, http://... or https://...'
    )
  if from_files:
    files = _given(name, from_files)
  else:
    files = _fetched(root, name, mirror)
  # All files are read before anything is written, so that a malformed file
  # leaves an earlier data set of this name unchanged.
  splits, passages = raw_files.read(name, files)
  # This import takes a second, so it comes after all checks of the input.
  from stppo_jax.data import tfds_store

  summary = tfds_store.build(root, name, splits)
  raw_files.write_corpus(layout.corpus(root, name), passages.values())
  return summary


def _given(name: str, from_files: str) -> raw_files.Files:
  """Returns the files that the user gives in `from_files`, by split."""
  pairs = [pair.partition(':') for pair in from_files.split(',')]
  if all(split in catalogue.SPLITS and file for split, _, file in pairs):
    files: dict[str, list[tables.TableFile]] = {}
    for split, _, file in pairs:
      files.setdefault(split, []).append(tables.TableFile(pathlib.Path(file)))
    return files
  place = pathlib.Path(from_files)
  if name not in catalogue.PUBLISHED:
    raise ValueError(
      f'--from_files={from_files}: must be SPLIT:FILE,... for {name}, with '
      f'splits among {", ".join(catalogue.SPLITS)}; published data sets: '
      + ', '.join(catalogue.PUBLISHED)
    )
  if not place.exists():
    raise FileNotFoundError(f'{place}: no such file or folder')
  return raw_files.in_place(name, place)


def _fetched(root: pathlib.Path, name: str, mirror: str) -> raw_files.Files:
  """Fetches the files that are not on disk; returns all files by split."""
  if name not in catalogue.PUBLISHED:
    choices = ', '.join(catalogue.PUBLISHED)
    raise ValueError(
      f'{name}: not a published data set, so its files must be given with '
      f'--from_files=train:FILE,test:FILE; published data sets: {choices}'
    )
  folder = root / layout.DOWNLOADS / name
  for original in catalogue.PUBLISHED[name].originals:
    file = original.download or original.pattern
    url = f'{mirror.rstrip("/")}/{file}' if mirror else original.url
    if not url:
      raise ValueError(
        f'{name}: its files cannot be fetched by a program; '
        f'{raw_files.needed(name)}'
      )
    # `_download` gives a file this name only when the file is complete.
    if (folder / file).is_file():
      continue
    try:
      _download(url, folder / file)
    except (OSError, http.client.HTTPException) as error:
      raise ValueError(
        f'{name}: cannot fetch {url}: {error}; {raw_files.needed(name)}'
      ) from error
  return raw_files.in_place(name, folder)


def _download(url: str, path: pathlib.Path) -> None:
  """Fetches a file; `path` exists only when the file is complete.

  Raises:
    OSError, HTTPException: if the file cannot be fetched.
  """
  logging.getLogger(__name__).info('fetching %s', url)
  partial = path.with_name(f'{path.name}.partial')
  with urllib.request.urlopen(url, timeout=_TIMEOUT) as reply:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(partial, 'wb') as file:
      shutil.copyfileobj(reply, file)
  # `copyfileobj` raises no error if the connection ends early, so the number of
  # bytes is compared.
  size, expected = partial.stat().st_size, reply.headers['Content-Length']
  if expected is not None and size != int(expected):
    raise OSError(f'received {size} of {expected} bytes')
  partial.replace(path)
