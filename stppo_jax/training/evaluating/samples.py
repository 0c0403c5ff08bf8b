"""Prints a few dialogues of a run, which show what its policy does."""

from collections.abc import Callable
from collections.abc import Sequence
import sys

from stppo_jax import types
from stppo_jax.records import dialogues
from stppo_jax.records import trajectory_metrics
from stppo_jax.sampling import tokenizer as tokenizer_lib


class Samples:
  """Prints samples of dialogues.

  Args:
    show: prints text.
    tokenizer: decodes dialogues.
    count: the number of dialogues that are printed at a time.
  """

  def __init__(
    self,
    show: Callable[[str], None],
    tokenizer: tokenizer_lib.Tokenizer,
    count: int,
  ):
    self._show, self._tokenizer, self._count = show, tokenizer, count

  def print(self, title: str, trajectories: Sequence[types.Trajectory]) -> None:
    """Prints some of the trajectories under a title."""
    kept = dialogues.spread(trajectories, self._count)
    records = trajectory_metrics.records(kept, self._tokenizer)
    self.print_records(title, records)

  def print_records(self, title: str, records: Sequence[dict]) -> None:
    """Prints some records of trajectories under a title."""
    records = dialogues.spread(records, self._count)
    if records:
      self._show(f'{title} ({dialogues.LEGEND})')
      for record in records:
        self._show(dialogues.render(record, colour=sys.stdout.isatty()))
