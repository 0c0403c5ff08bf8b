"""Faults that are injected on purpose, drawn from a seed."""

import hashlib

# What a fault does to a request: the connection breaks, or the server answers
# with a status, or with something that is no reply of the protocol.
KINDS = ('connection', 'status_500', 'status_429', 'malformed')


class Faults:
  """Decides which requests fail, and how.

  A decision depends on the seed and the key only, so it is the same in every
  process and in whichever order requests are made.
  """

  def __init__(self, *, rate: float, seed: int):
    """Makes a schedule of faults.

    Args:
      rate: the share of the requests that fail, from 0 to 1.
      seed: the seed of all decisions.

    Raises:
      ValueError: if the rate is not from 0 to 1.
    """
    if not 0 <= rate <= 1:
      raise ValueError(f'rate of faults {rate}: must be from 0 to 1')
    self._rate = rate
    self._seed = seed

  def draw(self, *key: str | int) -> str:
    """Returns one of `KINDS` for a request that fails, else ''."""
    digest = hashlib.sha256(repr((self._seed, *key)).encode()).digest()
    if int.from_bytes(digest[:8], 'big') >= self._rate * 2**64:
      return ''
    return KINDS[digest[8] % len(KINDS)]
