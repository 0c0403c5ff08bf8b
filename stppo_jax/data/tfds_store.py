"""Writes questions in the form of `tensorflow_datasets`, and reads them.

    ROOT/search_questions/NAME/VERSION    array_record files and their metadata

The builder needs no TensorFlow. Any program can read a built data set with
`tfds.builder_from_directory`. Importing `tensorflow_datasets` takes a second,
so only this module imports it, and other modules should import this module
inside a function.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import hashlib
import io
import json
import logging
import os
import pathlib
import tempfile
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds

from stppo_jax import types
from stppo_jax.data import catalogue
from stppo_jax.data import layout
from stppo_jax.data import readers

_CHECKSUMS = 'sha256'


class SearchQuestions(tfds.core.GeneratorBasedBuilder):
  """The builder of all data sets; each data set is one of its configurations.

  Args:
    data_set: the name of the data set.
    questions: the questions of each split.
    data_dir: the folder to build in.
  """

  VERSION = tfds.core.Version(layout.VERSION)
  name = layout.BUILDER
  # If `code_path` were a path, the library would look beside this module for
  # more files about the data set. To look for the files, the library would
  # import a package that is not installed with the library.
  code_path = None  # type: ignore[assignment]

  def __init__(
    self,
    data_set: str,
    questions: Mapping[str, Sequence[types.Question]],
    *,
    data_dir: str,
  ):
    self._questions = questions
    self._entry = catalogue.PUBLISHED.get(data_set)
    self._title = self._entry.title if self._entry else data_set
    config = tfds.core.BuilderConfig(name=data_set, description=self._title)
    super().__init__(config=config, data_dir=data_dir)

  def _info(self) -> tfds.core.DatasetInfo:
    text = tfds.features.Text()
    return tfds.core.DatasetInfo(
      builder=self,
      features=tfds.features.FeaturesDict(
        {
          'id': text,
          'dataset': text,
          'kind': text,
          'question': text,
          'answers': tfds.features.Sequence(text),
          # The options are pairs of letter and text, and not a dict by letter,
          # because the keys of a feature are fixed, but the letters differ
          # between questions.
          'options': tfds.features.Sequence({'letter': text, 'text': text}),
          'gold_pids': tfds.features.Sequence(text),
          'hops': np.int32,
        }
      ),
      description=self._title,
      homepage=self._entry.home if self._entry else '',
      license=self._entry.licence if self._entry else '',
      disable_shuffling=True,  # rows stay in the order of the files
      metadata=tfds.core.MetadataDict(
        {_CHECKSUMS: {k: checksum(v) for k, v in self._questions.items()}}
      ),
    )

  def _split_generators(self, dl_manager) -> dict[str, Iterator]:
    del dl_manager  # unused, because the files have been read already
    return {k: self._generate_examples(v) for k, v in self._questions.items()}

  def _generate_examples(self, questions) -> Iterator[tuple[int, dict]]:
    for number, question in enumerate(questions):
      fields = readers.fields_of(question)
      options = fields['options'].items()
      fields['options'] = [{'letter': k, 'text': x} for k, x in options]
      yield number, fields


class BuiltQuestions(Sequence[types.Question]):
  """The questions of a split, which are read from disk on access.

  Args:
    source: the data source of the split.
  """

  def __init__(self, source):
    self._source = source

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    if not 0 <= index < len(self):
      raise IndexError(index)
    return _question(self._source[int(index)])


class Summary(NamedTuple):
  """The sizes and the checksums of a data set that was built.

  Attributes:
    sizes: the number of questions of each split.
    checksums: the checksum of the questions of each split, see `checksum`.
  """

  sizes: Mapping[str, int]
  checksums: Mapping[str, str]


def build(
  root: pathlib.Path,
  name: str,
  splits: Mapping[str, Sequence[types.Question]],
) -> Summary:
  """Writes a data set, which replaces an earlier data set of the same name.

  The earlier data set stays unchanged until the new data set is complete.

  Args:
    root: the folder of the data sets.
    name: the name of the data set.
    splits: the questions of each split.
  """
  target = layout.folder(root, name)
  target.parent.mkdir(parents=True, exist_ok=True)
  # The temporary folder lies in `root`, because a folder can be renamed only
  # within a file system.
  with tempfile.TemporaryDirectory(prefix='.partial-', dir=root) as partial:
    with _quietly():
      builder = SearchQuestions(name, splits, data_dir=partial)
      builder.download_and_prepare(
        file_format='array_record',
        # By default, the library would first look for a data set of this name
        # in a bucket of its authors.
        download_config=tfds.download.DownloadConfig(try_download_gcs=False),
      )
    # A rename cannot replace a folder that holds files, so the earlier folder
    # is first moved into the temporary folder, which is deleted at the end. To
    # delete the earlier folder here would take longer, and a process that is
    # killed meanwhile would leave no data set in its place.
    if target.exists():
      target.rename(pathlib.Path(partial, 'replaced'))
    os.rename(builder.data_dir, target)
  return summary(root, name)


def summary(root: pathlib.Path, name: str) -> Summary:
  """Returns the sizes and the checksums of a data set that was built."""
  info = _builder(root, name).info
  sizes = {key: split.num_examples for key, split in info.splits.items()}
  return Summary(sizes, info.metadata[_CHECKSUMS])


def open_split(
  root: pathlib.Path, name: str, splits: Sequence[str]
) -> BuiltQuestions:
  """Returns the questions of the first split in `splits` that exists.

  Raises:
    ValueError: if the data set has none of the splits, or was not built; the
      message is one line.
  """
  layout.check_built(root, name)
  builder = _builder(root, name)
  for split in splits:
    if split in builder.info.splits:
      return BuiltQuestions(builder.as_data_source(split=split))
  raise ValueError(
    f'{name}: no split {" or ".join(splits)}; choices: '
    + ', '.join(builder.info.splits)
  )


def checksum(questions: Sequence[types.Question]) -> str:
  """Returns the SHA-256 of the questions, written in order as lines of JSON."""
  digest = hashlib.sha256()
  for question in questions:
    line = json.dumps(readers.fields_of(question), ensure_ascii=False)
    digest.update(f'{line}\n'.encode())
  return digest.hexdigest()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
  """Silences progress bars, notices and warnings of `tensorflow_datasets`."""
  tfds.disable_progress_bar()
  log = logging.getLogger('absl')
  level = log.level
  log.setLevel(logging.ERROR)
  try:
    with contextlib.redirect_stdout(io.StringIO()):
      yield
  finally:
    log.setLevel(level)


def _builder(root: pathlib.Path, name: str) -> Any:
  with _quietly():
    return tfds.builder_from_directory(layout.folder(root, name))


def _question(row: Mapping[str, Any]) -> types.Question:
  """Returns the question of a row, whose strings `tfds` reads as bytes."""
  texts = lambda values: [value.decode() for value in values]
  options = row['options']
  return readers.parse_question(
    {key: x.decode() for key, x in row.items() if isinstance(x, bytes)}
    | {
      'answers': texts(row['answers']),
      'options': dict(zip(texts(options['letter']), texts(options['text']))),
      'gold_pids': texts(row['gold_pids']),
      'hops': int(row['hops']),
    }
  )
