"""Reading the action out of what the policy wrote in one turn."""

import dataclasses
import re

# A longer query is no query, so that no server has to refuse one.
MAX_QUERY_CHARS = 2048

_CLOSING = re.compile('</(search|answer)>')


@dataclasses.dataclass(frozen=True)
class Action:
  """What a turn does.

  Attributes:
    kind: 'search', 'answer' or 'invalid'.
    content: the query or the answer without outer white space; '' if invalid.
  """

  kind: str
  content: str = ''


def parse_action(text: str) -> Action:
  """The first complete <search>...</search> or <answer>...</answer> of a turn.

  Complete first is what *closes* first, since a closing tag ends the turn; it
  reaches back to the first opening tag of its name, over any characters, as
  Search-R1 reads it. Tags are taken literally: `</Search>` is text.

  No action, an empty query, and one of more than MAX_QUERY_CHARS characters
  are 'invalid'. All three are the policy's doing and stay in training.
  """
  for closing in _CLOSING.finditer(text):
    kind = closing[1]
    opening = f'<{kind}>'
    start = text.find(opening, 0, closing.start())
    if start < 0:
      continue
    content = text[start + len(opening) : closing.start()].strip()
    if kind == 'search' and not 0 < len(content) <= MAX_QUERY_CHARS:
      return Action('invalid')
    return Action(kind, content)
  return Action('invalid')
