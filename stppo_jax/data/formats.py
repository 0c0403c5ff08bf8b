"""Turns the rows of published data sets into rows of our schema.

The function of a data set takes a row in the form of the authors, or in the
form that copies of the data set have on the Hugging Face hub. It returns the
fields that `readers.parse_question` takes. If a row has paragraphs, the
function adds the field `context`, a list of triples: the title of a paragraph,
its text, and whether it leads to the answer.
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any

Fields = dict[str, Any]

# The key under which every row has the name of its file, which the functions
# for some data sets need.
FILE = 'name of the file'


def nq_open(row: Any) -> Fields:
  """Converts a row of Natural Questions open: question and short answers."""
  return {'question': _get(row, 'question'), 'answers': _get(row, 'answer')}


def qed(row: Any) -> Fields:
  """Converts a row of QED: a Natural Question and a paragraph of Wikipedia.

  The parts of an answer are joined into one text. If the annotators of QED
  found that the paragraph does not answer the question, the paragraph does not
  count as leading to the answer.
  """
  parts = _get(row, 'original_nq_answers')
  kind = _get(_get(row, 'annotation'), 'explanation_type')
  title, text = _get(row, 'title_text'), _get(row, 'paragraph_text')
  return {
    'id': _get(row, 'example_id'),
    'question': _get(row, 'question_text'),
    'answers': _once([', '.join(_get(x, 'string') for x in p) for p in parts]),
    'context': [(title, text, kind != 'none')],
  }


def triviaqa(row: Any) -> Fields:
  """Converts a row of TriviaQA, without its evidence documents."""
  answer = _get(row, 'Answer')
  return {
    'id': _get(row, 'QuestionId'),
    'question': _get(row, 'Question'),
    'answers': _once([_get(answer, 'Value'), *_get(answer, 'Aliases')]),
  }


def popqa(row: Any) -> Fields:
  """Converts a row of the TSV file of PopQA, whose answers are a JSON list."""
  return {
    'id': _get(row, 'id'),
    'question': _get(row, 'question'),
    'answers': _once(_parsed(_get(row, 'possible_answers'))),
  }


def hotpotqa(row: Any) -> Fields:
  """Converts a row of HotpotQA or 2WikiMultihopQA, with its paragraphs."""
  facts = _pairs(_get(row, 'supporting_facts'), 'title', 'sent_id')
  supporting = {title for title, _ in facts}
  paragraphs = _pairs(_get(row, 'context'), 'title', 'sentences')
  return {
    # The field of the id is `_id` in the files of the authors, and `id` in
    # copies on the hub.
    'id': row['_id'] if '_id' in row else _get(row, 'id'),
    'question': _get(row, 'question'),
    'answers': [_get(row, 'answer')],
    'hops': len(supporting),
    'context': [
      (title, _joined(sentences), title in supporting)
      for title, sentences in paragraphs
    ],
  }


def musique(row: Any) -> Fields:
  """Converts a row of MuSiQue, with its paragraphs."""
  return {
    'id': _get(row, 'id'),
    'question': _get(row, 'question'),
    'answers': _once([_get(row, 'answer'), *_get(row, 'answer_aliases')]),
    'hops': len(_get(row, 'question_decomposition')),
    'context': [
      (_get(p, 'title'), _get(p, 'paragraph_text'), _get(p, 'is_supporting'))
      for p in _get(row, 'paragraphs')
    ],
  }


def bamboogle(row: Any) -> Fields:
  """Converts a row of the table of Bamboogle; every question has two hops."""
  return {
    'question': _get(row, 'Question'),
    'answers': [_get(row, 'Answer')],
    'hops': 2,
  }


def medqa(row: Any) -> Fields:
  """Converts a row of MedQA: options by letter, and the answer's letter."""
  options = _get(row, 'options')
  # Some copies of the data set have a list: [{"key": "A", "value": ...}, ...].
  if isinstance(options, list):
    options = {_get(o, 'key'): _get(o, 'value') for o in options}
  return _choice(_get(row, 'question'), options, _get(row, 'answer_idx'))


