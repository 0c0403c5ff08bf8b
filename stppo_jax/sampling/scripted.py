"""A policy that plays back what it was given: for demonstrations and tests."""

from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np

from stppo_jax.sampling import engine


class ScriptedEngine:
  """Stands in for `Engine`; slot n writes scripts[n], one entry a turn.

  A script that has run out writes nothing more; its log-probs are 0.

  Args:
    scripts: per slot, the token ids of each turn.
    max_length: tokens a slot can hold.
  """

  def __init__(self, scripts: Sequence[Sequence[np.ndarray]], max_length: int):
    self.slots = len(scripts)
    self.max_length = max_length
    self._scripts = scripts
    self.reset()

  def reset(self) -> None:
    """Back to the first turn of every script."""
    self._lengths = [0] * self.slots
    self._turns = [0] * self.slots

  def prefill(
    self, ids_by_group: Mapping[int, np.ndarray], *, group_size: int
  ) -> None:
    """Back to the first turns; counts a group's tokens in each of its slots."""
    self.reset()
    for group, ids in ids_by_group.items():
      first = group * group_size
      self.extend(dict.fromkeys(range(first, first + group_size), ids))

  def remaining(self, slot: int) -> int:
    """Tokens that still fit into a slot."""
    return self.max_length - self._lengths[slot]

  def extend(self, ids_by_slot: Mapping[int, np.ndarray]) -> None:
    """Counts the tokens."""
    for slot, ids in ids_by_slot.items():
      self._lengths[slot] += len(ids)

  def generate(
    self, slots: Sequence[int], *, keys_S=None, max_tokens: int, greedy=False
  ) -> dict[int, engine.Written]:
    """The next turn of each slot's script, cut to what fits."""
    del keys_S, greedy
    written = {}
    for slot in slots:
      script, turn = self._scripts[slot], self._turns[slot]
      ids = script[turn] if turn < len(script) else np.zeros(0, np.int32)
      kept = ids[: min(max_tokens, self.remaining(slot))]
      self._turns[slot] += 1
      self._lengths[slot] += len(kept)
      written[slot] = engine.Written(
        kept, np.zeros(len(kept), np.float32), len(kept) == len(ids)
      )
    return written
