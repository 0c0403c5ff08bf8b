"""Mixtures of questions from several data sets.

A mixture is written as one line, with a comma between its elements:

    nq:train weight=2, hotpotqa:train weight=1 limit=5000 hops>=2

An element starts with the name of a data set or of a file. The name of a split
may follow after a colon. Then come any of these options:

    weight=W     the element's share of the questions, relative to other weights
    limit=N      keeps a sample of N questions, the same sample in every run
    FIELD OP V   a filter, written without spaces, that questions must pass

FIELD is a key of FIELDS, OP is one of = != < <= > >=, and V is the value that
the field is compared with.
"""

from collections.abc import Callable, Sequence
import dataclasses
import operator
import re

import numpy as np

from stppo_jax import types

# If a mixture has weights, its order consists of cycles of this many questions.
# The weights decide how many questions of a cycle come from each element.
_CYCLE = 1000

FIELDS: dict[str, Callable[[types.Question], int | str]] = {
  'dataset': lambda question: question.data_set,
  'kind': lambda question: 'mcq' if question.kind == 'choice' else 'open',
  'hops': lambda question: question.hops,
  'gold': lambda question: len(question.gold_passages),
  'options': lambda question: len(question.options),
  'question_words': lambda question: len(question.text.split()),
  'answer_words': lambda question: min(
    len(answer.split()) for answer in question.golden_answers
  ),
}
_TEXTS = ('dataset', 'kind')
_OPERATORS: dict[str, Callable[[int | str, int | str], bool]] = {
  '=': operator.eq,
  '!=': operator.ne,
  '<': operator.lt,
  '<=': operator.le,
  '>': operator.gt,
  '>=': operator.ge,
}
_OPTION = re.compile(r'(\w+)(<=|>=|!=|=|<|>)(\S+)')


@dataclasses.dataclass(frozen=True)
class Filter:
  """A condition on questions.

  Attributes:
    field: a key of FIELDS.
    comparison: one of = != < <= > >=.
    value: the value that the field is compared with.
  """

  field: str
  comparison: str
  value: int | str

  def __call__(self, question: types.Question) -> bool:
    return _OPERATORS[self.comparison](FIELDS[self.field](question), self.value)


@dataclasses.dataclass(frozen=True)
class Element:
  """A data set of a mixture, and which of its questions are used.

  Attributes:
    name: the name of a data set, or of a file.
    split: the split of the data set; '' if the mixture names none.
    weight: the share of the questions that come from this element, relative to
      the weights of the other elements; None for a share in proportion to the
      number of its questions.
    limit: the largest number of questions that are used; None for no limit.
    filters: the conditions that every used question fulfils.
  """

  name: str
  split: str = ''
  weight: float | None = None
  limit: int | None = None
  filters: tuple[Filter, ...] = ()

  def choose(
    self, questions: Sequence[types.Question]
  ) -> Sequence[types.Question]:
    """Returns the questions that pass the filters, at most `limit` of them.

    Raises:
      ValueError: if no question passes the filters.
    """
    if not self.filters and self.limit is None:
      return questions
    indices = np.arange(len(questions))
    if self.filters:
      passes = [all(f(q) for f in self.filters) for q in questions]
      indices = indices[passes]
    if self.limit is not None:
      # The seed is constant, so that runs with different seeds get the same
      # sample.
      order = np.random.default_rng(0).permutation(len(indices))
      indices = np.sort(indices[order[: self.limit]])
    if not len(indices):
      raise ValueError(f'{self.name}: no question passes the filters')
    return [questions[int(index)] for index in indices]


def parse(text: str) -> tuple[Element, ...]:
  """Returns the elements of a mixture.

  Raises:
    ValueError: if the text is not a mixture; the message is one line.
  """
  elements = tuple(_element(part) for part in text.split(','))
  weighted = [element.weight is not None for element in elements]
  if any(weighted) and not all(weighted):
    name = elements[weighted.index(False)].name
    raise ValueError(f'{name!r} has no weight, but other elements have one')
  return elements


def _element(text: str) -> Element:
  words = text.split()
  if not words:
    raise ValueError('the name of a data set is missing')
  name, _, split = words[0].partition(':')
  element, filters = Element(name, split), []
  for word in words[1:]:
    match = _OPTION.fullmatch(word)
    field, sign, value = match.groups() if match else ('', '', '')
    if field == 'weight' and sign == '=':
      element = dataclasses.replace(element, weight=_weight(value))
    elif field == 'limit' and sign == '=':
      element = dataclasses.replace(element, limit=_count(word, value, least=1))
    elif field in _TEXTS and sign in ('=', '!='):
      filters.append(Filter(field, sign, value))
    elif field in FIELDS and field not in _TEXTS:
      filters.append(Filter(field, sign, _count(word, value)))
    else:
      raise ValueError(
        f'{word!r}: expected weight=W, limit=N or a filter such as hops>=2; '
        f'fields: {", ".join(FIELDS)}'
      )
  return dataclasses.replace(element, filters=tuple(filters))


