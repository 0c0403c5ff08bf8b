"""Builds a data set: fetches or finds its files, reads them and writes it."""

from collections.abc import Mapping
import pathlib
import re

from stppo_jax.data import catalogue
from stppo_jax.data import layout
from stppo_jax.data import raw_files
from stppo_jax.data import tables

# The name is part of a path and of a mixture, so it has no slash and no space.
_NAME = re.compile(r'[a-zA-Z0-9][\w.-]*', re.ASCII)


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
    name: a key of `catalogue.PUBLISHED`, or any name for files of questions.
    from_files: a folder or an archive with the original files, or SPLIT:FILE
      pairs with commas between them; '' to fetch the original files.
    mirror: the address of a folder that has the originals under their names;
      '' for the addresses of their authors.

  Raises:
    FilesMissing: if files are needed that cannot be fetched or were not given.
    OSError, ValueError: if a file is missing or malformed; the message is one
      line.
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
  # This import takes a second, so it comes after the check of the arguments.
  from stppo_jax.data import tfds_store

  entry = catalogue.PUBLISHED.get(name)
  with raw_files.corpus_file(layout.corpus(root, name)) as keep:
    splits = raw_files.Reader(name, keep=keep).read(files)
    return tfds_store.build(
      root,
      name,
      splits,
      description=entry.title if entry else name,
      home=entry.home if entry else '',
      licence=entry.licence if entry else '',
    )


def _given(name: str, from_files: str) -> raw_files.Files:
  """Returns the files of each split that the user has given."""
  pairs = [pair.partition(':') for pair in from_files.split(',')]
  if all(split in catalogue.SPLITS and file for split, _, file in pairs):
    files: dict[str, list[tables.TableFile]] = {}
    for split, _, file in pairs:
      if not pathlib.Path(file).is_file():
        raise FileNotFoundError(f'{file}: no such file')
      files.setdefault(split, []).append(tables.TableFile(pathlib.Path(file)))
    return files
  place = pathlib.Path(from_files)
  if name not in catalogue.PUBLISHED:
    raise raw_files.FilesMissing(
      f'--from_files={from_files}: must be SPLIT:FILE,... for {name}, with '
      f'splits among {", ".join(catalogue.SPLITS)}; published data sets: '
      + ', '.join(catalogue.PUBLISHED)
    )
  if not place.exists():
    raise FileNotFoundError(f'{place}: no such file or folder')
  return raw_files.in_place(name, place)


def _fetched(root: pathlib.Path, name: str, mirror: str) -> raw_files.Files:
  """Returns the files of each split, fetched from the web."""
  if name not in catalogue.PUBLISHED:
    choices = ', '.join(catalogue.PUBLISHED)
    raise raw_files.FilesMissing(
      f'{name}: not a published data set, so its files must be given with '
      f'--from_files=train:FILE,test:FILE; published: {choices}'
    )
  urls = _urls(name, mirror)
  from stppo_jax.data import tfds_store

  try:
    tfds_store.download(root, urls)
  except OSError as error:
    raise raw_files.FilesMissing(
      f'{name}: cannot fetch {error}; {raw_files.needed(name)}'
    ) from error
  return raw_files.in_place(name, root / layout.DOWNLOADS / name)


def _urls(name: str, mirror: str) -> Mapping[str, str]:
  """Returns the address of each file, by its place among the downloads.

  Raises:
    FilesMissing: if a file has no address.
  """
  entry = catalogue.PUBLISHED[name]
  urls = {}
  for original in entry.originals:
    download = original.download or original.pattern
    url = f'{mirror.rstrip("/")}/{download}' if mirror else original.url
    if not url:
      raise raw_files.FilesMissing(
        f'{name}: its files cannot be fetched by a program; '
        f'{raw_files.needed(name)}'
      )
    urls[f'{name}/{download}'] = url
  return urls
