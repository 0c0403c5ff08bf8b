"""The paths of the data sets that `data/tfds_store.py` writes.

ROOT/search_questions/NAME/VERSION    the data set NAME
ROOT/NAME.corpus.jsonl                the paragraphs of the questions, if any
ROOT/downloads/NAME                   the original files of NAME
"""

import pathlib

BUILDER = 'search_questions'
VERSION = '1.0.0'
DOWNLOADS = 'downloads'


def folder(root: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the folder of a data set; the folder need not exist."""
  return root / BUILDER / name / VERSION


def corpus(root: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the path of the file that holds a data set's paragraphs."""
  return root / f'{name}.corpus.jsonl'


def names(root: pathlib.Path) -> list[str]:
  """Returns the names of the data sets that were built, sorted."""
  files = (root / BUILDER).glob(f'*/{VERSION}/dataset_info.json')
  return sorted(path.parents[1].name for path in files)


def check_built(root: pathlib.Path, name: str) -> None:
  """Raises ValueError, with one line, if a data set has not been built."""
  if name not in names(root):
    there = ', '.join(names(root)) or 'none'
    raise ValueError(
      f'{name}: not built in {root} (built there: {there}); to build it: '
      f'python -m stppo_jax data build {name} --root={root}'
    )
