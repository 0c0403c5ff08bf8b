"""Scores saved dialogues again, and compares with the scores that they have."""

from collections.abc import Iterator
from collections.abc import Mapping
import json
import pathlib
from typing import Any
from typing import NamedTuple

from stppo_jax import types
from stppo_jax.data import tables
from stppo_jax.envs import rewards

_FIELDS = ('id', 'golden_answers', 'prompt', 'turns', 'scores', 'status')


class Rescored(NamedTuple):
  """A dialogue with two exact matches.

  Attributes:
    where: the file and the line.
    record: the dialogue.
    answer: the answer that the scorer finds; None if it finds none.
    score: its exact match or, for a question with options, its accuracy.
    saved: the one that the dialogue was saved with.
  """

  where: str
  record: Mapping[str, Any]
  answer: str | None
  score: float
  saved: float


def rescore(path: pathlib.Path, scope: str) -> Iterator[Rescored]:
  """Yields the dialogues of a file, scored again.

  Dialogues that the infrastructure failed are left out.

  Args:
    path: a file of `trajectory_metrics.record` lines.
    scope: a key of `rewards.SCOPES`.

  Raises:
    OSError: the file cannot be read.
    ValueError: a line is no dialogue of a search; names file and line.
  """
  with open(path, encoding='utf-8') as file:
    for number, line in tables.numbered_lines(file, path):
      if not line.strip():
        continue
      where = f'{path}:{number}'
      try:
        record = json.loads(line)
        missing = [name for name in _FIELDS if name not in record]
        if not missing and rewards.EXACT_MATCH not in record['scores']:
          missing = [f'scores.{rewards.EXACT_MATCH}']
        if missing:
          raise ValueError(f'no "{missing[0]}"')
      except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f'{where}: not a dialogue: {error}') from error
      if record['status'] != types.TrajectoryStatus.INFRA_ERROR.value:
        yield _rescored(where, record, scope)


def _rescored(where: str, record: Mapping[str, Any], scope: str) -> Rescored:
  texts = [turn['text'] for turn in record['turns']]
  answer = rewards.SCOPES[scope](record['prompt'], texts)
  options = record.get('options') or {}
  question = types.Question(
    id=record['id'],
    text='',
    golden_answers=tuple(record['golden_answers']),
    data_set='',
    kind='choice' if options else 'open',
    options=options,
  )
  score = 0.0
  if answer is not None:
    score = rewards.answer_scores(question, answer)[rewards.EXACT_MATCH]
  saved = record['scores'][rewards.EXACT_MATCH]
  return Rescored(where, record, answer, score, saved)
