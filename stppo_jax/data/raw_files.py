"""Reads the original files of a data set into questions and passages."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from stppo_jax import types
from stppo_jax.data import catalogue
from stppo_jax.data import formats
from stppo_jax.data import readers
from stppo_jax.data import tables

Files = Mapping[str, Sequence[tables.TableFile]]  # the files of each split
Passages = dict[str, types.Passage]  # the passages by their ids


def needed(name: str) -> str:
  """Returns a message that names the files of a data set and their source."""
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
    place: the folder or the archive that holds the files. A split without a
      file in this place is left out.

  Raises:
    ValueError: if there is no file of questions, or if the file of test ids is
      missing; the message names all files that are needed.
  """
  found: dict[str, list[tables.TableFile]] = {}
  originals = catalogue.PUBLISHED[name].originals
  for original in originals:
    for file in tables.find(place, original.pattern):
      found.setdefault(original.split, []).append(file)
  # A split may be absent. The file of test ids must not be absent, because it
  # divides the questions into splits.
  needed_splits = {original.split for original in originals}
  undivided = catalogue.TEST_IDS in needed_splits - found.keys()
  if undivided or not found.keys() - {catalogue.TEST_IDS}:
    raise ValueError(f'{name}: files are missing in {place}; {needed(name)}')
  return found


def read(
  name: str, files: Files
) -> tuple[dict[str, list[types.Question]], Passages]:
  """Returns the questions of each split, and the passages that came with them.

  Args:
    name: the name of the data set.
    files: the files of each split.

  Raises:
    FileNotFoundError, ValueError: if a file is missing or malformed, or an id
      occurs twice; the message is one line with the file and the line.
  """
  passages: Passages = {}
  splits = {
    split: _read_split(name, split, parts, passages)
    for split, parts in files.items()
    if split != catalogue.TEST_IDS
  }
  if catalogue.TEST_IDS in files:
    test = tables.keys(files[catalogue.TEST_IDS][0])
    questions = splits['train']
    splits['train'] = [q for q in questions if q.id not in test]
    splits['test'] = [q for q in questions if q.id in test]
  return {split: found for split, found in splits.items() if found}, passages


def _read_split(
  name: str, split: str, files: Sequence[tables.TableFile], passages: Passages
) -> list[types.Question]:
  """Returns the questions of a split; adds their paragraphs to `passages`."""
  file_of_id: dict[tuple[str, str], tables.TableFile] = {}
  questions = []
  for file in files:
    for question in _read_file(name, split, file, passages):
      # `tables.read` refuses an id that occurs twice in one file, but a split
      # may have several files.
      key = question.data_set, question.id
      first = file_of_id.setdefault(key, file)
      if first is not file:
        raise ValueError(
          f'{file}: duplicate id {question.id!r}, first in {first}'
        )
      questions.append(question)
  return questions


def _read_file(
  name: str, split: str, file: tables.TableFile, passages: Passages
) -> list[types.Question]:
  entry = catalogue.PUBLISHED.get(name)
  path = pathlib.PurePosixPath(file.member or file.path.name)

  def parse(row: Any, number: int) -> types.Question:
    if entry is None or readers.is_question(row):
      fields = readers.with_our_names(row)
    elif isinstance(row, Mapping):
      fields = entry.read({**row, formats.FILE: path.name})
    else:
      raise ValueError('expected an object')
    # `number` counts the rows of one file. If a split has several files, a
    # prefix keeps the ids of their rows apart.
    identity = f'{fields.pop("id_prefix", "")}{split}_{number}'
    fields = {'id': identity, 'dataset': name, **fields}
    gold = [*fields.get('gold_pids', ())]
    for title, text, is_gold in fields.pop('context', ()):
      # The id of a passage is a hash of its content, so that a paragraph of
      # several questions becomes one passage.
      digest = hashlib.sha256(f'{title}\n{text}'.encode()).hexdigest()[:16]
      passage = types.Passage(f'{name}-{digest}', title, text)
      passages.setdefault(passage.id, passage)
      if is_gold:
        gold.append(passage.id)
    return readers.parse_question(fields | {'gold_pids': gold})

  if entry is not None:
    file = dataclasses.replace(file, columns=entry.columns)
  return tables.read(
    file, parse, noun='questions', space=lambda question: question.data_set
  )


def write_corpus(path: pathlib.Path, passages: Iterable[types.Passage]) -> None:
  """Replaces a file of passages; removes the file if there is no passage."""
  lines = [
    json.dumps(
      {'pid': p.id, 'title': p.title, 'text': p.text}, ensure_ascii=False
    )
    for p in passages
  ]
  if not lines:
    path.unlink(missing_ok=True)  # the file of an earlier build
    return
  partial = path.with_name(f'{path.name}.partial')
  partial.write_text('\n'.join([*lines, '']), encoding='utf-8')
  partial.replace(path)