def _weight(value: str) -> float:
  try:
    weight = float(value)
  except ValueError:
    weight = 0.0
  if not 0 < weight < float('inf'):
    raise ValueError(f'weight={value}: must be a number greater than 0')
  return weight


def _count(word: str, value: str, *, least: int = 0) -> int:
  if not value.isdecimal() or int(value) < least:
    raise ValueError(f'{word!r}: must be a whole number, {least} or greater')
  return int(value)


class Mixture:
  """The questions of several data sets as one sequence, and their order.

  Without weights, every epoch is a permutation of all questions. With weights,
  each data set has epochs of its own, and the weights decide how many of every
  1,000 questions come from each data set.

  Args:
    elements: the questions of each element.
    weights: the weight of each element; None for an order without weights.
  """

  def __init__(
    self,
    elements: Sequence[Sequence[types.Question]],
    weights: Sequence[float] | None = None,
  ):
    self._elements = elements
    self._sizes = [len(element) for element in elements]
    self._starts = np.cumsum([0, *self._sizes])
    self._quotas = None if weights is None else _quotas(weights)

  def __len__(self) -> int:
    return int(self._starts[-1])

  def __getitem__(self, index: int) -> types.Question:
    number = int(np.searchsorted(self._starts, index, side='right')) - 1
    return self._elements[number][index - int(self._starts[number])]

  def order(self, seeds: Sequence[int], start: int, count: int) -> list[int]:
    """Returns `count` indices of an endless order of the questions.

    Args:
      seeds: the integers that together seed the order.
      start: the position in the order from which indices are returned.
      count: the number of indices.
    """
    if self._quotas is None:
      return epochs(seeds, len(self), start, count)
    indices = []
    while len(indices) < count:
      cycle, first = divmod(start + len(indices), _CYCLE)
      last = min(_CYCLE, first + count - len(indices))
      indices += self._cycle(seeds, cycle)[first:last]
    return indices

  def _cycle(self, seeds: Sequence[int], cycle: int) -> list[int]:
    """Returns the indices of the _CYCLE questions of one cycle of the order."""
    assert self._quotas is not None
    # numpy pads short seeds with zeros. The 1 at the end keeps this seed
    # different from the seeds of the epochs of the elements.
    rng = np.random.default_rng((*seeds, cycle, len(self._sizes), 1))
    # Each data set gets its exact number of places in the cycle, and the places
    # are shuffled. If a data set were drawn at random for each place, a data
    # set with a small weight could be missing from many steps.
    turns = rng.permutation(
      np.repeat(np.arange(len(self._sizes)), self._quotas)
    )
    indices = np.zeros(_CYCLE, int)
    for number, (size, quota) in enumerate(zip(self._sizes, self._quotas)):
      places = epochs((*seeds, number), size, cycle * quota, quota)
      indices[turns == number] = self._starts[number] + np.asarray(places)
    return indices.tolist()


def epochs(
  seeds: Sequence[int], size: int, start: int, count: int
) -> list[int]:
  """Returns `count` indices of an order in which each epoch is a permutation.

  Args:
    seeds: the integers that together seed the order.
    size: the number of different indices, which is the length of an epoch.
    start: the position in the order from which indices are returned.
    count: the number of returned indices.
  """
  # A position alone decides its epoch and its index within the epoch. So no
  # state has to be saved, and a resumed run continues the same order.
  chosen, order = [], None
  for place in range(start, start + count):
    epoch, index = divmod(place, size)
    if index == 0 or order is None:
      order = np.random.default_rng((*seeds, epoch)).permutation(size)
    chosen.append(int(order[index]))
  return chosen


def _quotas(weights: Sequence[float]) -> list[int]:
  """Returns how many questions of a cycle each element gets, at least one.

  Raises:
    ValueError: if a weight is too small for one question of a cycle.
  """
  shares = np.asarray(weights) / np.sum(weights) * _CYCLE
  if shares.min() < 1:
    raise ValueError(
      f'a weight is less than 1/{_CYCLE} of the sum of all weights; leave the '
      'data set out'
    )
  # Rounding down leaves some questions of the cycle without an element. The
  # elements with the largest remainders get one of these questions each.
  quotas = np.floor(shares).astype(int)
  most = np.argsort(quotas - shares, kind='stable')
  quotas[most[: _CYCLE - quotas.sum()]] += 1
  return quotas.tolist()
