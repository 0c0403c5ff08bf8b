"""Builds, lists and shows data sets of questions."""

from collections.abc import Sequence
import json
import pathlib
from typing import Any

from stppo_jax import streams
from stppo_jax import types
from stppo_jax.data import building
from stppo_jax.data import catalogue
from stppo_jax.data import kinds
from stppo_jax.data import layout
from stppo_jax.data import mixtures
from stppo_jax.data import readers
from stppo_jax.data import tables
from stppo_jax.envs import environments


def build(
  root: pathlib.Path, name: str, *, from_files: str, mirror: str, force: bool
) -> None:
  """Builds a data set and prints the sizes and checksums of its splits.

  Args:
    root: the folder of the data sets.
    name: the name of the data set.
    from_files: where the original files are on this machine, see
      `building.build`; '' to fetch the files.
    mirror: the address from which the original files are fetched; '' to fetch
      each file from the address that its authors give.
    force: whether to build the data set again if it exists.
  """
  if name in layout.names(root) and not force:
    raise ValueError(f'{name}: built already in {root}; --force builds it anew')
  with streams.logged():
    summary = building.build(root, name, from_files=from_files, mirror=mirror)
  print(f'{name}: {layout.folder(root, name)}')
  for split, size in summary.sizes.items():
    print(f'  {split}: {size:,} questions, sha256 {summary.checksums[split]}')
  if layout.corpus(root, name).is_file():
    print(f'  passages: {layout.corpus(root, name)}')


def show_all(root: pathlib.Path | None) -> None:
  """Prints which data sets can be built, and which exist in `root`."""
  there = layout.names(root) if root else []
  for name in dict.fromkeys([*catalogue.PUBLISHED, *there]):
    if name in catalogue.PUBLISHED:
      entry = catalogue.PUBLISHED[name]
      source = entry.home
      if not all(original.url for original in entry.originals):
        source += ', needs --from_files'
      print(f'{name:16} {entry.title}; {entry.licence}; {source}')
    else:
      print(name)
    if root and name in there:
      from stppo_jax.data import tfds_store

      summary = tfds_store.summary(root, name)
      for split, size in summary.sizes.items():
        digest = summary.checksums[split]
        print(f'{"":16}   {split}: {size:,} questions, sha256 {digest}')


def show(
  root: pathlib.Path | None, name: str, *, start: int, count: int
) -> None:
  """Prints questions of a data set as text for a person.

  Args:
    root: the folder of the data sets; None if the user gave none.
    name: NAME or NAME:SPLIT of a data set, or a file of questions.
    start: the number of the first question to print; numbers begin at 0.
    count: the largest number of questions that are printed.
  """
  questions = _questions(root, name)
  if start >= len(questions):
    raise ValueError(
      f'--start={start}: {name} has {len(questions):,} questions'
    )
  print(f'{name}: {len(questions):,} questions')
  for number in range(start, min(start + count, len(questions))):
    print('\n' + streams.escape(_page(number, questions[number])))


def demonstrate(config: Any, *, count: int) -> None:
  """Prints the first demonstrations that `sft` imitates, as JSON lines.

  Args:
    config: the config of the run.
    count: the number of demonstrations that are printed.

  Raises:
    ValueError: the questions or the environment have no demonstrations; the
      message is one line.
  """
  questions = kinds.KINDS[config.data.name].load(config.data, seed=config.seed)
  kind = environments.find(config.env.name)
  environment = None
  if not kind.needs_retriever:
    environment = kind.from_options(config.env.to_dict(), None)
  teacher = kinds.demonstrations_of(config, questions, environment)
  size = config.sft.batch_size
  for number in range(count):
    # The batches have the size that `sft` uses. If demonstrations have random
    # errors, these are drawn for each batch. So with another size, the printed
    # turns would not be the turns that `sft` imitates.
    step, row = divmod(number, size)
    if not row:
      batch = teacher.batch(step, size)
    question, turns = batch[row]
    print(json.dumps(readers.fields_of(question) | {'turns': turns}))


def _questions(
  root: pathlib.Path | None, name: str
) -> Sequence[types.Question]:
  """Returns the questions of a file, or of a data set that was built."""
  if pathlib.Path(name).suffix in (*tables.SUFFIXES, '.gz'):
    return readers.read_questions(name)
  if root is None:
    raise ValueError(
      f'{name}: does not end like a file of questions '
      f'({", ".join(tables.SUFFIXES)}); if it is the name of a data set, give '
      'the folder of the data sets with --root'
    )
  (element,) = mixtures.parse(name)
  from stppo_jax.data import tfds_store

  splits = [element.split] if element.split else catalogue.SPLITS
  return tfds_store.open_split(root, element.name, splits)


def _page(number: int, question: types.Question) -> str:
  """Returns a text that shows a question, its number, options and answers."""
  lines = [f'[{number}] {question.data_set} {question.id}', question.text]
  lines += [f'  {key}. {text}' for key, text in question.options.items()]
  lines.append('= ' + ' | '.join(question.golden_answers))
  if question.hops:
    lines.append(f'hops: {question.hops}')
  if question.gold_passages:
    lines.append('gold passages: ' + ', '.join(question.gold_passages))
  return '\n'.join(lines)
