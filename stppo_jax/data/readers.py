"""Reads questions from JSONL files.

Every line is an object:

    {"id", "dataset", "kind": "open" | "mcq", "question", "answers": [...],
     "options": {"A": ...}, "answer_key": "A"}

"options" and "answer_key" belong to the kind "mcq". Other keys are ignored.
"""

from collections.abc import Mapping
import json
import os
from typing import Any

from stppo_jax import types

_KINDS = {'open': 'open', 'mcq': 'choice'}


def read_questions(path: str | os.PathLike[str]) -> list[types.Question]:
  """Reads questions in the order of the file; empty lines are skipped.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if a line is not a question, an id occurs twice in a data set,
      or there is no question; names file and line.
  """
  if not os.path.isfile(path):
    raise FileNotFoundError(f'{path}: no such file')
  questions = []
  line_of_id: dict[tuple[str, str], int] = {}
  with open(path, encoding='utf-8') as file:
    number = 0
    try:
      for number, line in enumerate(file, start=1):
        if not line.strip():
          continue
        question = parse_question(json.loads(line))
        key = (question.data_set, question.id)
        if key in line_of_id:
          raise ValueError(
            f'id {question.id!r} is also the id of line {line_of_id[key]}'
          )
        line_of_id[key] = number
        questions.append(question)
    except UnicodeDecodeError as error:
      # Text is decoded in large buffers, so the line is not known.
      raise ValueError(f'{path}: not UTF-8: {error}') from error
    except (ValueError, RecursionError) as error:
      raise ValueError(f'{path}:{number}: {error}') from error
  if not questions:
    raise ValueError(f'{path}: no questions')
  return questions


def parse_question(fields: Any) -> types.Question:
  """Returns the question of one object.

  The golden answers of a choice question are texts of options: the text of
  `answer_key` is added if it is not among `answers`.

  Raises:
    ValueError: if a key is missing or has a bad value.
  """
  if not isinstance(fields, Mapping):
    raise ValueError('expected an object')
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
    id=_string(fields, 'id'),
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
