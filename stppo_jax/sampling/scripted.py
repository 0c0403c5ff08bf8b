"""An engine that replays given turns, for demonstrations and tests."""

from collections.abc import Sequence

import numpy as np

from stppo_jax import types


class ScriptedEngine:
  """Replays scripts in place of an `Engine`: row n generates scripts[n].

  Each turn of a row generates the next array of the row's script. Once the
  script has run out, the row generates empty turns. All log-probabilities are
  0.

  Args:
    scripts: for each row, the token ids of each turn.
    max_length: the most tokens of a row.
  """

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
    """Begins a collection at the first turn of every script."""
    del keys, greedy
    self._max_turn_tokens = max_turn_tokens
    self._lengths = {
      group * group_size + n: len(prompt)
      for group, prompt in enumerate(prompts)
      if prompt is not None
      for n in range(group_size)
    }
    self._turns = dict.fromkeys(self._lengths, 0)
    self._generating = set(self._lengths)

  @property
  def busy(self) -> bool:
    """Whether the next poll returns a turn."""
    return bool(self._generating)

  def remaining(self, row: int) -> int:
    """Returns how many tokens still fit into a row."""
    return self.max_length - self._lengths[row]

  def resume(self, row: int, token_ids: np.ndarray) -> None:
    """Appends an observation to a row and begins the row's next turn."""
    self._lengths[row] += len(token_ids)
    self._generating.add(row)

  def close(self, row: int) -> None:
    """Ends a row."""
    del self._lengths[row]

  def statistics(self) -> dict[str, float]:
    """Returns no metrics, because no turn can fail."""
    return {}

  def finish(self) -> None:
    """Does nothing, because no other host takes part."""

  def poll(self) -> dict[int, types.GeneratedTurn]:
    """Returns the next turn of each generating row, cut to the token limits."""
    ended = {}
    for row in sorted(self._generating):
      script, turn = self._scripts[row], self._turns[row]
      ids = script[turn] if turn < len(script) else np.zeros(0, np.int32)
      kept = ids[: min(self._max_turn_tokens, self.remaining(row))]
      self._turns[row] += 1
      self._lengths[row] += len(kept)
      zeros = np.zeros(len(kept), np.float32)
      stopped = len(kept) == len(ids)
      ended[row] = types.GeneratedTurn(kept, zeros, zeros, stopped)
    self._generating.clear()
    return ended
