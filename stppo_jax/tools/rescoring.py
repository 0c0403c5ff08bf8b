"""Scores saved dialogues again, and compares the new and the saved scores."""

from collections.abc import Iterator, Mapping, Sequence
import json
import pathlib
from typing import Any, NamedTuple

from stppo_jax import streams
from stppo_jax import types
from stppo_jax.data import tables
from stppo_jax.envs import rewards

_FIELDS = ('id', 'golden_answers', 'prompt', 'turns', 'scores', 'status')


class Rescored(NamedTuple):
  """A dialogue with its saved score and its new score.

  Attributes:
    where: the file and the line number of the dialogue.
    record: the saved record of the dialogue.
    answer: the answer that the new scorer finds; None if it finds none.
    score: the new score, 0 or 1: the exact match of `answer` with the golden
      answers. If the question has options, the score is 1 if `answer` names
      right options and no wrong ones. Without an answer, the score is 0.
    saved: the score of the same kind that was saved with the dialogue.
  """

  where: str
  record: Mapping[str, Any]
  answer: str | None
  score: float
  saved: float


def rescore(path: pathlib.Path, scope: str) -> Iterator[Rescored]:
  """Yields each dialogue of a file with its saved and its new score.

  Dialogues that failed because of the infrastructure are left out.

  Args:
    path: the file of dialogues. Each of its lines is a result of
      `trajectory_metrics.record` as JSON.
    scope: the scorer that finds the answer, a key of `rewards.SCOPES`.

  Raises:
    OSError: the file cannot be read.
    ValueError: a line is not the record of a search dialogue; the message
      names the file and the line.
  """
  # Without `surrogateescape`, a byte that is not UTF-8 would end the reading
  # with an error that names no line.
  with open(path, encoding='utf-8', errors='surrogateescape') as file:
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
  # A dialogue without an answer scores 0 here, as it does in training.
  score = 0.0
  if answer is not None:
    score = rewards.answer_scores(question, answer)[rewards.EXACT_MATCH]
  saved = record['scores'][rewards.EXACT_MATCH]
  return Rescored(where, record, answer, score, saved)


def show(rescored: Sequence[Rescored], scope: str, *, most: int) -> None:
  """Prints both mean scores, and the dialogues whose two scores differ.

  Args:
    rescored: the dialogues, at least one.
    scope: the scorer that found the new answers, a key of `rewards.SCOPES`.
    most: the largest number of dialogues to print.
  """
  count = len(rescored)
  differing = [entry for entry in rescored if entry.score != entry.saved]
  gained = sum(entry.score > entry.saved for entry in differing)
  print(f'{count:,} dialogues')
  print(f'saved      em {sum(e.saved for e in rescored) / count:.4f}')
  print(f'{scope:10} em {sum(e.score for e in rescored) / count:.4f}')
  print(
    f'{len(differing):,} dialogues differ in score: {gained:,} score higher '
    f'with {scope}, {len(differing) - gained:,} score higher in the file'
  )
  for entry in differing[:most]:
    golden = ' | '.join(entry.record['golden_answers'])
    answer = 'none' if entry.answer is None else repr(entry.answer)
    line = (
      f'{entry.where}: {entry.record["id"]}: saved {entry.saved:g}, {scope} '
      f'{entry.score:g}; the answer found is {answer}; golden: {golden}'
    )
    print(streams.escape(line))
