"""Reads the action in the text that the policy wrote in one turn."""

from collections.abc import Sequence
import dataclasses
import re

from stppo_jax.envs import protocol

# A longer query counts as invalid, so that no server has to refuse one.
MAX_QUERY_CHARS = 2048
STOP_STRINGS: tuple[str, ...] = ('</search>', '</answer>')


@dataclasses.dataclass(frozen=True)
class Action:
  """The action of a turn.

  Attributes:
    kind: the name of the element, such as 'answer', or `protocol.INVALID`.
    content: the text of the element without outer white space; '' if the
      action is invalid.
  """

  kind: str
  content: str = ''


def parse_action(
  text: str, kinds: Sequence[str] = ('search', 'answer')
) -> Action:
  """Returns the first complete element of a turn, such as <search> or <answer>.

  The first complete element is the one that *closes* first, since a closing tag
  ends the turn. It reaches back to the first opening tag of its name, over any
  characters, as Search-R1 reads it. Tags are taken literally: `</Search>` is
  text.

  A turn without such an element, with an empty query or with a query of more
  than MAX_QUERY_CHARS characters is invalid. All three are the policy's own
  mistakes, so the turn is trained on like any other.

  Args:
    text: what the policy wrote in the turn.
    kinds: the names of the elements that are actions.
  """
  for closing in re.finditer(f'</({"|".join(kinds)})>', text):
    kind = closing[1]
    opening = f'<{kind}>'
    start = text.find(opening, 0, closing.start())
    # What nothing has opened is text, and a later closing tag may end an
    # action.
    if start < 0:
      continue
    content = text[start + len(opening) : closing.start()].strip()
    if kind == 'search' and not 0 < len(content) <= MAX_QUERY_CHARS:
      return Action(protocol.INVALID)
    return Action(kind, content)
  return Action(protocol.INVALID)
