"""Reads the original files of a data set into questions and passages.

ROOT/NAME.corpus.jsonl    the paragraphs that come with the questions
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

from stppo_jax import types
from stppo_jax.data import catalogue
from stppo_jax.data import readers
from stppo_jax.data import tables

Files = Mapping[str, Sequence[tables.TableFile]]


class FilesMissing(ValueError):
  """Raised, in one line, if files that a data set needs were not given."""


def needed(name: str) -> str:
  """Returns a message on the files of a published data set and their home."""
  entry = catalogue.PUBLISHED[name]
  names = dict.fromkeys(original.pattern for original in entry.originals)
  return (
    f'give the original files with --from_files=FOLDER, which holds '
    f'{", ".join(names)} from {entry.home}, or files of questions with '
    '--from_files=train:FILE,test:FILE'
  )


def in_place(name: str, place: pathlib.Path) -> Files:
  """Returns the files of each split of a published data set.

  Args:
    name: a key of `catalogue.PUBLISHED`.
    place: the folder or the archive that holds them; splits without a file in
      it are left out.

  Raises:
    FilesMissing: if no file is there; the message names those that are needed.
  """
  entry = catalogue.PUBLISHED[name]
  found: dict[str, list[tables.TableFile]] = {}
  for original in entry.originals:
    for file in tables.find(place, original.pattern):
      found.setdefault(original.split, []).append(file)
  if not found.keys() - {catalogue.TEST_IDS}:
    raise FilesMissing(f'{name}: no original file in {place}; {needed(name)}')
  for original in entry.originals:
    # A split may be absent, but not what divides the questions into splits.
    if original.split == catalogue.TEST_IDS and original.split not in found:
      raise FilesMissing(
        f'{name}: no {original.pattern} in {place}; {needed(name)}'
      )
  return found


class Reader:
  """Reads the questions of a data set, and collects their paragraphs.

  Args:
    name: the name of the data set.
    keep: called with each new passage.
  """

  def __init__(
    self,
    name: str,
    *,
    keep: Callable[[types.Passage], None],
  ):
    self._name = name
    self._keep = keep
    self._kept: set[str] = set()

  def read(self, files: Files) -> dict[str, list[types.Question]]:
    """Returns the questions of each split.

    Raises:
      FileNotFoundError, ValueError: if a file is missing or malformed, or an id
        occurs twice; the message is one line with the file and the line.
    """
    splits = {}
    for split, parts in files.items():
      if split != catalogue.TEST_IDS:
        splits[split] = self._read_split(split, parts)
    if catalogue.TEST_IDS in files:
      (file, *_) = files[catalogue.TEST_IDS]
      test = tables.keys(file)
      questions = splits.pop('train')
      splits['train'] = [q for q in questions if q.id not in test]
      splits['test'] = [q for q in questions if q.id in test]
    return {
      split: questions for split, questions in splits.items() if questions
    }

  def _read_split(
    self, split: str, files: Sequence[tables.TableFile]
  ) -> list[types.Question]:
    questions, file_of_id = [], {}
    for file in files:
      for question in self._read_file(split, file):
        key = question.data_set, question.id
        first = file_of_id.setdefault(key, file)
        if first is not file:
          raise ValueError(
            f'{file}: duplicate id {question.id!r}, first in {first}'
          )
        questions.append(question)
    return questions

  def _read_file(
    self, split: str, file: tables.TableFile
  ) -> list[types.Question]:
    entry = catalogue.PUBLISHED.get(self._name)
    path = pathlib.PurePosixPath(file.member or file.path.name)

    def parse(row: Any, number: int) -> types.Question:
      if entry is None or readers.is_question(row):
        fields = readers.with_our_names(row)
      else:
        fields = entry.read(row, path)
      identity = f'{fields.pop("id_prefix", "")}{split}_{number}'
      fields = {'id': identity, 'dataset': self._name, **fields}
      fields['gold_pids'] = [
        *fields.get('gold_pids', ()),
        *self._gold_passages(fields.pop('context', ())),
      ]
      return readers.parse_question(fields)

    if entry is not None:
      file = dataclasses.replace(file, columns=entry.columns)
    return tables.read(
      file, parse, noun='questions', space=lambda question: question.data_set
    )

  def _gold_passages(self, context: Sequence[tuple]) -> Iterator[str]:
    """Keeps the paragraphs of a question; yields the ids of the gold ones."""
    for title, text, is_gold in context:
      digest = hashlib.sha256(f'{title}\n{text}'.encode()).hexdigest()[:16]
      identity = f'{self._name}-{digest}'
      if identity not in self._kept:
        self._kept.add(identity)
        self._keep(types.Passage(identity, title, text))
      if is_gold:
        yield identity


@contextlib.contextmanager
def corpus_file(
  path: pathlib.Path,
) -> Iterator[Callable[[types.Passage], None]]:
  """Yields a function that writes a passage to a new file of passages.

  The file gets its name at the end, unless the body raised. If there was no
  passage, no file is left, not even one of an earlier build. Its folders are
  made, and new ones that stay empty are removed.
  """
  made = [folder for folder in path.parents if not folder.exists()]
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f'{path.name}.partial')
  count = 0

  def keep(passage: types.Passage) -> None:
    nonlocal count
    count += 1
    row = {'pid': passage.id, 'title': passage.title, 'text': passage.text}
    file.write(json.dumps(row, ensure_ascii=False) + '\n')

  try:
    with open(partial, 'w', encoding='utf-8') as file:
      yield keep
    if count:
      os.replace(partial, path)
    else:
      path.unlink(missing_ok=True)
  finally:
    partial.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the first one that is not empty
      for folder in made:
        folder.rmdir()
