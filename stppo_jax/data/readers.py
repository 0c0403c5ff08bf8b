"""Reads questions from JSONL files.

Every line is an object; docs/data.md describes its fields:

    {"question", "answers": [...], "id", "dataset", "kind": "open" | "mcq",
     "options": {"A": ...}, "answer_key": "A"}

"question" and "answers" must be there. "options" and "answer_key" belong to the
kind "mcq". The names of Search-R1, "golden_answers" and "data_source", are
understood too. Other keys are ignored.
"""

from collections.abc import Callable
from collections.abc import Mapping
import os
import pathlib
from typing import Any

from stppo_jax import types
from stppo_jax.data import jsonl
from stppo_jax.envs import rewards

_KINDS = {'open': 'open', 'mcq': 'choice'}
# The names of Search-R1 and FlashRAG for our fields.
_OTHER_NAMES = {'answers': 'golden_answers', 'dataset': 'data_source'}


def read_questions(
  path: str | os.PathLike[str],
  *,
  note: Callable[[str], None] = lambda line: None,
) -> list[types.Question]:
  """Reads questions in the order of the file; empty lines are skipped.

  A question without an id has the number of its line, and one without a data
  set the name of the file up to the first dot.

  Args:
    path: the file.
    note: called with a line for each golden answer of which nothing is left
      when answers are compared, such as "the". An empty answer equals it.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if a line is not a question, an id occurs twice in a data set,
      or there is no question; names file and line.
  """
  data_set = pathlib.Path(path).name.split('.')[0]

  def parse(fields: Any, number: int) -> types.Question:
    if isinstance(fields, Mapping):
      fields = {'id': str(number), **_with_our_names(fields)}
      fields.setdefault('dataset', data_set)
    question = parse_question(fields)
    for answer in question.golden_answers:
      if question.kind == 'open' and not rewards.normalise(answer):
        note(
          f'{path}:{number}: nothing is left of the answer {answer!r} when it '
          'is compared, so an empty answer is right'
        )
    return question

  return jsonl.read(
    path, parse, noun='questions', space=lambda question: question.data_set
  )


def _with_our_names(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of a line under the names that we have for them."""
  others = {
    ours: fields[theirs]
    for ours, theirs in _OTHER_NAMES.items()
    if theirs in fields
  }
  return others | dict(fields)


def parse_question(fields: Any) -> types.Question:
  """Returns the question of one object with our names of the fields.

  A question without a kind is a choice if it has options, otherwise open.
  The golden answers of a choice question are texts of options: the text of
  `answer_key` is added if it is not among `answers`.

  Raises:
    ValueError: if a key is missing or has a bad value.
  """
  if not isinstance(fields, Mapping):
    raise ValueError('expected an object')
  kind = 'mcq' if 'options' in fields else 'open'
  if 'kind' in fields:
    kind = _string(fields, 'kind')
  if kind not in _KINDS:
    raise ValueError(f'"kind": {kind!r}; choices: {", ".join(_KINDS)}')
  answers = _answers(fields)
  options = {}
  if _KINDS[kind] == 'choice':
    options = _options(fields)
    if 'answer_key' in fields:
      key = _string(fields, 'answer_key')
      if key not in options:
        raise ValueError(f'"answer_key": {key!r} is not among the options')
      if options[key] not in answers:
        answers += (options[key],)
    elif not set(answers) & (set(options) | set(options.values())):
      raise ValueError('"answers": none is an option, and no "answer_key"')
  return types.Question(
    id=_identity(fields),
    text=_string(fields, 'question'),
    golden_answers=answers,
    data_set=_string(fields, 'dataset'),
    kind=_KINDS[kind],
    options=options,
  )


def _string(fields: Mapping[str, Any], name: str) -> str:
  """Returns a string field that must not be empty."""
  if name not in fields:
    raise ValueError(f'no "{name}"')
  value = fields[name]
  if not isinstance(value, str) or not value.strip():
    raise ValueError(f'"{name}": expected a string that is not empty')
  return value


def _identity(fields: Mapping[str, Any]) -> str:
  """Returns the id, which may be a number."""
  value = fields.get('id')
  if isinstance(value, int) and not isinstance(value, bool):
    return str(value)
  return _string(fields, 'id')


def _answers(fields: Mapping[str, Any]) -> tuple[str, ...]:
  if 'answers' not in fields:
    raise ValueError('no "answers"')
  answers = fields['answers']
  if (
    not isinstance(answers, list)
    or not answers
    or not all(isinstance(answer, str) for answer in answers)
  ):
    raise ValueError('"answers": expected a list of strings, one at least')
  return tuple(answers)


def _options(fields: Mapping[str, Any]) -> dict[str, str]:
  if 'options' not in fields:
    raise ValueError('no "options"')
  options = fields['options']
  if (
    not isinstance(options, Mapping)
    or not options
    or not all(isinstance(text, str) for text in options.values())
  ):
    raise ValueError('"options": expected an object of strings, one at least')
  return dict(options)
