"""One entry of `docs/algorithms.md`."""

from typing import NamedTuple

CODE = 'Read in code.'
PAPER = 'Read in the paper.'
REVIEWS = "Known from the paper's public reviews only."
PEER = 'Read in the documentation of another codebase.'
OURS = 'Our choice.'
PLAIN = 'A definition.'

# How sure: every `Description.sure` begins with one of these.
SURE = {
  CODE: "The reference implementation of the method's authors, or the public "
  'code that the entry names.',
  PAPER: 'Its text, without code to compare with.',
  REVIEWS: 'Neither text nor code has it.',
  PEER: 'Neither text nor code of the authors was at hand.',
  OURS: 'The source is silent, not public, or speaks of something else.',
  PLAIN: 'There is nothing to be unsure of.',
}


class Description(NamedTuple):
  """What a reader is told of a row or of a choice.

  Attributes:
    equation: plain text, shown as code; it names every number it depends on
      as the option is called. Indentation of the source is taken off.
    source: papers with their arXiv id (which becomes a link), or code.
    sure: one of `SURE`, and what limits it.
    when: to use it.
    elsewhere: what other codebases call it, as far as we are sure.
  """

  equation: str
  source: str
  sure: str
  when: str
  elsewhere: str = '—'
