"""Cuts turns into sentences."""

from collections.abc import Sequence

import numpy as np

_ENDS = b'.?!\n'


class SentenceSplitter:
  """Maps the tokens of a turn to sentences.

  The rule is our choice. A sentence ends at `.`, `?`, `!` or a line break of
  the decoded turn. The token that contains such a character is the last one of
  the sentence, with whatever else is in the token. Every such character ends
  a sentence, also those in "3.14" and "...". A token with several of them still
  ends one sentence only.

  The bytes of a token are enough to find the ends. The four characters are
  ASCII, and no byte of a longer UTF-8 character is ASCII, so this holds even
  where a character is spread over several tokens.

  Args:
    token_bytes: what each id contributes to the text, see
      `sampling.tokenizer.Tokenizer.token_bytes`. Higher ids, which a padded
      vocabulary has, contribute nothing.
  """

  def __init__(self, token_bytes: Sequence[bytes]):
    ends = [any(end in piece for end in _ENDS) for piece in token_bytes]
    self._ends_V = np.array([*ends, False])  # the last is for higher ids

  def __call__(self, token_ids: np.ndarray) -> np.ndarray:
    """Returns int32 [L], the sentence of each token of a turn: 1, 2, ..."""
    closes_L = self._ends_V[np.minimum(token_ids, len(self._ends_V) - 1)]
    return (1 + np.cumsum(closes_L) - closes_L).astype(np.int32)
