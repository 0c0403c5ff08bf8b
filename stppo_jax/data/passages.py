"""Reads passages from files and from the replies of servers.

A document is a JSON object that holds a passage in one of two forms. In the
form `{"id", "contents"}` of Search-R1, the contents are the quoted title, a
newline and the body. The other form is `{"pid" | "id", "title", "text"}`.
"""

from collections.abc import Mapping
import os
from typing import Any

from stppo_jax import types
from stppo_jax.data import tables


def read_corpus(path: str | os.PathLike[str]) -> list[types.Passage]:
  """Reads passages, one JSON object per line; empty lines are skipped.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if a line is not a passage, an id occurs twice, or there is no
      passage; the message names the file and the line.
  """
  return tables.read(path, _parse, noun='passages')


def _parse(document: Any, number: int) -> types.Passage:
  """Returns the passage on a line of a file."""
  del number
  passage = passage_of(document)
  _check_unicode(passage)
  # A server may leave out the ids of passages. In a corpus every passage needs
  # an id, because the index and the gold passages of questions refer to ids.
  if not passage.id:
    raise ValueError('no "id" or "pid"')
  return passage


def passage_of(document: Any, *, score: float = 0.0) -> types.Passage:
  """Returns the passage of a document.

  The document has `contents`, or `title` and `text`. Some servers send no ids.
  If a document has no id, the passage has the id ''.

  Raises:
    ValueError: if the document is not an object, lacks these fields, or has a
      value of a wrong type.
  """
  if not isinstance(document, Mapping):
    raise ValueError(f'expected an object, got {_short(document)}')
  name = 'pid' if 'pid' in document else 'id'
  identity = document.get(name, '')
  # A bool is an instance of int, but is no id.
  if isinstance(identity, bool) or not isinstance(identity, str | int):
    raise ValueError(f'"{name}": expected a string, got {_short(identity)}')
  if 'contents' in document:
    title, text = _split_contents(_string(document, 'contents'))
  elif 'title' in document and 'text' in document:
    title, text = _string(document, 'title'), _string(document, 'text')
  else:
    raise ValueError('expected "contents", or "title" and "text"')
  return types.Passage(id=str(identity), title=title, text=text, score=score)


def document_of(passage: types.Passage) -> dict[str, str]:
  """Returns the document of a passage in the form `{"id", "contents"}`."""
  # The title is all of the first line, so it must not contain a line break.
  title = ' '.join(passage.title.splitlines())
  return {'id': passage.id, 'contents': f'"{title}"\n{passage.text}'}


def _split_contents(contents: str) -> tuple[str, str]:
  """Returns the title and the body in `contents`.

  If `contents` is a single line, the line is the body, and the title is ''.
  """
  title, newline, text = contents.partition('\n')
  if not newline:
    return '', contents
  title = title.strip()
  if len(title) >= 2 and title[0] == title[-1] == '"':
    title = title[1:-1]
  return title, text


def _string(document: Mapping[str, Any], name: str) -> str:
  value = document[name]
  if not isinstance(value, str):
    raise ValueError(f'"{name}": expected a string, got {_short(value)}')
  return value


def _check_unicode(passage: types.Passage) -> None:
  """Raises ValueError for a lone surrogate, which JSON escapes can produce."""
  for value in (passage.id, passage.title, passage.text):
    try:
      value.encode()
    except UnicodeEncodeError as error:
      raise ValueError(f'not Unicode: {_short(value)}') from error


def _short(value: Any) -> str:
  """Returns a value as text of at most 40 characters."""
  text = repr(value)
  return text if len(text) <= 40 else text[:37] + '...'
