"""Chooses the checkpoints that are kept: the newest, regular ones, the best.

The score of a step is in its manifest, so that a later start knows it too.
"""

from collections.abc import Sequence
import pathlib
from typing import Any

from stppo_jax.records.checkpoints import manifest as manifest_lib
from stppo_jax.records.checkpoints import saved_steps


class Preservation:
  """A policy of Orbax, which asks at every save what is kept.

  Args:
    folder: the folder of the checkpoints.
    keep: the number of the newest steps that are kept; None: all steps are.
    keep_every: the multiples of this number are kept too; 0: none.
  """

  def __init__(
    self, folder: pathlib.Path, *, keep: int | None, keep_every: int
  ):
    self._folder = folder
    self._keep, self._keep_every = keep, keep_every
    self._scores: dict[int, float | None] = {}

  def note(self, step: int, score: float | None) -> None:
    """Notes how good a step is that is about to be saved."""
    self._scores[step] = score

  def best(self, steps: Sequence[int]) -> int | None:
    """Returns the step with the best score; None if no step has one.

    Of several with the same score it is the newest.
    """
    for step in steps:
      if step not in self._scores:
        self._scores[step] = self._read_score(step)
    return manifest_lib.best({step: self._scores[step] for step in steps})

  def should_preserve(
    self, checkpoints: Sequence[Any], *, context: Any
  ) -> Sequence[bool]:
    """Returns for each step whether it is kept; Orbax calls it."""
    del context
    steps = [checkpoint.step for checkpoint in checkpoints]
    kept = self._kept(steps)
    return [step in kept for step in steps]

  def _kept(self, steps: Sequence[int]) -> set[int | None]:
    if self._keep is None:
      return set(steps)
    every = self._keep_every
    regular = {step for step in steps if every and step % every == 0}
    newest = sorted(steps)[-self._keep :]
    return {*newest, *regular, self.best(steps)}

  def _read_score(self, step: int) -> float | None:
    """Returns the score of a step; None if it has none or is damaged."""
    try:
      manifest = saved_steps.read_manifest(self._folder / str(step), step)
    except ValueError:
      return None
    return manifest['host'].get('score')
