"""Shows a few dialogues of a run, and writes those of its evaluations."""

from collections.abc import Sequence
import sys

from stppo_jax import types
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.records import dialogues
from stppo_jax.records import trajectory_metrics
from stppo_jax.records import writer as writer_lib
from stppo_jax.sampling import tokenizer as tokenizer_lib


def build(
  config,
  writer: writer_lib.Writer | writer_lib.OtherHostWriter,
  tokenizer: tokenizer_lib.Tokenizer,
  hosts: hosts_lib.Hosts,
) -> 'Samples':
  """Returns the samples of a host; the first one prints some."""
  return Samples(
    writer,
    tokenizer,
    printed=config.writer.samples if hosts.is_first else 0,
    written=config.writer.evaluation,
  )


class Samples:
  """Prints samples of dialogues, and writes those of evaluations.

  Args:
    writer: the writer of the run.
    tokenizer: decodes dialogues.
    printed: the number of dialogues that are printed at a time.
    written: the number of dialogues of an evaluation that are written.
  """

  def __init__(
    self,
    writer: writer_lib.Writer | writer_lib.OtherHostWriter,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    printed: int,
    written: int,
  ):
    self._writer, self._tokenizer = writer, tokenizer
    self._printed, self._written = printed, written

  def show_evaluation(
    self, step: int, title: str, trajectories: Sequence[types.Trajectory]
  ) -> None:
    """Prints and writes some dialogues of the evaluation after a step."""
    kept = dialogues.spread(trajectories, self._printed)
    self.print_records(title, self._records(kept))
    kept = dialogues.spread(trajectories, self._written)
    self._writer.write_evaluation(step, self._records(kept))

  def print_records(self, title: str, records: Sequence[dict]) -> None:
    """Prints some records of trajectories under a title."""
    records = dialogues.spread(records, self._printed)
    if records:
      self._writer.show(f'{title} ({dialogues.LEGEND})')
      for record in records:
        text = dialogues.render(record, colour=sys.stdout.isatty())
        self._writer.show(text)

  def _records(self, trajectories: Sequence[types.Trajectory]) -> list[dict]:
    return trajectory_metrics.records(trajectories, self._tokenizer)
