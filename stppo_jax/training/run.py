"""Starts, resumes, saves, interrupts and ends a run.

    with run_lib.start(workdir) as run:
      with run.abandonable():
        run.record_config(config)
        ...                                    # build models and services
      with run.together():
        run.open(config, num_steps=num_steps, tokenizer=tokenizer)
        state = run.resume(state, checkpoints)
      run.begin(evaluate, prints_samples=False)
      for step in range(run.first_step, num_steps):
        with run.abandonable():
          ...                                  # may be dropped and done again
        state, metrics = ...                   # is finished once it has begun
        run.finish_step(step + 1, state, metrics)
      run.finish(policy, params)
    return run.exit_code

A step's metrics and dialogues are written before its checkpoint. A run that is
killed in between writes them again, and none is ever missing.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import functools
import pathlib
from typing import TypeVar

from stppo_jax import batch as batch_lib
from stppo_jax import exits
from stppo_jax import interruption
from stppo_jax import types
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import weights
from stppo_jax.models import functional
from stppo_jax.parallel import compilation
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.parallel import voting
from stppo_jax.records import products
from stppo_jax.records import timing
from stppo_jax.records import trajectory_metrics
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.training import checkpoint_state
from stppo_jax.training import saving
from stppo_jax.training.building import model_files
from stppo_jax.training.building import origin
from stppo_jax.training.building import sinks
from stppo_jax.training.checks import host_check
from stppo_jax.training.evaluating import evaluation
from stppo_jax.training.evaluating import samples
from stppo_jax.training.stopping import endings
from stppo_jax.workdir import bucket_copy
from stppo_jax.workdir import lock
from stppo_jax.workdir import run_folder
from stppo_jax.workdir import run_record
from stppo_jax.workdir import watching

T = TypeVar('T')
State = state_lib.TrainState
Evaluation = Callable[[], tuple[dict[str, float], list[types.Trajectory]]]
# Publishes the policy of a state; what it returns evaluates it.
Evaluate = Callable[[State], Evaluation]
_CONSUMING = ('update', 'step')  # phases in which updates consume the state


@contextlib.contextmanager
def start(
  workdir: str | pathlib.Path,
  *,
  unit: str = 'step',
  hosts: hosts_lib.Hosts = hosts_lib.ALONE,
) -> Iterator['Run']:
  """Yields a run that signals and errors end after its state was saved.

  A signal ends the body without an error; `Run.exit_code` is then that of the
  signal. See `endings` for errors.

  Args:
    workdir: the run's folder.
    unit: the name of what the run counts, for the lines that it prints.
    hosts: the hosts of the run.
  """
  with contextlib.ExitStack() as stack:
    interrupt = stack.enter_context(interruption.Interruption())
    interrupt.outlook = f'ending before the first {unit}'
    interrupt.on_signal, hosts.on_stop = hosts.stop, interrupt.request
    # Once its handlers are gone, a request would kill the process.
    stack.callback(setattr, hosts, 'on_stop', lambda: None)
    run = Run(pathlib.Path(workdir), interrupt, stack, unit, hosts)
    stack.enter_context(compilation.announced(run.show))
    with endings.handled(run, interrupt):
      yield run


class Run:
  """A run from its start to its end: its files, its progress, its exit code.

  Attributes:
    workdir: the run's folder.
    hosts: the hosts of the run; the first of them writes what they share.
    first_step: the number of steps that were done when the run was resumed.
    num_steps: the length of the run.
    steps_done: the number of steps that are done now.
    state: the state after the last finished step.
    resumed: whether there is a state that an interruption has to save, on all
      hosts.
    save_seconds: how long the last step has waited for its save; 0 if it had
      none.
    unit: the name of what the run counts.
    exit_code: the exit code of the process: 0, or that of the signal received.
  """

  state: State
  num_steps: int

  def __init__(
    self,
    workdir: pathlib.Path,
    interrupt: interruption.Interruption,
    stack: contextlib.ExitStack,
    unit: str,
    hosts: hosts_lib.Hosts,
  ):
    self.workdir = workdir
    self.hosts = hosts
    self.first_step = self.steps_done = 0
    self.resumed = self._has_state = False
    self.save_seconds = 0.0
    self.exit_code = 0
    self._interrupt, self._stack, self.unit = interrupt, stack, unit
    self._claim: lock.Claim | None = None
    self._show: Callable[[str], None] = functools.partial(print, flush=True)
    self._evaluate: Evaluate | None = None
    self._prints_samples = False
    self._extra = saving.Extra()  # of the last finished step
    # Whether an update may have consumed the state of that step.
    self._is_consumed = False
    self._watch = watching.Watch(lambda: self.exit_code)

  def timer(self, phase: str, *, step: int = 0) -> timing.Timer:
    """Returns a timer in a phase, which begins step `step` unless that is 0."""
    if step:
      self._watch.begin_step(step)
    return timing.Timer(phase, self._begin_phase)

  @contextlib.contextmanager
  def abandonable(
    self, *, patience: float | None = voting.PATIENCE
  ) -> Iterator[None]:
    """Runs a body that a signal may cut short; an update follows it.

    Several hosts vote at its end, see `voting.voted`.
    """
    if self.resumed:
      self._interrupt.outlook = f'saving {self.last}'
    outside, self._is_consumed = self._is_consumed, False
    with voting.voted(self.hosts, self._interrupt, patience=patience):
      yield
    self._is_consumed = outside
    # Hosts save together: one that was interrupted has no state yet, perhaps.
    self.resumed = self._has_state
    if self.resumed:
      number = self.steps_done + 1
      self._interrupt.outlook = f'finishing and saving {self.unit} {number}'

  def together(self) -> contextlib.AbstractContextManager[None]:
    """Runs a body in which hosts wait for each other; see `voting.together`."""
    return voting.together(self.hosts, self.abandonable)

  def enter(self, context: contextlib.AbstractContextManager[T]) -> T:
    """Enters a context that is left when the run ends."""
    return self._stack.enter_context(context)

  def at_end(self, close: Callable[[], None]) -> None:
    """Calls a function when the run ends, before what was opened earlier."""
    self._stack.callback(close)

  def claim(self, *, restart: bool = False) -> None:
    """Locks the folder; nothing may be written there before.

    Args:
      restart: whether to move aside what the folder holds.

    Raises:
      Misconfigured: the folder cannot be written.
      Locked: another process writes there.
    """
    if self.hosts.is_first:
      with exits.as_misconfigured(str(self.workdir)):
        claimed = run_folder.claimed(self.workdir, restart=restart)
        self._claim = self.enter(claimed)
    host_check.check_folder(self.hosts, self.workdir)
    compilation.keep(self.workdir / run_folder.COMPILED)

  def record_config(self, config, *, restart: bool = False, **also) -> None:
    """Claims the folder; records the config and what else defines the run.

    Raises:
      Misconfigured, Locked: see `claim`.
      OtherRun, BucketError: see `bucket_copy`; or the folder has another run.
      CheckpointsMissing: the run's checkpoints are gone.
    """
    bucket = config.writer.copy_to
    bucket_copy.check_restart(bucket, restart)
    self._interrupt.grace = config.preemption.grace
    self.claim(restart=restart)
    self.enter(self._watch.phases_watched(self.workdir, self.hosts.index))
    if not self.hosts.is_first:
      return
    bucket_copy.fetch(bucket, self.workdir, self.show)
    run_record.check_checkpoints(self.workdir)
    with exits.as_misconfigured(str(self.workdir)):
      run_record.record_config({**config.to_dict(), **also}, self.workdir)
    # Not earlier: until here the folder may be that of another run.
    left = self._interrupt.seconds_left
    self.enter(bucket_copy.copying(bucket, self.workdir, self.show, left))
    names, steps = self.hosts.names, config.profile.steps
    self.enter(self._watch.started(self.workdir, names, steps, self._claim))

  def open(
    self,
    config,
    *,
    num_steps: int,
    tokenizer: tokenizer_lib.Tokenizer,
    trajectories: int = 0,
  ) -> None:
    """Opens checkpoints and metrics.

    Args:
      config: the config of the run, with the model that it starts from.
      num_steps: the length of the run.
      tokenizer: decodes dialogues, and is exported with the policy.
      trajectories: the number of dialogues that are written of each step.
    """
    self._config = config
    self.num_steps = num_steps
    self._tokenizer = tokenizer
    self._saver = saving.Saver(config, self.workdir, self.hosts, self._claim)
    self._stack.callback(self._saver.checkpointer.close)
    self._writer = sinks.build_writer(
      config, self.workdir, self.hosts, num_steps, trajectories=trajectories
    )
    self._stack.callback(self._writer.close)
    self._show = self._writer.show
    self._watch.on_phase = self._writer.enter_phase
    self._samples = samples.build(config, self._writer, tokenizer, self.hosts)

  def resume(
    self,
    start: State,
    checkpoints: checkpoint_state.Checkpoints,
    *,
    note: str = '',
  ) -> State:
    """Returns the newest valid state; sets aside what was written after it.

    Args:
      start: the state before the first step, which a new run returns.
      checkpoints: saves and restores states.
      note: what a new run says about that state, at the end of a line.
    """
    self.state = start
    restored = self._saver.restore(start, checkpoints)
    if restored is not None:
      self.steps_done, self.state, self._extra = restored
    saved = '' if restored is None else self.last
    number, name = origin.find(self._config, self.workdir, saved=saved)
    self.show(f'start: {name}{"" if saved else note}')
    if self.steps_done < self.num_steps:
      self._saver.check_room()
    self.first_step = self.steps_done
    self._watch.resume(self.steps_done, self.num_steps, number)
    saving.rewind(
      self._writer, self.steps_done, self._extra, what=self.last, show=self.show
    )
    self._has_state = True
    self.resumed = self.hosts.count == 1
    return self.state

  def begin(self, evaluate: Evaluate, *, prints_samples: bool) -> None:
    """Evaluates the start, or finishes the step that was interrupted.

    Args:
      evaluate: returns metrics of a state, and the trajectories behind them.
      prints_samples: whether dialogues of a step are printed with each
        checkpoint; those of an evaluation always are.
    """
    self._evaluate, self._prints_samples = evaluate, prints_samples
    if self.steps_done == 0 and self._config.evaluate.every > 0:
      self._watch.begin_phase('evaluate')
      evaluates = evaluate(self.state)
      with self.abandonable():
        metrics = self._evaluated(evaluates)
      self._writer.write(0, metrics)
    if self._extra.unwritten is not None:
      self._finish_unwritten(*self._extra.unwritten)

  def finish_step(
    self,
    done: int,
    state: State,
    metrics: Mapping[str, float],
    trajectories: Sequence[types.Trajectory] = (),
    *,
    details: batch_lib.TokenDetails | None = None,
  ) -> None:
    """Evaluates, writes and saves an updated step, where each is due.

    Args:
      done: the number of steps that are done with this one.
      state: the state after it.
      metrics: scalars by name.
      trajectories: the trajectories that were collected.
      details: the numbers of the tokens of the first of them.
    """
    writer = self._config.writer
    kept = trajectories[: max(writer.trajectories, writer.samples)]
    metrics = {name: float(value) for name, value in metrics.items()}
    self.steps_done, self.state = done, state
    self._watch.count(done, self.num_steps)
    self._interrupt.outlook = f'saving {self.last}'
    self.save_seconds = 0.0
    records = trajectory_metrics.records(kept, self._tokenizer, details)
    if not self.hosts.is_first:
      # A checkpoint keeps unwritten dialogues of the first host only.
      self._writer.write_trajectories(done, records)
      records = []
    self._extra = saving.Extra(unwritten=(metrics, records))
    self._is_consumed = False
    self._saver.check()
    self._finish_unwritten(metrics, records)

  def _finish_unwritten(self, metrics: dict, records: list) -> None:
    """Evaluates, writes and saves the last step.

    An interruption of the evaluation leaves it unwritten, and saves it so with
    the state: the next start finishes the step in the same way.
    """
    if self._evaluate is not None and self._due(self._config.evaluate.every):
      timer = self.timer('evaluate')
      evaluates = self._evaluate(self.state)
      with voting.voted(self.hosts, self._interrupt):
        metrics = metrics | self._evaluated(evaluates)
      metrics |= timer.end()
      metrics['timing_s/step'] += metrics['timing_s/evaluate']
      self._extra.score = evaluation.mean_score(metrics)
    metrics = metrics | self._watch.account(metrics)
    self._extra.line = self._writer.write(self.steps_done, metrics)
    self._extra.unwritten = None
    self._writer.write_trajectories(self.steps_done, records)
    if self._due(self._config.checkpoint.every):
      if self._prints_samples:
        self._samples.print_records(self.last, records)
      # The save is last: a run that is killed before it writes the same lines
      # again, and none is ever missing.
      timer = self.timer('checkpoint')
      self._saver.save(self.steps_done, self.state, self._extra, waits=False)
      self.save_seconds = timer.end()['timing_s/checkpoint']
    self._saver.warn_of_room(self.show)

  @property
  def last(self) -> str:
    """The last finished step, such as 'step 3'."""
    return f'{self.unit} {self.steps_done}'

  @property
  def has_unsaved(self) -> bool:
    """Whether a finished step is not on disk yet."""
    return self._has_state and self.steps_done > self._saver.saved

  @property
  def is_intact(self) -> bool:
    """Whether no update can have consumed the state of the last step."""
    return not self._is_consumed

  def save(self) -> None:
    """Saves the last finished step, and waits until it is on disk.

    Raises:
      NoTime: a signal ends the run, and too little time is left.
    """
    self._saver.save_in_time(
      self.steps_done, self.state, self._extra, self._interrupt.signalled
    )

  def release(self, exit_code: int) -> None:
    """Leaves the folder as an ended process would; the process ends soon."""
    self._watch.end(exit_code)
    lock.release(self.workdir)

  def show(self, text: str) -> None:
    """Prints text, beside the progress display once there is one."""
    self._show(text)

  def finish(
    self,
    policy: functional.Model,
    params: functional.Params,
    *,
    curve: bool = False,
  ) -> None:
    """Exports the policy and prints where the files of the run are.

    Args:
      policy: the model.
      params: its weights, adapters merged.
      curve: whether to draw the learning curve.
    """
    self._saver.checkpointer.wait()
    self._interrupt.outlook = 'ending; the next start exports the policy'
    self._watch.begin_phase('export')
    config, draws = self._config, curve and self.hosts.is_first
    title = f'{config.title}, seed {config.seed}' if draws else ''
    model_files.export(
      config,
      self.workdir / 'policy',
      policy,
      params,
      self._tokenizer,
      dtype=weights.TRAINED,
      writes=self.hosts.is_first,
    )
    best = self._saver.checkpointer.best()
    best = None if best == self.steps_done else best
    self.show(products.finished(self.workdir, self.unit, title, best))

  def _evaluated(self, evaluates: Evaluation) -> dict[str, float]:
    """Returns the metrics of an evaluation; shows a few of its dialogues."""
    metrics, trajectories = evaluates()
    title = f'evaluation after {self.last}'
    self._samples.show_evaluation(self.steps_done, title, trajectories)
    return metrics

  def _begin_phase(self, phase: str) -> None:
    """Notes the phase of the step that begins; '' = the end of the last one."""
    if phase in _CONSUMING:
      # A signal that came before need not wait for what begins here.
      if self.hosts.count == 1 and not self._is_consumed:
        with self._interrupt.abandonable():
          pass
      self._is_consumed = True
    self._watch.begin_phase(phase)

  def _due(self, every: int) -> bool:
    last = self.steps_done == self.num_steps
    return every > 0 and (last or self.steps_done % every == 0)
