"""Numbers the sentences of a turn's tokens."""

from collections.abc import Sequence

import numpy as np

_ENDS = b'.?!\n'


class SentenceSplitter:
  """Cuts the tokens of a turn into sentences. [ours]

  A sentence ends at `.`, `?`, `!` or a line break of the decoded turn; the
  token that contains the end closes it, with all else that the token holds.
  Every such character ends one, those of "3.14" and of "..." too, but a token
  closes one sentence only, however many of them it contains.

  Text is not needed: the four are ASCII, and no byte of a longer UTF-8
  character is, so the bytes of a token say all, also where a character is
  spread over several tokens.

  Args:
    token_bytes: what each id contributes to the text, see
      `sampling.tokenizer.Tokenizer.token_bytes`. Ids beyond, which a padded
      vocabulary has, contribute nothing.
  """

  def __init__(self, token_bytes: Sequence[bytes]):
    ends = [any(end in piece for end in _ENDS) for piece in token_bytes]
    self._ends_V = np.array([*ends, False])  # the last is for ids beyond

  def __call__(self, token_ids: np.ndarray) -> np.ndarray:
    """[N] int32, the sentence of each of a turn's tokens: 1, 2, ..."""
    closes_N = self._ends_V[np.minimum(token_ids, len(self._ends_V) - 1)]
    return (1 + np.cumsum(closes_N) - closes_N).astype(np.int32)
