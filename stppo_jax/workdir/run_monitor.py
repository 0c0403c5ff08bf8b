"""Lets a run be watched from outside: its heartbeat, stacks and profile.

    WORKDIR/heartbeat.json           see `workdir.heartbeat`
           /stacks/host0             see `workdir.watchdog`
           /profile/plugins/...      traces, for XProf and TensorBoard
           /profile/memory-000012.prof   memory after step 12, for pprof
           /profile.request          asks for a trace of the next step

A trace covers whole steps. Its spans `step` and the phases of a step are those
of the timer, so they have the names of `timing_s/*`.
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
  """Keeps the heartbeat of a run, its watchdog and the account of its time.

  It also traces the steps that are asked for.

  Args:
    exit_code: returns the exit code of a run that ends without an error.

  Attributes:
    on_phase: called with the name of each phase that begins, or ''.
  """

  def __init__(self, exit_code: Callable[[], int]):
    self._heartbeat = heartbeat.Heartbeat(exit_code)
    self._watchdog = watchdog.Watchdog()
    self.on_phase: Callable[[str], None] = lambda phase: None
    self._goodput: goodput.Goodput | None = None
    self._folder: pathlib.Path | None = None
    self._steps = range(0)
    self._traced: int | None = None  # the last step that is traced now
    # The spans of a step and of its phase, if they are traced.
    self._step, self._phase = contextlib.ExitStack(), contextlib.ExitStack()

  @contextlib.contextmanager
  def started(
    self,
    folder: pathlib.Path,
    hosts: Sequence[str],
    steps: Sequence[int],
    claim: lock.Claim | None = None,
  ) -> Iterator[None]:
    """Writes the heartbeat in the body, and ends a trace with it.

    Args:
      folder: the run's folder.
      hosts: the names of the machines of all hosts.
      steps: the first step to trace, and the first one after it that is not
        traced; steps are counted from 1.
      claim: the lock of the folder, if it has one.
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
    """Watches in the body how long phases take; every host does.

    Args:
      folder: the run's folder.
      host: the number of this host.
    """
    return self._watchdog.watching(folder / 'stacks' / f'host{host}')

  def resume(self, step: int, num_steps: int, origin: int) -> None:
    """Says how many steps are done when the run starts or resumes.

    Args:
      step: the number of steps that are kept.
      num_steps: the number of steps of the whole run.
      origin: 1 to 4, where its weights come from, see `training.starts`.
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
    """Returns the metrics of the time until this line; {} on other hosts."""
    return {} if self._goodput is None else self._goodput.measure(metrics)

  def count(self, step: int, num_steps: int) -> None:
    """Says how many steps are done, and how many the run has."""
    self._heartbeat.count(step, num_steps)

  def end(self, exit_code: int) -> None:
    """Writes the last heartbeat of a process that is about to end."""
    self._heartbeat.end(exit_code)

  def begin_step(self, step: int) -> None:
    """Begins or ends a trace where that is due.

    Args:
      step: the number of the step that begins, from 1.
    """
    if self._folder is None:  # of several hosts, the first is traced
      return
    # Ended here and not after its last step, so that the save of that step is
    # in the trace.
    if self._traced is not None and step > self._traced:
      self._end_trace()
    request = self._folder / REQUEST
    if self._traced is None and step in self._steps:
      self._begin_trace(self._steps[-1])
    elif self._traced is None and request.exists():
      try:
        request.unlink(missing_ok=True)
      except OSError as error:  # else every step would be traced
        _log.warning('cannot remove the request for a trace: %s', error)
      else:
        self._begin_trace(step)
    if self._traced is not None:
      self._close_spans()  # those of the step before
      span = jax.profiler.StepTraceAnnotation('step', step_num=step)
      self._step.enter_context(span)

  def begin_phase(self, phase: str) -> None:
    """Says what the run does from here on; '' = nothing that has a name."""
    self._heartbeat.enter_phase(phase)
    self._watchdog.enter_phase(phase)
    self.on_phase(phase)
    # The span of the phase before ends here. A phase without a name has none.
    self._phase.close()
    if self._traced is not None and phase:
      self._phase.enter_context(jax.profiler.TraceAnnotation(phase))

  def _begin_trace(self, last: int) -> None:
    assert self._folder is not None
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every call of a function would be in it
    try:
      jax.profiler.start_trace(
        self._folder / _PROFILE, profiler_options=options
      )
    except (OSError, RuntimeError) as error:
      # A profile is not worth a run.
      _log.warning('cannot trace, the run goes on: %s', error)
    else:
      self._traced = last

  def _end_trace(self) -> None:
    """Writes the trace, and the memory that is in use."""
    if self._traced is None:
      return
    assert self._folder is not None
    self._close_spans()
    folder, last = self._folder / _PROFILE, self._traced
    self._traced = None  # first, so that an error does not end it twice
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