def medmcqa(row: Any) -> Fields:
  """Converts a row of MedMCQA: options, and the index of the right option.

  The index counts from 1 in the files of the authors, and from 0 in the
  parquet files of the hub.
  """
  options = [_get(row, f'op{letter}') for letter in 'abcd']
  first = 0 if row[FILE].endswith('.parquet') else 1
  number = _get(row, 'cop')
  if not isinstance(number, int) or not first <= number < first + 4:
    raise ValueError(f'"cop": expected {first} to {first + 3}, got {number!r}')
  letters = 'ABCD'
  options = dict(zip(letters, options))
  fields = _choice(_get(row, 'question'), options, letters[number - first])
  return {'id': _get(row, 'id')} | fields


def pubmedqa(row: Any) -> Fields:
  """Converts a row of PubMedQA: a yes/no/maybe question with its abstract."""
  answer = _get(row, 'final_decision')
  options = {'A': 'yes', 'B': 'no', 'C': 'maybe'}
  letters = {text: letter for letter, text in options.items()}
  if answer not in letters:
    choices = ', '.join(letters)
    raise ValueError(f'"final_decision": {answer!r}; choices: {choices}')
  identity = _get(row, 'id')
  sections = zip(_get(row, 'LABELS'), _get(row, 'CONTEXTS'))
  return _choice(_get(row, 'QUESTION'), options, letters[answer]) | {
    'id': identity,
    'context': [
      (f'PMID {identity} {label}', text, True) for label, text in sections
    ],
  }


def mmlu(row: Any) -> Fields:
  """Converts a row of MMLU; the file's name tells the subject of the question.

  The id of the question begins with this subject.
  """
  subject = row[FILE].rpartition('_')[0]
  options = {letter: _get(row, letter) for letter in 'ABCD'}
  fields = _choice(_get(row, 'question'), options, _get(row, 'answer'))
  return {'id_prefix': f'{subject}_'} | fields


def _choice(question: Any, options: Any, letter: Any) -> Fields:
  if not isinstance(options, Mapping) or letter not in options:
    raise ValueError(f'the answer {letter!r} is not the letter of an option')
  return {
    'kind': 'mcq',
    'question': question,
    'answers': [options[letter]],
    'options': dict(options),
    'answer_key': letter,
  }


def _get(row: Any, name: str) -> Any:
  """Returns the value of a required field of a row.

  Raises:
    ValueError: if the field is absent or null; the message names the field.
  """
  if not isinstance(row, Mapping):
    raise ValueError(f'expected an object with "{name}"')
  if name not in row or row[name] is None:
    raise ValueError(f'no "{name}"')
  return row[name]


def _once(values: Sequence[Any]) -> list[Any]:
  """Returns the values in order, without repetitions or empty values."""
  return list(dict.fromkeys(filter(None, values)))


def _parsed(value: Any) -> Any:
  """Returns the decoded JSON of a string; returns other values unchanged."""
  try:
    return json.loads(value) if isinstance(value, str) else value
  except RecursionError as error:
    raise ValueError(f'nested too deeply: {value:.40}') from error


def _pairs(value: Any, first: str, second: str) -> list[tuple[Any, Any]]:
  """Returns the pairs that a field holds, as a list.

  The field holds a list of pairs. In copies on the hub, it holds a dict of two
  columns in place of the list; `first` and `second` are the columns' names.
  """
  value = _parsed(value)
  if isinstance(value, Mapping):
    return list(zip(_get(value, first), _get(value, second)))
  return [(a, b) for a, b in value]


def _joined(sentences: Any) -> str:
  """Returns the sentences of a paragraph as one text with single spaces."""
  return ' '.join(' '.join(sentences).split())
