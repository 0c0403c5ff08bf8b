"""Finds the action in the text that the policy wrote in one turn."""

from collections.abc import Sequence
import dataclasses
import re

from stppo_jax.envs import protocol

# A search with a longer query is invalid, so that no server has to refuse it.
MAX_QUERY_CHARS = 2048
STOP_STRINGS: tuple[str, ...] = ('</search>', '</answer>')


@dataclasses.dataclass(frozen=True)
class Action:
  """The action of a turn.

  Attributes:
    kind: the name of the tag, such as 'answer', or `protocol.INVALID`.
    content: the text between the tags without outer white space; '' if the
      action is invalid.
  """

  kind: str
  content: str = ''


def parse_action(
  text: str, kinds: Sequence[str] = ('search', 'answer')
) -> Action:
  """Returns the first complete element of a turn, such as <search> or <answer>.

  The first complete element is the element that *closes* first, since a closing
  tag ends the turn. The element begins at the first opening tag of the same
  name, whatever text follows this tag, as in Search-R1. Tags are matched
  literally: `</Search>` is plain text.

  The action is invalid if the turn has no such element. A search is also
  invalid if its query is empty or has more than MAX_QUERY_CHARS characters. All
  three are the policy's own mistakes, so the policy is trained on the turn as
  on any other turn.

  Args:
    text: the text that the policy wrote in the turn.
    kinds: the names of the elements that are actions.
  """
  for closing in re.finditer(f'</({"|".join(kinds)})>', text):
    kind = closing[1]
    opening = f'<{kind}>'
    start = text.find(opening, 0, closing.start())
    # A closing tag without an opening tag is plain text, and a later closing
    # tag may end an action.
    if start < 0:
      continue
    content = text[start + len(opening) : closing.start()].strip()
    if kind == 'search' and not 0 < len(content) <= MAX_QUERY_CHARS:
      return Action(protocol.INVALID)
    return Action(kind, content)
  return Action(protocol.INVALID)
