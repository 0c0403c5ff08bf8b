"""Writes metrics and dialogues of a run to files, TensorBoard and trackers.

    workdir/metrics.jsonl              lines {"step": n, "name": number, ...}
    workdir/trajectories-000012.jsonl  dialogues of step 12, one per line
           /trajectories-000012-host3.jsonl    dialogues of step 12 from host 3
           /evaluation-000012.jsonl    dialogues of the evaluation after step 12
    workdir/tensorboard/               a copy of the metrics

With several hosts, the first host writes the metrics, and each host writes the
dialogues that it has collected. TensorBoard and the trackers of
`records/trackers.py` only get copies of the metrics. Metrics must never stop a
run. So an error of a file, of TensorBoard or of a tracker is counted in
`writer/sink_errors`, and the first error of each is logged.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import logging
import math
import pathlib
import re
import shutil
from typing import Any

from stppo_jax.records import progress
from stppo_jax.records import tensorboard as tensorboard_lib
from stppo_jax.records import trackers as trackers_lib
from stppo_jax.workdir import atomic_files
from stppo_jax.workdir import run_folder

METRICS = run_folder.METRICS
_log = logging.getLogger(__name__)
_SINK_ERRORS = 'writer/sink_errors'
_NON_FINITE = 'writer/non_finite'
_DIALOGUES = re.compile(
  r'(?:trajectories|evaluation)-(\d{6,})(-host\d+)?\.jsonl'
)


class Writer:
  """Writes the dialogues of a host, and on the first host also the metrics."""

  def __init__(
    self,
    workdir: str | pathlib.Path,
    *,
    trajectories: int,
    display: progress.Progress | None = None,
    tensorboard: bool = False,
    host: int = 0,
    keep_files: int = 0,
    keep_lines: int = 0,
    hparams: Mapping[str, Any] | None = None,
    trackers: Sequence[trackers_lib.Tracker] = (),
  ):
    """Makes the run's folder; the first write makes the files.

    Args:
      workdir: the run's folder.
      trajectories: the number of dialogues to write for each step.
      display: the progress display on the first host; None on other hosts.
      tensorboard: whether to write the metrics for TensorBoard, too.
      host: the index of the host.
      keep_files: the number of this host's newest dialogue files to keep, for
        each kind of dialogues. 0 keeps all files.
      keep_lines: the metrics of at least this many of the newest steps are
        kept. When the file has the metrics of twice as many steps, the older
        half is removed. 0 keeps the metrics of all steps.
      hparams: config key to value, for TensorBoard.
      trackers: experiment trackers that get the metrics, too.
    """
    self._workdir = pathlib.Path(workdir)
    self._workdir.mkdir(parents=True, exist_ok=True)
    self._metrics = self._workdir / METRICS
    self._display, self._host = display, host
    self._trajectories = trajectories
    self._keep_files, self._keep_lines = keep_files, keep_lines
    self._tensorboard, self._hparams = tensorboard, hparams or {}
    self._trackers = trackers
    self._sink = self._purge_step = None
    self._errors = 0
    self._logged = set()

  def write_trajectories(self, step: int, records: Sequence[Mapping]) -> None:
    """Writes the first dialogues of a step, at most `trajectories` of them."""
    self._write_dialogues('trajectories', step, records[: self._trajectories])

  def write_evaluation(self, step: int, records: Sequence[Mapping]) -> None:
    """Writes dialogues of the evaluation after a step."""
    self._write_dialogues('evaluation', step, records)

  def rewind(self, step: int, *, saved: int) -> pathlib.Path | None:
    """Removes lines and dialogues of later steps, before a run resumes.

    Call this before the first `write` of a resumed run. The first host does the
    work for all hosts. If anything was written after the newest checkpoint,
    this host copies metrics.jsonl to a new folder, and moves the dialogues of
    steps after the checkpoint to the new folder, because the resumed run may
    write something else for these steps. Then the host removes from
    metrics.jsonl an incomplete last line, and the lines of steps after `step`.

    Args:
      step: the last step whose line is kept.
      saved: the step of the newest checkpoint; 0 without a checkpoint.

    Returns:
      The new folder, or None if nothing was written after the newest
      checkpoint.
    """
    if self._host:
      return None
    lines = self._lines()
    dialogues = [
      (int(match[1]), path)
      for path in self._workdir.iterdir()
      if (match := _DIALOGUES.fullmatch(path.name))
    ]
    written = [*map(_step_of, lines), *(number for number, _ in dialogues)]
    aside = None
    # An incomplete line counts as later than any step. So metrics.jsonl is also
    # copied if only its last line is incomplete.
    if any(number > saved for number in written):
      aside = run_folder.make_aside(self._workdir)
      if lines:
        # The file is copied and not moved, because the run appends to it.
        shutil.copy2(self._metrics, aside)
      for number, path in dialogues:
        if number > saved:
          path.rename(aside / path.name)
    if lines:
      self._keep(lines, last=step)
    # Event files cannot be cut. A new event file says which earlier events no
    # longer count.
    self._purge_step = step + 1
    return aside

  def complete(self, step: int, line: str) -> bool:
    """Writes the metrics line of a step again if the file has lost the line.

    Call this after `rewind`. If the machine fails or the disk is full, a step
    may have a checkpoint although the line of the step is lost.

    Args:
      step: the step of the newest checkpoint.
      line: the line that `write` returned for this step.

    Returns:
      Whether the line was written.
    """
    if (
      self._host
      or not line
      or any(_step_of(each) == step for each in self._lines())
    ):
      return False
    self._append(line)
    return True

  def write(self, step: int, metrics: Mapping[str, float]) -> str:
    """Appends the metrics of a step and shows them; returns the line.

    Only the first host writes. Other hosts return ''.

    Args:
      step: the number of steps that are done, including this step.
      metrics: name of a metric to its value. A value that is not finite is
        written as null, and as text in `writer/non_finite`.
    """
    if self._host:
      return ''
    finite: dict[str, float] = {}
    non_finite: dict[str, str] = {}
    record: dict[str, Any] = {'step': int(step)}
    for name, value in metrics.items():
      value = float(value)
      if math.isfinite(value):
        finite[name] = record[name] = value
      else:  # JSON has no nan
        record[name] = None
        non_finite[name] = str(value)
    if self._tensorboard:
      self._counted('tensorboard', lambda: self._write_sink(step, finite))
    for tracker in self._trackers:
      self._counted(tracker.name, lambda: tracker.write(step, finite))
    # The file is written last, because its line has the number of errors of
    # TensorBoard and the trackers.
    record[_SINK_ERRORS] = self._errors
    if non_finite:
      record[_NON_FINITE] = non_finite
    line = json.dumps(record, allow_nan=False)
    self._append(line)
    if self._keep_lines and step % self._keep_lines == 0:
      self._counted('metrics', lambda: self._keep(self._lines(), last=step))
    if self._display is not None:
      self._display.update(step, finite)
    return line

  def enter_phase(self, phase: str) -> None:
    """Shows in the progress display which phase the run enters."""
    if self._display is not None:
      self._display.enter_phase(phase)

  def show(self, text: str) -> None:
    """Prints text to the terminal beside the progress display."""
    if self._display is not None:
      self._display.show(text)
    else:
      print(f'host {self._host}: {text}', flush=True)

  def close(self) -> None:
    """Ends the display and the trackers; the files are already complete."""
    if self._display is not None:
      self._display.close()
    for tracker in self._trackers:
      tracker.close()

  def _write_dialogues(
    self, kind: str, step: int, records: Sequence[Mapping]
  ) -> None:
    """Writes dialogues of a step, and removes the files that are not kept.

    The dialogues replace an earlier file of the step. Without dialogues, no
    file is written or removed.

    Args:
      kind: the kind of dialogues, with which the file names begin.
      step: the number of the step.
      records: the dialogues, one for each line.
    """
    suffix = f'-host{self._host}' if self._host else ''

    def write() -> None:
      path = self._workdir / f'{kind}-{step:06d}{suffix}.jsonl'
      lines = [json.dumps(record).encode() + b'\n' for record in records]
      # If the run was killed and makes a step again, the new dialogues of the
      # step replace the old dialogues.
      path.unlink(missing_ok=True)
      atomic_files.append(path, b''.join(lines))
      if self._keep_files:
        # Each host counts and removes only files of its own.
        name = re.compile(rf'{kind}-(\d+){suffix}\.jsonl')
        written = sorted(
          (int(match[1]), other)
          for other in self._workdir.iterdir()
          if (match := name.fullmatch(other.name))
        )
        for _, other in written[: -self._keep_files]:
          other.unlink(missing_ok=True)

    if records:
      self._counted(kind, write)

  def _counted(self, sink: str, call: Callable[[], None]) -> None:
    """Calls a function that writes to a sink, and counts its errors.

    The first error of each sink is logged.
    """
    # Every error is caught, so that a lost line never ends the run.
    try:
      call()
    except Exception as error:
      self._errors += 1
      if sink not in self._logged:
        self._logged.add(sink)
        _log.warning('cannot write %s, the run goes on: %r', sink, error)

  def _lines(self) -> list[bytes]:
    """Returns the lines of metrics.jsonl; the last line may be incomplete."""
    if not self._metrics.exists():
      return []
    return self._metrics.read_bytes().splitlines(keepends=True)

  def _keep(self, lines: Sequence[bytes], *, last: int) -> None:
    """Rewrites metrics.jsonl with only the lines that are kept.

    The kept steps depend only on the last step. So an interrupted run ends with
    the same lines as an uninterrupted run.

    Args:
      lines: all lines of the file.
      last: the last step whose line is kept.
    """
    first = 0
    if self._keep_lines:
      first = (last // self._keep_lines - 1) * self._keep_lines + 1
    kept = [line for line in lines if first <= _step_of(line) <= last]
    atomic_files.replace(self._metrics, b''.join(kept))

  def _append(self, line: str) -> None:
    """Appends a line to metrics.jsonl."""
    data = line.encode() + b'\n'
    # If the line is lost here, the next checkpoint has it, see `complete`.
    self._counted('metrics', lambda: atomic_files.append(self._metrics, data))

  def _write_sink(self, step: int, metrics: Mapping[str, float]) -> None:
    """Writes the scalars of a step for TensorBoard."""
    if self._sink is None:
      self._sink = tensorboard_lib.EventFile(
        self._workdir / 'tensorboard', purge_step=self._purge_step
      )
      self._sink.write_hparams(self._hparams)
    self._sink.write(step, metrics)


def _step_of(line: bytes) -> float:
  """Returns the step of a line of metrics, infinity for an incomplete line."""
  if not line.endswith(b'\n'):
    return math.inf
  try:
    return json.loads(line)['step']
  except (ValueError, KeyError, TypeError, RecursionError):
    return math.inf
