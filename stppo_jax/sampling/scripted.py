"""A policy that plays back what it was given: for demonstrations and tests."""

from collections.abc import Sequence

import numpy as np

from stppo_jax.sampling import turns


class ScriptedEngine:
  """Stands in for `Engine`; row n writes scripts[n], one entry a turn.

  A script that has run out writes nothing more; its log-probs are 0.

  Args:
    scripts: per row, the token ids of each turn.
    max_length: tokens a row can hold.
  """

  version = 0

  def __init__(self, scripts: Sequence[Sequence[np.ndarray]], max_length: int):
    self.max_length = max_length
    self._scripts = scripts

  def begin(
    self,
    prompts: Sequence[np.ndarray | None],
    keys=None,
    *,
    group_size: int,
    max_turn_tokens: int,
    greedy: bool = False,
  ) -> None:
    """Back to the first turn of every script.

    Raises:
      ValueError: more rows than scripts.
    """
    del keys, greedy
    rows = len(prompts) * group_size
    if rows > len(self._scripts):
      raise ValueError(f'{rows} rows for {len(self._scripts)} scripts')
    self._max_turn_tokens = max_turn_tokens
    played = [
      (group * group_size + n, len(prompt))
      for group, prompt in enumerate(prompts)
      if prompt is not None
      for n in range(group_size)
    ]
    self._lengths = dict(played)
    self._turns = dict.fromkeys(self._lengths, 0)
    self._writing = set(self._lengths)

  @property
  def busy(self) -> bool:
    """Whether a poll ends a turn."""
    return bool(self._writing)

  def remaining(self, row: int) -> int:
    """Tokens that still fit into a row."""
    return self.max_length - self._lengths[row]

  def resume(self, row: int, token_ids: np.ndarray) -> None:
    """Counts the tokens."""
    self._lengths[row] += len(token_ids)
    self._writing.add(row)

  def close(self, row: int) -> None:
    """Ends a row."""
    del self._lengths[row]

  def statistics(self) -> dict[str, float]:
    """Nothing can fail."""
    return {}

  def poll(self) -> dict[int, turns.GeneratedTurn]:
    """The next turn of every row whose turn it is, cut to what fits."""
    written = {}
    for row in sorted(self._writing):
      script, turn = self._scripts[row], self._turns[row]
      ids = script[turn] if turn < len(script) else np.zeros(0, np.int32)
      kept = ids[: min(self._max_turn_tokens, self.remaining(row))]
      self._turns[row] += 1
      self._lengths[row] += len(kept)
      zeros = np.zeros(len(kept), np.float32)
      written[row] = turns.GeneratedTurn(
        kept, zeros, zeros, len(kept) == len(ids)
      )
    self._writing.clear()
    return written
