"""The steps of a run: its phases, its metrics, its saves, its end.

    with run_lib.Run.open(config, folder, start, ...) as run:
      run.evaluate_start()
      for step in run.steps():
        with run.phase('wait'), folder.interruptible():
          ...                              # a signal may end this body
        with run.phase('update'), run.consuming_state():
          state, metrics = ...             # a signal raises nothing here
        run.finish_step(step + 1, state, metrics)
      run.finish(policy, params)

A step's metrics and dialogues are written before its checkpoint. A run that is
killed in between repeats the step and writes both again, so no metrics and no
dialogues are missing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import logging
import sys
import time

from stppo_jax import batch as batch_lib
from stppo_jax import settings
from stppo_jax import types
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import weights
from stppo_jax.models import functional
from stppo_jax.records import dialogues
from stppo_jax.records import headline
from stppo_jax.records import progress
from stppo_jax.records import trackers
from stppo_jax.records import trajectory_metrics
from stppo_jax.records import writer as writer_lib
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.training import checkpoint_state
from stppo_jax.training import claim
from stppo_jax.training import model_files
from stppo_jax.training import saving
from stppo_jax.training import shutdown
from stppo_jax.workdir import run_folder

State = state_lib.TrainState
# Evaluates a state; returns metrics, and the trajectories that were sampled.
Evaluate = Callable[
  [State, claim.Folder], tuple[dict[str, float], list[types.Trajectory]]
]
_log = logging.getLogger(__name__)


class Run:
  """The steps of a run in this process, from the loaded state to the end.

  Attributes:
    folder: the run's folder.
    first_step: the number of steps that were done when the state was loaded.
    num_steps: the number of steps of the whole run.
    last: the last finished step.
    seconds: the durations of the phases of the present step, by
      `timing_s/{phase}`.
    save_seconds: for how many seconds the save of the last step held up the
      loop; 0 if that step was not saved.
  """

  def __init__(
    self,
    config,
    folder: claim.Folder,
    last: saving.LastStep,
    writer: writer_lib.Writer,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    num_steps: int,
    evaluate: Evaluate | None,
    prints_samples: bool,
  ):
    self.folder, self.last = folder, last
    self.first_step, self.num_steps = last.done, num_steps
    self.seconds: dict[str, float] = {}
    self.save_seconds = 0.0
    self._config, self._tokenizer = config, tokenizer
    self._saver, self._writer = last.saver, writer
    self._evaluate = evaluate if config.evaluate.every else None
    self._prints_samples = prints_samples

  @classmethod
  @contextlib.contextmanager
  def open(
    cls,
    config,
    folder: claim.Folder,
    start: State,
    checkpoints: checkpoint_state.Checkpoints,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    num_steps: int,
    origin: tuple[int, str] | None = None,
    unit: str = 'step',
    evaluate: Evaluate | None = None,
    prints_samples: bool = False,
    shown_every: int = 1,
  ) -> Iterator['Run']:
    """Yields a run at its newest valid checkpoint, or at its start.

    Files of later steps are moved aside. If the evaluation of the restored step
    was interrupted, the step is evaluated and written now. After a signal, the
    last step is saved and no error is raised; for errors, see `shutdown`.

    Args:
      config: the config of the run; its section `model` names the start.
      folder: the run's folder, in which the run has been recorded.
      start: the state before the first step.
      checkpoints: converts between states and checkpoints.
      tokenizer: decodes dialogues, and is exported with the policy.
      num_steps: the number of steps of the whole run.
      origin: number and name of the source of the start's weights, see
        `starts`; None stands for the result of `origin_of`.
      unit: the noun for an iteration in printed lines: 'step' or 'update'.
      evaluate: evaluates a state; None turns evaluations off.
      prints_samples: whether some dialogues of a step are printed when it is
        saved. Evaluations print dialogues in any case.
      shown_every: the number of steps between two lines of progress.
    """
    with contextlib.ExitStack() as stack:
      # A restore calls programs that need all hosts, so no host may leave now.
      with folder.collective_section():
        saver = saving.Saver(config, folder, checkpoints, start)
        stack.callback(saver.checkpointer.close)
        writer = _build_writer(config, folder, num_steps, shown_every)
        stack.callback(writer.close)
        # The writer prints the lines of the log above the progress bar.
        outside, folder.lines.show = folder.lines.show, writer.show
        stack.callback(setattr, folder.lines, 'show', outside)
        folder.watch.on_phase = writer.enter_phase
        last = saver.restore(unit)
        number, name = origin or origin_of(config)
        if last.done:
          number, name = 1, f'{last} of this run'
        _log.info('start: %s', name)
        # A finished run saves no more checkpoints, so it needs no room.
        if last.done < num_steps:
          saver.check_room()
        folder.watch.resume(last.done, num_steps, number)
        saving.rewind(writer, last)
      # The first host has moved files of all hosts aside. If the run is in a
      # bucket, the move is uploaded before the hosts write such files again.
      folder.settle()
      run = cls(
        config,
        folder,
        last,
        writer,
        tokenizer,
        num_steps=num_steps,
        evaluate=evaluate,
        prints_samples=prints_samples,
      )
      with shutdown.handled(last, folder):
        if last.done:  # before the first step there is nothing to save
          folder.interrupt.outlook = f'saving {last}'
        if last.extra.unwritten is not None:
          run._finish_unwritten(*last.extra.unwritten)
        yield run

  @property
  def state(self) -> State:
    """The state after the last finished step."""
    return self.last.state

  def evaluate_start(self) -> None:
    """Evaluates the start of a new run, if evaluations are on."""
    if self.last.done == 0 and self._evaluate is not None:
      self._writer.write(0, self._evaluated(self._evaluate))

  def steps(self) -> Iterator[int]:
    """Yields the numbers of the remaining steps; a run begins with step 0."""
    for step in range(self.first_step, self.num_steps):
      self.seconds = {}
      self.folder.watch.begin_step(step + 1)
      yield step

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """Tells observers that a phase begins and ends; measures its duration."""
    began = time.monotonic()
    self.folder.watch.begin_phase(name)
    try:
      yield
    finally:
      self.seconds[f'timing_s/{name}'] = time.monotonic() - began
      self.folder.watch.begin_phase('')

  @contextlib.contextmanager
  def consuming_state(self) -> Iterator[None]:
    """Runs updates, which donate the state of the last finished step.

    From here to `finish_step` there is no state to save, so the main thread
    only notes a signal. If a signal came before, a run of one host ends here,
    and a run of several hosts ends at their next vote.
    """
    if self.folder.hosts.is_alone:
      with self.folder.interrupt.interruptible():
        pass
    last = self.last
    self.folder.interrupt.outlook = (
      f'finishing and saving {last.unit} {last.done + 1}'
      if last.is_unsaved or not self.folder.hosts.is_alone
      # The last step is saved, so the process may end without the update.
      else f'ending now, or after {last.unit} {last.done + 1} if that is done '
      'within a second'
    )
    last.is_consumed = True  # `finish_step` sets this to False again
    yield

  def finish_step(
    self,
    done: int,
    state: State,
    metrics: Mapping[str, float],
    trajectories: Sequence[types.Trajectory] = (),
    *,
    details: batch_lib.TokenDetails | None = None,
  ) -> None:
    """Writes a finished step; evaluates and saves the step if this is due.

    Args:
      done: the number of steps that are done, this step included.
      state: the state after the step.
      metrics: scalars by name.
      trajectories: the trajectories that were collected for the step.
      details: numbers for each token of the first of these trajectories.
    """
    options = self._config.writer
    kept = trajectories[: max(options.trajectories, options.samples)]
    metrics = {name: float(value) for name, value in metrics.items()}
    records = trajectory_metrics.records(kept, self._tokenizer, details)
    if not self.folder.hosts.is_first:
      # Checkpoints lack this host's dialogues, so it writes the dialogues now.
      self._writer.write_trajectories(done, records)
      records = []
    # This call comes before evaluating and writing: after a later signal or
    # error, the step is saved, and the next start evaluates and writes it.
    self.last.finish(done, state, saving.Extra(unwritten=(metrics, records)))
    self.folder.watch.count(done, self.num_steps)
    self.folder.interrupt.outlook = f'saving {self.last}'
    self.save_seconds = 0.0
    # This raises if an earlier save failed. The run's end then saves the step.
    self._saver.check()
    self._finish_unwritten(metrics, records)

  def _finish_unwritten(self, metrics: dict, records: list) -> None:
    """Writes the last step; evaluates and saves the step if this is due.

    If the evaluation is interrupted, the step is saved with its unwritten
    metrics and dialogues. The next start calls this method for that step again.
    """
    # `extra` is changed in place, so that any save of the step, also a save
    # before a forced exit on another thread, has the newest values.
    last, extra = self.last, self.last.extra
    due = self._due(self._config.evaluate.every)
    if self._evaluate is not None and due:
      metrics = metrics | self._evaluated(self._evaluate)
      seconds = self.seconds['timing_s/evaluate']
      metrics['timing_s/evaluate'] = seconds
      metrics['timing_s/step'] += seconds
      extra.score = headline.mean_score(metrics)
    metrics = metrics | self.folder.watch.account(metrics)
    extra.line = self._writer.write(last.done, metrics)
    extra.unwritten = None
    self._writer.write_trajectories(last.done, records)
    if self._due(self._config.checkpoint.every):
      if self._prints_samples:
        self._print_records(str(last), records)
      # The save comes last: a run that is killed before the save repeats the
      # step and writes the same lines again, so no line is ever missing.
      with self.phase('checkpoint'):
        self._saver.save(last.done, last.state, extra, waits=False)
      self.save_seconds = self.seconds['timing_s/checkpoint']
    self._saver.warn_of_room()

  def finish(
    self,
    policy: functional.Model,
    params: functional.Params,
    *,
    curve: bool = False,
  ) -> None:
    """Exports the policy, and logs the paths of the run's files.

    Args:
      policy: the policy's model.
      params: the policy's weights, with adapters merged.
      curve: whether to draw the learning curve.
    """
    self._saver.checkpointer.wait()
    folder, last = self.folder, self.last
    folder.interrupt.outlook = 'ending; the next start exports the policy'
    with self.phase('export'):
      model_files.export(
        self._config,
        folder.path / 'policy',
        policy,
        params,
        self._tokenizer,
        dtype=weights.TRAINED,
        writes=folder.hosts.is_first,
      )
    lines = [f'done. metrics: {folder.path / run_folder.METRICS}']
    if curve and folder.hosts.is_first:
      # This import is late, because it loads the plotting library.
      from stppo_jax.records import plots

      drawn = folder.path / 'learning_curve.png'
      title = f'{self._config.title}, seed {self._config.seed}'
      plots.learning_curve(folder.path / run_folder.METRICS, drawn, title=title)
      lines += [
        f'curve: {drawn}',
        f'dialogues: {folder.path}/trajectories-*.jsonl',
      ]
    best = self._saver.checkpointer.best()
    if best not in (None, last.done):
      path = folder.path / 'checkpoints' / str(best)
      lines.append(f'best evaluation: after {last.unit} {best}, kept in {path}')
    lines.append(f'policy (Hugging Face format): {folder.path / "policy"}')
    if folder.outer is None:  # a run inside another run logs no paths
      _log.info('\n'.join(lines))

  def _evaluated(self, evaluate: Evaluate) -> dict[str, float]:
    """Evaluates the last step, shows some dialogues, returns the metrics."""
    with self.phase('evaluate'):
      metrics, trajectories = evaluate(self.state, self.folder)
      records = lambda count: trajectory_metrics.records(
        dialogues.spread(trajectories, count), self._tokenizer
      )
      self._print_records(
        f'evaluation after {self.last}', records(self._printed)
      )
      self._writer.write_evaluation(
        self.last.done, records(self._config.writer.evaluation)
      )
    return metrics

  def _print_records(self, title: str, records: Sequence[dict]) -> None:
    """Prints some of the given records of trajectories under a title."""
    records = dialogues.spread(records, self._printed)
    if records:
      self._writer.show(f'{title} ({dialogues.LEGEND})')
      for record in records:
        text = dialogues.render(record, colour=sys.stdout.isatty())
        self._writer.show(text)

  @property
  def _printed(self) -> int:
    """The number of dialogues that are printed at a time."""
    return self._config.writer.samples if self.folder.hosts.is_first else 0

  def _due(self, every: int) -> bool:
    last = self.last.done == self.num_steps
    return every > 0 and (last or self.last.done % every == 0)


def origin_of(config) -> tuple[int, str]:
  """Returns number and name of the source of the weights; see `starts`."""
  path = config.model.path
  return (3, f'model.path={path}') if path else (4, 'random numbers')


def _build_writer(
  config,
  folder: claim.Folder,
  num_steps: int,
  shown_every: int,
) -> writer_lib.Writer:
  """Returns the writer of a host; only the first host writes metrics."""
  options, hosts = config.writer, folder.hosts
  build = functools.partial(
    writer_lib.Writer,
    folder.path,
    trajectories=options.trajectories,
    keep_files=options.keep_files,
  )
  if not hosts.is_first:
    return build(host=hosts.index)
  values = settings.flatten(config)
  recorded = run_folder.read(folder.path)
  identity = trackers.Identity(
    title=f'{config.title}, seed {config.seed}',
    run_id='' if recorded is None else recorded.run_id,
    folder=folder.path,
    config=values,
  )
  return build(
    display=progress.Progress(num_steps, every=shown_every),
    tensorboard=options.tensorboard,
    keep_lines=options.keep_lines,
    hparams=values,
    trackers=[trackers.Tracker(name, identity) for name in options.trackers],
  )
