"""Reads questions from files.

Every row is an object; docs/data.md describes its fields:

    {"question", "answers": [...], "id", "dataset", "kind": "open" | "mcq",
     "options": {"A": ...}, "answer_key": "A", "gold_pids": [...], "hops": n}

"question" and "answers" are required. "options" and "answer_key" belong to the
kind "mcq". Rows of Search-R1, verl and FlashRAG, whose fields have other names,
are accepted too. Unknown fields are ignored, and a field that is null counts as
absent.
"""

from collections.abc import Mapping
import os
import pathlib
from typing import Any

from stppo_jax import types
from stppo_jax.data import tables

_KINDS = {'open': 'open', 'mcq': 'choice'}
# The name of our field -> the name of this field in Search-R1 and FlashRAG.
_OTHER_NAMES = {'answers': 'golden_answers', 'dataset': 'data_source'}
# verl puts this prefix before the name of a data set of Search-R1.
_PREFIX = 'searchR1_'
# The prompts of Search-R1 have this word before the question.
_BEFORE_QUESTION = 'Question:'


def read_questions(
  file: tables.TableFile | str | os.PathLike[str],
) -> list[types.Question]:
  """Reads questions in the order of the file; empty lines are skipped.

  If a question has no id, its id is the number of its row. If a question names
  no data set, its data set is the name of the file up to the first dot.

  Args:
    file: the file; see `tables.read` for its formats.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if a row is not a question, an id occurs twice in a data set,
      or there is no question; the message names the file and the line.
  """
  if not isinstance(file, tables.TableFile):
    file = tables.TableFile(pathlib.Path(file))
  data_set = pathlib.PurePath(file.member or file.path).name.split('.')[0]

  def parse(fields: Any, number: int) -> types.Question:
    if isinstance(fields, Mapping):
      fields = with_our_names(fields)
      fields = {'id': str(number), 'dataset': data_set, **fields}
    return parse_question(fields)

  return tables.read(
    file, parse, noun='questions', space=lambda question: question.data_set
  )


def is_question(fields: Any) -> bool:
  """Returns whether a row is a question in our form, Search-R1's or verl's."""
  return isinstance(fields, Mapping) and not fields.keys().isdisjoint(
    ('answers', 'golden_answers', 'reward_model')
  )


def with_our_names(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of a row under the names that `parse_question` reads.

  Raises:
    ValueError: if a row of verl has no golden answers.
  """
  fields = {key: value for key, value in fields.items() if value is not None}
  others = {
    ours: fields[theirs]
    for ours, theirs in _OTHER_NAMES.items()
    if theirs in fields
  }
  if 'reward_model' in fields:
    others = _verl_fields(fields) | others
  if isinstance(others.get('dataset'), str):
    others['dataset'] = others['dataset'].removeprefix(_PREFIX)
  # If a row has a field under both names, our own name counts.
  return others | fields


def _verl_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the question, the answers and the id of a row of verl."""
  result = {}
  model = fields['reward_model']
  truth = model.get('ground_truth') if isinstance(model, Mapping) else None
  target = truth.get('target') if isinstance(truth, Mapping) else truth
  if target is None:
    raise ValueError('"reward_model": no "ground_truth" with a "target" in it')
  result['answers'] = [target] if isinstance(target, str) else target
  more = fields.get('extra_info')
  more = more if isinstance(more, Mapping) else {}
  if 'index' in more:
    result['id'] = f'{more.get("split", "row")}_{more["index"]}'
  if isinstance(more.get('question'), str):
    result['question'] = more['question']
  elif isinstance(fields.get('prompt'), list) and fields['prompt']:
    # In the prompt, instructions stand before the question.
    message = fields['prompt'][-1]
    content = message.get('content') if isinstance(message, Mapping) else None
    if isinstance(content, str):
      result['question'] = content.rpartition(_BEFORE_QUESTION)[2].strip()
  return result


def parse_question(fields: Any) -> types.Question:
  """Returns the question of an object whose fields have our names.

  Without the field `kind`, a question with options is a choice question, and
  any other question is open. For a choice question, the text of the option
  `answer_key` is added to the golden answers if it is not among them. Without
  `answer_key`, at least one answer must be the letter or the text of an option.

  Raises:
    ValueError: if a field is missing or has a bad value.
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
      raise ValueError(
        '"answers": none of them is an option, and "answer_key" is missing'
      )
  return types.Question(
    id=_identity(fields),
    text=_string(fields, 'question'),
    golden_answers=answers,
    data_set=_string(fields, 'dataset'),
    kind=_KINDS[kind],
    options=options,
    gold_passages=_gold_passages(fields),
    hops=_hops(fields),
  )


def fields_of(question: types.Question) -> dict[str, Any]:
  """Returns fields from which `parse_question` makes the given question."""
  kinds = {theirs: ours for ours, theirs in _KINDS.items()}
  return {
    'id': question.id,
    'dataset': question.data_set,
    'kind': kinds[question.kind],
    'question': question.text,
    'answers': list(question.golden_answers),
    'options': dict(question.options),
    'gold_pids': list(question.gold_passages),
    'hops': question.hops,
  }


def _string(fields: Mapping[str, Any], name: str) -> str:
  """Returns a string field that must not be empty."""
  if name not in fields:
    raise ValueError(f'no "{name}"')
  value = fields[name]
  if not isinstance(value, str) or not value.strip():
    raise ValueError(f'"{name}": expected a string that is not empty')
  return value


def _identity(fields: Mapping[str, Any]) -> str:
  """Returns the id as a string; the field may be an integer."""
  value = fields.get('id')
  if isinstance(value, int) and not isinstance(value, bool):
    return str(value)
  return _string(fields, 'id')


def _answers(fields: Mapping[str, Any]) -> tuple[str, ...]:
  if 'answers' not in fields:
    raise ValueError('no "answers"')
  answers = fields['answers']
  if not answers or not is_strings(answers):
    raise ValueError('"answers": expected a list of one or more strings')
  if not all(map(str.strip, answers)):
    raise ValueError(
      '"answers": expected strings that are not empty, because an empty answer '
      'must never count as right'
    )
  return tuple(answers)


def _options(fields: Mapping[str, Any]) -> dict[str, str]:
  if 'options' not in fields:
    raise ValueError('no "options"')
  options = fields['options']
  if isinstance(options, Mapping):
    # In a parquet file, every row has the option letters of all rows. The value
    # is null if the row itself has no option of that letter.
    options = {key: x for key, x in options.items() if x is not None}
  if (
    not isinstance(options, Mapping)
    or not options
    or not all(isinstance(text, str) for text in options.values())
  ):
    raise ValueError('"options": expected an object of one or more strings')
  return dict(options)


def _gold_passages(fields: Mapping[str, Any]) -> tuple[str, ...]:
  passages = fields.get('gold_pids', [])
  if not is_strings(passages):
    raise ValueError(
      f'"gold_pids": {passages!r:.60}: must be a list of strings'
    )
  return tuple(passages)


def is_strings(value: Any) -> bool:
  """Returns whether a JSON value is a list of strings."""
  return isinstance(value, list) and all(isinstance(x, str) for x in value)


def _hops(fields: Mapping[str, Any]) -> int:
  hops = fields.get('hops', 0)
  if isinstance(hops, float) and hops.is_integer():
    hops = int(hops)  # pandas writes floats if some rows have no number
  if not isinstance(hops, int) or isinstance(hops, bool) or hops < 0:
    raise ValueError('"hops": expected a number, 0 or greater')
  return hops
