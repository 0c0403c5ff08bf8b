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
killed in between writes them again, and none is ever missing. A step whose
evaluation was interrupted is saved together with its unwritten metrics, and
the next start evaluates and writes it first.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import functools
import json
import pathlib
import sys
from typing import TypeVar

from stppo_jax import batch as batch_lib
from stppo_jax import settings
from stppo_jax import types
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import weights
from stppo_jax.models import functional
from stppo_jax.parallel import compile_time
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.records import dialogues
from stppo_jax.records import products
from stppo_jax.records import run_folder
from stppo_jax.records import timing
from stppo_jax.records import trajectory_metrics
from stppo_jax.records import writer as writer_lib
from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.training import checkpoint_state
from stppo_jax.training import evaluation
from stppo_jax.training import interruption
from stppo_jax.training import run_record
from stppo_jax.training import voting
from stppo_jax.training import watching
from stppo_jax.training.building import assembly
from stppo_jax.training.building import model_files
from stppo_jax.training.checks import host_check

T = TypeVar('T')
State = state_lib.TrainState
Evaluation = Callable[[], tuple[dict[str, float], list[types.Trajectory]]]
# Publishes the policy of a state; what it returns evaluates it.
Evaluate = Callable[[State], Evaluation]


@contextlib.contextmanager
def start(
  workdir: str | pathlib.Path,
  *,
  unit: str = 'step',
  hosts: hosts_lib.Hosts = hosts_lib.ALONE,
) -> Iterator['Run']:
  """Yields a run that signals and outages end after its state was saved.

  A signal ends the body without an error; `Run.exit_code` is then that of the
  signal.

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
    stack.enter_context(compile_time.announced(run.show))
    try:
      yield run
    except interruption.Interrupted:
      assert interrupt.exit_code is not None  # a signal was received
      run.exit_code = interrupt.exit_code
      if run.resumed:
        run.save()
        run.show(
          f'interrupted after {unit} {run.steps_done}, saved; '
          'the same command resumes'
        )
      else:
        # Whatever a start has written is complete, or the next start makes it
        # again.
        print(
          f'interrupted before the first {unit}; the same command starts again'
        )
    except (*voting.OUTAGES, hosts_lib.HostFailed) as error:
      # The others save too, unless a host was lost in the middle of a step.
      if run.resumed and getattr(error, 'saves', True):
        run.save()
      raise


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
    save_seconds: the duration of the last step's save; 0 if it had none.
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
    self._interrupt = interrupt
    self._stack = stack
    self._unit = unit
    self._show: Callable[[str], None] = functools.partial(print, flush=True)
    self._evaluate: Evaluate | None = None
    self._prints_samples = False
    # The score of the last finished step, if it was evaluated.
    self._score: float | None = None
    # Metrics and dialogues of a step that still has to be evaluated.
    self._unwritten: tuple[dict, list] | None = None
    self._watch = watching.Watch(lambda: self.exit_code)

  def timer(self, phase: str, *, step: int = 0) -> timing.Timer:
    """Returns a timer in a phase, which begins step `step` unless that is 0."""
    if step:
      self._watch.begin_step(step)
    return timing.Timer(phase, self._watch.begin_phase)

  @contextlib.contextmanager
  def abandonable(
    self, *, patience: float | None = voting.PATIENCE
  ) -> Iterator[None]:
    """Runs a body that a signal may cut short; an update follows it.

    Several hosts vote at its end, see `voting.voted`.
    """
    if self.resumed:
      self._interrupt.outlook = f'saving {self._unit} {self.steps_done}'
    with voting.voted(self.hosts, self._interrupt, patience=patience):
      yield
    # Hosts save together: one that was interrupted has no state yet, perhaps.
    self.resumed = self._has_state
    if self.resumed:
      number = self.steps_done + 1
      self._interrupt.outlook = f'finishing and saving {self._unit} {number}'

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

    From here on it also keeps the programs that are compiled.

    Args:
      restart: whether to move aside what the folder holds.

    Raises:
      Misconfigured: the folder cannot be written.
      Locked: another process writes there.
    """
    if self.hosts.is_first:
      with assembly.config_errors(str(self.workdir)):
        self.enter(run_folder.claimed(self.workdir, restart=restart))
    host_check.check_folder(self.hosts, self.workdir)
    compile_time.keep(self.workdir / run_folder.COMPILED)

  def record_config(self, config, *, restart: bool = False, **also) -> None:
    """Claims the folder; records the config and what else defines the run.

    Raises:
      Misconfigured: the folder cannot be written.
      Locked: another process writes there.
      OtherRun: the folder belongs to the run of another config.
      CheckpointsMissing: the run's checkpoints are gone.
    """
    self.claim(restart=restart)
    if not self.hosts.is_first:
      return
    run_record.check_checkpoints(self.workdir)
    with assembly.config_errors(str(self.workdir)):
      run_record.record_config({**config.to_dict(), **also}, self.workdir)
    # Not earlier: until here the folder may be that of another run.
    names, steps = self.hosts.names, config.profile.steps
    self.enter(self._watch.started(self.workdir, names, steps))

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
    self._checkpointer = checkpoint.Checkpointer(
      self.workdir, keep=config.checkpoint.keep
    )
    self._stack.callback(self._checkpointer.close)
    self._writer = writer_lib.of_host(
      self.hosts.index,
      self.workdir,
      num_steps=num_steps,
      tensorboard=config.writer.tensorboard,
      trajectories=trajectories,
      hparams=settings.flatten(config),
    )
    self._stack.callback(self._writer.close)
    self._show = self._writer.show

  def resume(
    self, start: State, checkpoints: checkpoint_state.Checkpoints
  ) -> State:
    """Returns the newest valid state; sets aside what was written after it.

    Args:
      start: the state before the first step, which a new run returns.
      checkpoints: saves and restores states.
    """
    self._checkpoints, self.state = checkpoints, start
    restored = checkpoints.restore(self._checkpointer, start)
    if restored is not None:
      self.steps_done, self.state, host = restored
      if 'unwritten' in host:
        metrics, records = json.loads(host['unwritten'])
        self._unwritten = metrics, records if self.hosts.is_first else []
    self.first_step = self.steps_done
    self._watch.count(self.steps_done, self.num_steps)
    # The line of the last finished step is kept, except where this start writes
    # it: the line of step 0, and the line of a step whose evaluation was
    # interrupted before it was written.
    written = self.steps_done > 0 and self._unwritten is None
    aside = self._writer.rewind(
      self.steps_done - (not written), saved=self.steps_done
    )
    if aside is not None:
      self.show(
        f'resumed after {self._unit} {self.steps_done}, the newest that was '
        f'saved; metrics and dialogues of later ones are in {aside}'
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
    if self._unwritten is not None:
      self._finish_unwritten(*self._unwritten)

  def finish_step(
    self,
    done: int,
    state: State,
    metrics: Mapping[str, float],
    trajectories: Sequence[types.Trajectory] = (),
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
    self._interrupt.outlook = f'saving {self._unit} {done}'
    self.save_seconds = 0.0
    self._score = None
    records = trajectory_metrics.records(kept, self._tokenizer, details)
    if not self.hosts.is_first:
      # A checkpoint keeps unwritten dialogues of the first host only.
      self._writer.write_trajectories(done, records)
      records = []
    self._unwritten = metrics, records
    self._finish_unwritten(*self._unwritten)

  def _finish_unwritten(self, metrics: dict, records: list) -> None:
    """Evaluates, writes and saves the last step.

    An interruption of the evaluation leaves `_unwritten` set, and saves it
    with the state: the next start finishes the step in the same way.
    """
    if self._evaluate is not None and self._due(self._config.evaluate.every):
      timer = self.timer('evaluate')
      evaluates = self._evaluate(self.state)
      with voting.voted(self.hosts, self._interrupt):
        metrics = metrics | self._evaluated(evaluates)
      metrics |= timer.end()
      metrics['timing_s/step'] += metrics['timing_s/evaluate']
      self._score = evaluation.mean_score(metrics)
    self._unwritten = None
    self._writer.write(self.steps_done, metrics)
    self._writer.write_trajectories(self.steps_done, records)
    if self._due(self._config.checkpoint.every):
      if self._prints_samples:
        self._print(f'{self._unit} {self.steps_done}', records)
      # The save is last: a run that is killed before it writes the same lines
      # again, and none is ever missing.
      timer = self.timer('checkpoint')
      self.save()
      self.save_seconds = timer.end()['timing_s/checkpoint']

  def save(self) -> None:
    """Saves the state of the last finished step, unless it is saved already."""
    host = {}
    if self._unwritten is not None:
      # As text, because a metric may be nan, which a manifest must not contain.
      host['unwritten'] = json.dumps(self._unwritten)
    if self._score is not None:
      host['score'] = self._score
    self._checkpoints.save(
      self._checkpointer, self.steps_done, self.state, host
    )

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
    self._interrupt.outlook = 'exporting the policy, then ending'
    self._watch.begin_phase('export')
    config, title = self._config, ''
    if curve and self.hosts.is_first:
      title = f'{config.title}, seed {config.seed}'
    model_files.export(
      config,
      self.workdir / 'policy',
      policy,
      params,
      self._tokenizer,
      dtype=weights.TRAINED,
      writes=self.hosts.is_first,
    )
    best = self._checkpointer.best()
    best = None if best == self.steps_done else best
    self.show(products.finished(self.workdir, self._unit, title, best))

  def _evaluated(self, evaluates: Evaluation) -> dict[str, float]:
    """Returns the metrics of an evaluation; prints a few of its dialogues."""
    metrics, trajectories = evaluates()
    title = f'evaluation after {self._unit} {self.steps_done}'
    kept = dialogues.spread(trajectories, self._config.writer.samples)
    self._print(title, trajectory_metrics.records(kept, self._tokenizer))
    return metrics

  def _print(self, title: str, records: Sequence[dict]) -> None:
    records = dialogues.spread(records, self._config.writer.samples)
    if records and self.hosts.is_first:
      self.show(f'{title} ({dialogues.LEGEND})')
      for record in records:
        self.show(dialogues.render(record, colour=sys.stdout.isatty()))

  def _due(self, every: int) -> bool:
    last = self.steps_done == self.num_steps
    return every > 0 and (last or self.steps_done % every == 0)
