"""Real questions with passages: a few that are shipped, and a folder of many.

The folder is named by STPPO_DATA, or is shared/data beside the repository.
"""

import json
import os
import pathlib

SHIPPED = pathlib.Path(__file__).parent / 'wiki'
_ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = pathlib.Path(
  os.environ.get('STPPO_DATA', _ROOT.parent / 'shared' / 'data')
)


def questions(path):
  """Returns the questions of a file, as JSON values."""
  return [json.loads(line) for line in path.read_text('utf-8').splitlines()]


def recall(lists, rows):
  """Returns the share of the rows whose list has the id of a gold passage.

  Args:
    lists: the ids of the passages that were found for each row.
    rows: the questions.
  """
  hits = [bool({*ids} & {*row['gold_pids']}) for ids, row in zip(lists, rows)]
  return sum(hits) / len(hits)
