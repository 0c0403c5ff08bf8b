"""Computes statistics of evaluated dialogues, and makes tables of statistics.

A record is a line of `dialogues.jsonl`, see `tools/evaluation.py`.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from stppo_jax import streams
from stppo_jax import text as text_lib
from stppo_jax.envs import rewards

Record = Mapping[str, Any]
_OF_ANSWERS = (rewards.EXACT_MATCH, rewards.SUBSTRING_MATCH)
_RESAMPLES = 1000
_INTERVAL = (2.5, 97.5)  # the percentiles of a 95 % interval
_Z = 1.959964  # half of the 95 % interval, in standard deviations


@dataclasses.dataclass(frozen=True)
class SetReport:
  """The statistics of a data set; means are over its dialogues.

  Attributes:
    name: the name of the data set.
    questions: the number of questions.
    samples: the number of dialogues of each question.
    main_score: the name of the main score of the environment.
    scores: the mean of each score, by the name of the score.
    intervals: the 95 % confidence interval of each mean in `scores`, by the
      name of the score; see `interval`.
    pass_at: for each k, the probability that at least one of k dialogues of a
      question has a main score of 1, averaged over questions.
    means: other means by name: the number of searches and of turns of a
      dialogue, and `answered`, the share of dialogues with an answer. If gold
      passages are known, there are also `recall`, the share of the gold
      passages that the searches of a dialogue found, and `all_gold`, the share
      of dialogues whose searches found all gold passages.
    baseline: the share of questions that the best constant answer gets right,
      see `majority`; None if the main score does not compare the answer with
      golden answers.
  """

  name: str
  questions: int
  samples: int
  main_score: str
  scores: Mapping[str, float]
  intervals: Mapping[str, tuple[float, float]]
  pass_at: Mapping[int, float]
  means: Mapping[str, float]
  baseline: float | None


def report(name: str, records: Sequence[Record], main_score: str) -> SetReport:
  """Returns the statistics of the records of a data set.

  A question with fewer records than another question is left out. Records are
  missing where dialogues failed.

  Args:
    name: the name of the data set.
    records: the records of the data set's dialogues, at least one.
    main_score: the name of the main score of the environment.
  """
  by_question: dict[str, list[Record]] = {}
  for record in records:
    by_question.setdefault(record['id'], []).append(record)
  samples = max(map(len, by_question.values()))
  # pass@k and the means over samples assume the same number of samples for each
  # question.
  groups = [group for group in by_question.values() if len(group) == samples]
  records = [record for group in groups for record in group]
  # Each array of scores has the shape [questions, samples].
  scores = {
    key: np.array([[r['scores'][key] for r in group] for group in groups])
    for key in records[0]['scores']
  }
  right = (scores[main_score] >= 1).sum(axis=1)
  found = [_found(r) for r in records if r['gold_passages']]
  means = {
    'searches': _mean(r['searches'] for r in records),
    'turns': _mean(len(r['turns']) for r in records),
    'answered': _mean(r['answer'] is not None for r in records),
  }
  if found:
    means['recall'] = _mean(found)
    means['all_gold'] = _mean(share == 1 for share in found)
  return SetReport(
    name=name,
    questions=len(groups),
    samples=samples,
    main_score=main_score,
    scores={key: float(x.mean()) for key, x in scores.items()},
    intervals={key: interval(x.mean(axis=1)) for key, x in scores.items()},
    pass_at={
      k: _mean(pass_at_k(samples, int(count), k) for count in right)
      for k in _powers(samples)
    },
    means=means,
    baseline=majority(groups) if main_score in _OF_ANSWERS else None,
  )


def interval(values: np.ndarray) -> tuple[float, float]:
  """Returns the 95 % confidence interval of the mean of values.

  If each value is 0 or 1, the result is the Wilson interval, because the
  bootstrap interval has the width 0 if all values are equal. Otherwise the
  result is the bootstrap interval.
  """
  if np.isin(values, (0, 1)).all():
    return wilson(int(values.sum()), len(values))
  return bootstrap(values)


def wilson(count: int, total: int) -> tuple[float, float]:
  """Returns the 95 % Wilson interval of the share `count / total`."""
  share, middle = count / total, (count + _Z**2 / 2) / (total + _Z**2)
  spread = _Z * math.sqrt(share * (1 - share) * total + _Z**2 / 4)
  half = spread / (total + _Z**2)
  return max(middle - half, 0.0), min(middle + half, 1.0)


def bootstrap(values: np.ndarray) -> tuple[float, float]:
  """Returns the 95 % bootstrap percentile interval of the mean of values."""
  # The seed is fixed, so that the same values always give the same interval.
  rng = np.random.default_rng(0)
  count = len(values)
  means = [
    values[rng.integers(count, size=count)].mean() for _ in range(_RESAMPLES)
  ]
  low, high = np.percentile(means, _INTERVAL)
  return float(low), float(high)


def pass_at_k(samples: int, right: int, k: int) -> float:
  """Returns the probability that at least one of k drawn samples is right.

  The k samples are drawn without replacement from `samples` samples, of which
  `right` are right. So the probability is
  1 - C(samples - right, k) / C(samples, k). (arXiv 2107.03374)
  """
  return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(groups: Sequence[Sequence[Record]]) -> float:
  """Returns the share of questions that the best constant answer gets right.

  The constant answer is a golden answer of some question. If questions have
  options, it may also be the letter of an option.
  """
  counts: dict[str, int] = {}
  for group in groups:
    for answer in _golden(group[0]):
      counts[answer] = counts.get(answer, 0) + 1
  return max(counts.values()) / len(groups)


def _golden(record: Record) -> set[str]:
  """Returns the right answers of a question, normalised.

  For a question with options, they are the texts of the right options, and the
  letters of these options, each with a closing parenthesis.
  """
  golden, options = record['golden_answers'], record['options']
  if not options:
    return {text_lib.normalise(answer) for answer in golden}
  letters = rewards.golden_choices(options, golden)
  texts = {text_lib.normalise(options[letter]) for letter in letters}
  return texts | {f'{letter})' for letter in letters}


def _found(record: Record) -> float:
  """Returns the share of the gold passages that a dialogue's searches found."""
  seen = {passage for ids in record['passages'] for passage in ids}
  gold = set(record['gold_passages'])
  return len(gold & seen) / len(gold)


