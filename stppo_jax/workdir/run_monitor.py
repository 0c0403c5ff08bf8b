"""Lets users watch a run from outside: its heartbeat, stacks and profile.

    WORKDIR/heartbeat.json           see `workdir.heartbeat`
           /stacks/host0             see `workdir.watchdog`
           /profile/plugins/...      traces, for XProf and TensorBoard
           /profile/memory-000012.prof   memory after step 12, for pprof
           /profile.request          requests a trace of the next step

A trace covers whole steps. It has a span for each step and for each phase of a
step. The spans have the names of the metrics `timing_s/*`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import logging
import pathlib

import jax

from stppo_jax.workdir import goodput
from stppo_jax.workdir import heartbeat
from stppo_jax.workdir import lock
from stppo_jax.workdir import run_folder
from stppo_jax.workdir import watchdog

REQUEST = 'profile.request'
_PROFILE = 'profile'
_log = logging.getLogger(__name__)


class Watch:
  """Writes a run's heartbeat, watches its phases and accounts for its time.

  The class also records traces of requested steps.

  Args:
    exit_code: returns the exit code of the process; called if the run ends
      without an error.

  Attributes:
    on_phase: called with the name of each phase that begins, and with '' when a
      phase ends.
  """

  def __init__(self, exit_code: Callable[[], int]):
    self._heartbeat = heartbeat.Heartbeat(exit_code)
    self._watchdog = watchdog.Watchdog()
    self.on_phase: Callable[[str], None] = lambda phase: None
    self._goodput: goodput.Goodput | None = None
    self._folder: pathlib.Path | None = None
    self._steps = range(0)
    # The last step of the trace that is being recorded.
    self._traced: int | None = None
    # The open spans of the present step and phase, during a trace.
    self._step, self._phase = contextlib.ExitStack(), contextlib.ExitStack()

  @contextlib.contextmanager
  def started(
    self,
    folder: pathlib.Path,
    hosts: Sequence[str],
    steps: Sequence[int],
    claim: lock.Claim | None = None,
  ) -> Iterator[None]:
    """Writes the heartbeat during the `with` block, then ends an open trace.

    Args:
      folder: the run's folder.
      hosts: the names of the machines of all hosts.
      steps: the range of steps to trace, as (first, last + 1), counted from 1;
        (0, 0) for no trace.
      claim: the lock of the folder; None without a lock.
    """
    self._folder, self._steps = folder, range(*steps)
    with self._heartbeat.written(folder, hosts, claim):
      try:
        yield
      finally:
        self._end_trace()

  @property
  def has_begun(self) -> bool:
    """Whether the heartbeat is being written."""
    return self._folder is not None

  def phases_watched(
    self, folder: pathlib.Path, host: int
  ) -> contextlib.AbstractContextManager[None]:
    """Watches how long this host's phases take, during the `with` block.

    Every host calls this method.

    Args:
      folder: the run's folder.
      host: the index of this host.
    """
    return self._watchdog.watching(folder / 'stacks' / f'host{host}')

  def resume(self, step: int, num_steps: int, origin: int) -> None:
    """Begins to account for steps and time when a run starts or resumes.

    Args:
      step: the number of steps that are done and kept.
      num_steps: the number of steps of the whole run.
      origin: the source of the run's weights, 1 to 4, see `training.starts`.
    """
    self.count(step, num_steps)
    if self._folder is None:
      return
    metrics = self._folder / run_folder.METRICS
    productive, last_step = goodput.read(metrics, step)
    self._heartbeat.resume(step, last_step)
    self._goodput = goodput.Goodput(
      beat=self._heartbeat.beat, productive=productive, origin=origin
    )

  def account(self, metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the time metrics of a step; {} on hosts after the first.

    Args:
      metrics: the other metrics of the step.
    """
    return {} if self._goodput is None else self._goodput.measure(metrics)

  def count(self, step: int, num_steps: int) -> None:
    """Sets the number of done steps, and the number of steps of the run."""
    self._heartbeat.count(step, num_steps)

  def end(self, exit_code: int) -> None:
    """Writes the last heartbeat of a process that is about to end."""
    self._heartbeat.end(exit_code)

  def begin_step(self, step: int) -> None:
    """Begins the span of a step in the trace; begins or ends the trace if due.

    Args:
      step: the number of the step that begins, counted from 1.
    """
    if self._folder is None:  # only the first host is traced
      return
    # A trace ends when the next step begins, and not earlier, so that it
    # includes the save of its last step.
    if self._traced is not None and step > self._traced:
      self._end_trace()
    request = self._folder / REQUEST
    if self._traced is None and step in self._steps:
      self._begin_trace(self._steps[-1])
    elif self._traced is None and request.exists():
      try:
        request.unlink(missing_ok=True)
      except OSError as error:
        # A request that cannot be removed is ignored. Otherwise every later
        # step would be traced, too.
        _log.warning('cannot remove the request for a trace: %s', error)
      else:
        self._begin_trace(step)
    if self._traced is not None:
      self._close_spans()  # the spans of the previous step
      span = jax.profiler.StepTraceAnnotation('step', step_num=step)
      self._step.enter_context(span)

  def begin_phase(self, phase: str) -> None:
    """Tells all observers that a phase begins; '' stands for no phase."""
    self._heartbeat.enter_phase(phase)
    self._watchdog.enter_phase(phase)
    self.on_phase(phase)
    # The span of the previous phase ends here. The phase '' opens no span.
    self._phase.close()
    if self._traced is not None and phase:
      self._phase.enter_context(jax.profiler.TraceAnnotation(phase))

  def _begin_trace(self, last: int) -> None:
    assert self._folder is not None
    options = jax.profiler.ProfileOptions()
    # By default, the trace would contain every call of a Python function.
    options.python_tracer_level = 0
    try:
      jax.profiler.start_trace(
        self._folder / _PROFILE, profiler_options=options
      )
    except (OSError, RuntimeError) as error:
      # An error of the profiler must not end the run.
      _log.warning('cannot trace, the run goes on: %s', error)
    else:
      self._traced = last

  def _end_trace(self) -> None:
    """Ends the trace; writes it with a profile of the memory in use."""
    if self._traced is None:
      return
    assert self._folder is not None
    self._close_spans()
    folder, last = self._folder / _PROFILE, self._traced
    # This is set before the trace ends, so that a trace whose end fails is not
    # ended a second time.
    self._traced = None
    try:
      jax.profiler.stop_trace()
      jax.profiler.save_device_memory_profile(
        str(folder / f'memory-{last:06d}.prof')
      )
    except (OSError, RuntimeError) as error:
      _log.warning('cannot write the trace, the run goes on: %s', error)

  def _close_spans(self) -> None:
    self._phase.close()
    self._step.close()
