"""One entry of the generated pages."""

from typing import NamedTuple

CODE = 'Read in code.'
PAPER = 'Read in the paper.'
REVIEWS = "Known from the paper's public reviews only."
PEER = 'Read in the documentation of another codebase.'
OURS = 'Our choice.'
PLAIN = 'A definition.'

# How well established an entry is: every `Description.sure` begins with one of
# these phrases.
SURE = {
  CODE: 'The equation was read in the reference implementation of the '
  "method's authors, or in the public code that the entry names.",
  PAPER: "The equation was read in the paper's text, without code to compare "
  'with.',
  REVIEWS: 'Neither the text of the paper nor code contains the equation.',
  PEER: 'Neither text nor code of the authors was available.',
  OURS: 'The source does not say this, is not public, or has another subject.',
  PLAIN: 'The equation is the definition, so there is nothing to be unsure of.',
}


class Description(NamedTuple):
  """The description of an algorithm or of a choice.

  Attributes:
    equation: plain text, shown as code. It contains the name of every option
      that is a number. The indentation of the source is removed.
    source: papers with their arXiv id (which becomes a link), or code.
    sure: how well established it is: a key of `SURE`, then what limits it.
    when: when to use it.
    elsewhere: its name in other codebases, where that is certain.
  """

  equation: str
  source: str
  sure: str
  when: str
  elsewhere: str = '—'