def _powers(samples: int) -> list[int]:
  """Returns the powers of 2 below `samples`, and `samples` itself."""
  powers = [2**n for n in range(samples.bit_length()) if 2**n < samples]
  return [*powers, samples]


def _mean(values) -> float:
  return float(np.mean(list(values)))


def as_json(reports: Sequence[SetReport]) -> dict[str, Any]:
  """Returns the statistics of data sets as plain data, by the sets' names."""
  return {entry.name: dataclasses.asdict(entry) for entry in reports}


def rows(reports: Sequence[SetReport]) -> list[list[str]]:
  """Returns a table of texts: a row of titles and a row for each data set."""
  names = list(dict.fromkeys(key for entry in reports for key in entry.means))
  # Failed dialogues have no record. So data sets may differ in the number of
  # records per question, and then also in the values of k of their pass@k.
  ks = sorted({k for entry in reports for k in entry.pass_at if k > 1})
  main = reports[0].main_score
  scores = [key for key in reports[0].scores if key != main]
  has_baseline = any(entry.baseline is not None for entry in reports)
  head = ['set', 'questions', main, '95 %', *scores]
  head += [f'pass@{k}' for k in ks] + names
  head += ['majority'] if has_baseline else []
  table = [head]
  for entry in reports:
    low, high = entry.intervals[main]
    row = [
      entry.name,
      f'{entry.questions:,}',
      _text(entry.scores[main]),
      f'{_text(low)}-{_text(high)}',
      *(_text(entry.scores[key]) for key in scores),
      *(_text(entry.pass_at.get(k)) for k in ks),
      *(_text(entry.means.get(key)) for key in names),
    ]
    table.append(row + ([_text(entry.baseline)] if has_baseline else []))
  return table


def as_text(table: Sequence[Sequence[str]]) -> str:
  """Returns a table as text with aligned columns, for a terminal."""
  return '\n'.join(streams.aligned(table, right=True))


def as_markdown(table: Sequence[Sequence[str]]) -> str:
  """Returns a table in Markdown."""
  head, *body = [f'| {" | ".join(row)} |' for row in table]
  rule = '| --- |' + ' ---: |' * (len(table[0]) - 1)
  return '\n'.join([head, rule, *body]) + '\n'


def _text(value: float | None) -> str:
  return '' if value is None else f'{value:.3f}'
