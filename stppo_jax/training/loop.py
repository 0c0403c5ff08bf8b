"""The loop: collect, pack, annotate, update, publish, write.

    for step in range(first_step, num_steps):
      trajectories = collect(questions of the step, keys of the step)
      batch        = annotate(pack(trajectories))
      state        = update on every minibatch of every epoch
      publish, write, evaluate, checkpoint

Everything a step does is a function of (config, seed, step, state), so the
same command resumes from the last checkpoint as if nothing had happened.
"""

import contextlib
import pathlib
import time

import jax

from stppo_jax.analysis import dialogues
from stppo_jax.analysis import plots
from stppo_jax.models import export_hf
from stppo_jax.rollout import pack
from stppo_jax.training import assembly
from stppo_jax.training import checkpoint
from stppo_jax.training import evaluation
from stppo_jax.training import interruption
from stppo_jax.training import keys
from stppo_jax.training import learner as learner_lib
from stppo_jax.training import sft
from stppo_jax.training import trajectory_metrics
from stppo_jax.training import writer as writer_lib


def train(config, workdir: str | pathlib.Path) -> int:
  """Trains, or resumes, the run of a config in `workdir`.

  Returns:
    The exit code: 0 done, 130 interrupted and saved, 75 preempted and saved.

  Raises:
    Exceptions with an `exit_code`: a config that does not fit its files or
    devices (2), corrupt checkpoints (3), a retriever out of reach (75).
  """
  workdir = pathlib.Path(workdir)
  with contextlib.ExitStack() as stack:
    interrupt = stack.enter_context(interruption.Interruption())
    try:
      with interrupt.abandonable():
        surroundings = stack.enter_context(assembly.build_surroundings(config))
        config = _with_start(config, workdir, surroundings)
    except interruption.Interrupted:
      print('interrupted before the first step; the same command starts anew')
      return interrupt.exit_code
    run = _Run(config, workdir, surroundings)
    try:
      return run.play(interrupt)
    finally:
      run.close()


def evaluate(config, workdir: str | pathlib.Path) -> int:
  """Prints the greedy scores of the newest checkpoint, or of the start.

  Returns:
    The exit code.
  """
  with assembly.build_surroundings(config) as surroundings:
    with assembly.misconfigured():
      tokenizer = assembly.build_tokenizer(config, surroundings.questions)
      shape = assembly.build_model_config(config, tokenizer)
      learner = learner_lib.Learner(config, shape, assembly.build_mesh(config))
      state = learner.start()
    done = 0
    if (pathlib.Path(workdir) / 'checkpoints').is_dir():
      saved = checkpoint.Checkpointer(workdir, keep=config.checkpoint.keep)
      found = saved.restore_latest(state)
      saved.close()
      done, state = found[:2] if found else (0, state)
    evaluator = evaluation.Evaluator(
      config, surroundings, tokenizer, learner.policy
    )
    scores, _ = evaluator.run(state.policy.params)
    for name, score in sorted(scores.items()):
      print(f'step {done} val/em/{name} {score:.4f}')
  return 0


def _with_start(config, workdir: pathlib.Path, surroundings):
  """The config with the start of the run as its model, made if missing."""
  if config.model.path or not config.sft.before_training:
    return config
  start = workdir / 'start'
  if not (start / 'tokenizer.json').is_file():  # written last
    sft.imitate(config, surroundings, start)
  config = config.copy_and_resolve_references()
  config.model.path = str(start)
  return config


class _Run:
  """The parts of one run, and what a step does with them."""

  def __init__(self, config, workdir, surroundings: assembly.Surroundings):
    self._config = config
    self._workdir = workdir
    self._surroundings = surroundings
    with assembly.misconfigured():
      self._tokenizer = assembly.build_tokenizer(config, surroundings.questions)
      shape = assembly.build_model_config(config, self._tokenizer)
      mesh = assembly.build_mesh(config)
      self._learner = learner_lib.Learner(config, shape, mesh)
      self._state = self._learner.start()
      self._reference = self._learner.reference()
      self._collector, self._engine = assembly.build_collector(
        config,
        surroundings,
        self._tokenizer,
        self._learner.policy,
        slots=config.rollout.trajectories_per_step,
      )
    self._evaluator = evaluation.Evaluator(
      config, surroundings, self._tokenizer, self._learner.policy
    )
    self._checkpointer = checkpoint.Checkpointer(
      workdir, keep=config.checkpoint.keep
    )
    self._writer = writer_lib.Writer(
      workdir,
      num_steps=config.num_steps,
      tensorboard=config.writer.tensorboard,
      trajectories=config.writer.trajectories,
    )
    self._save_seconds = 0.0
    self._done = self._resume()

  def close(self) -> None:
    """Ends the display and releases the files."""
    self._writer.close()
    self._checkpointer.close()

  def play(self, interrupt: interruption.Interruption) -> int:
    """Plays the remaining steps; the exit code."""
    config = self._config
    self._engine.publish(self._state.policy.params)
    try:
      if self._done == 0 and config.evaluate.every:
        with interrupt.abandonable():
          self._writer.write(0, self._evaluate(0))
      while self._done < config.num_steps:
        self._step(interrupt)
    except interruption.Interrupted:
      self._save()
      self._writer.show(
        f'interrupted after step {self._done}, saved; the same command resumes'
      )
      return interrupt.exit_code
    self._finish()
    return 0

  def _step(self, interrupt: interruption.Interruption) -> None:
    """One step. Interrupted while collecting, it has not happened."""
    config, step = self._config, self._done
    timer = _Timer()
    with interrupt.abandonable():
      trajectories = self._collect(step)
    timer.lap('collect')
    metrics = trajectory_metrics.measure(trajectories)
    metrics |= self._surroundings.retriever.statistics()
    packed = pack.pack(trajectories, length_bucket=config.rollout.length_bucket)
    batch, annotations = self._learner.annotate(
      packed, self._state, self._reference
    )
    metrics |= {k: float(v) for k, v in jax.device_get(annotations).items()}
    timer.lap('annotate')
    valid = metrics['rollout/valid_fraction']
    if valid > 0 and valid >= config.rollout.min_valid_fraction:
      self._state, report = self._learner.update_epochs(
        self._state, batch, step
      )
      metrics |= report
      self._engine.publish(self._state.policy.params)
    timer.lap('update')
    self._done += 1
    if self._due(config.evaluate.every):
      # Not abandoned: the step is done, its numbers belong to it.
      metrics |= self._evaluate(self._done)
      timer.lap('evaluate')
    metrics |= timer.metrics()
    # The save follows the line it belongs to: its time stands in the next one.
    metrics['timing_s/checkpoint'] = self._save_seconds
    self._save_seconds = 0.0
    metrics |= _speed(packed, metrics, config.updates.num_epochs)
    self._writer.write(self._done, metrics)
    self._writer.write_trajectories(
      self._done,
      [
        trajectory_metrics.record(trajectory, self._tokenizer)
        for trajectory in trajectories[: config.writer.trajectories]
      ],
    )
    # Last: killed in between, the lines are written again, never missing.
    if self._due(config.checkpoint.every):
      saving = _Timer()
      self._save()
      saving.lap('checkpoint')
      self._save_seconds = saving.metrics()['timing_s/checkpoint']

  def _collect(self, step: int):
    config = self._config.rollout
    count = config.trajectories_per_step
    questions = self._surroundings.questions.train(
      step, count // config.group_size
    )
    repeated = [q for q in questions for _ in range(config.group_size)]
    key = keys.step_key(self._config.seed, step, keys.Purpose.COLLECT)
    return self._collector.collect(repeated, keys.row_keys(key, 0, count))

  def _evaluate(self, done: int) -> dict[str, float]:
    """Greedy scores of the fixed questions; shows a few of the dialogues."""
    scores, trajectories = self._evaluator.run(self._state.policy.params)
    if not trajectories:
      return {}
    shown = self._config.writer.samples
    for trajectory in trajectories[
      :: max(len(trajectories) // max(shown, 1), 1)
    ][:shown]:
      record = trajectory_metrics.record(trajectory, self._tokenizer)
      self._writer.show(f'evaluation after step {done}')
      self._writer.show(dialogues.render(record, colour=False))
    return {f'val/em/{name}': score for name, score in scores.items()}

  def _due(self, every: int) -> bool:
    last = self._done == self._config.num_steps
    return every > 0 and (last or self._done % every == 0)

  def _save(self) -> None:
    self._checkpointer.save(self._done, self._state, {})

  def _resume(self) -> int:
    found = self._checkpointer.restore_latest(self._state)
    if found is None:
      self._writer.truncate_after(-1)
      return 0
    done, self._state, _ = found
    # A run interrupted before its first step begins with its evaluation again.
    self._writer.truncate_after(done or -1)
    return done

  def _finish(self) -> None:
    """The files a person opens first, and where they are."""
    curve = self._workdir / 'learning_curve.png'
    plots.learning_curve(self._workdir / 'metrics.jsonl', curve)
    policy = self._workdir / 'policy'
    export_hf.export(
      policy, self._learner.policy.config, self._state.policy.params
    )
    self._tokenizer.save(policy)
    self._writer.show(
      f'done. metrics: {self._workdir / "metrics.jsonl"}\n'
      f'curve: {curve}\n'
      f'dialogues: {self._workdir}/trajectories-*.jsonl\n'
      f'policy (Hugging Face format): {policy}'
    )


class _Timer:
  """Seconds since the last lap, by name."""

  def __init__(self):
    self._start = self._last = time.monotonic()
    self._laps = {}

  def lap(self, name: str) -> None:
    now = time.monotonic()
    self._laps[name] = now - self._last
    self._last = now

  def metrics(self) -> dict[str, float]:
    whole = {'timing_s/step': time.monotonic() - self._start}
    return whole | {f'timing_s/{k}': v for k, v in self._laps.items()}


def _speed(packed, metrics, num_epochs: int) -> dict[str, float]:
  """Tokens per second: of the step, of writing, of updating."""
  tokens = float(packed.lengths_B.sum())
  written = float((packed.turn_ids_BL > 0).sum())
  phases = ('collect', 'annotate', 'update')
  return {
    'perf/throughput': tokens / sum(metrics[f'timing_s/{p}'] for p in phases),
    'perf/collect_tokens_per_second': written / metrics['timing_s/collect'],
    'perf/update_tokens_per_second': (
      tokens * num_epochs / metrics['timing_s/update']
    ),
  }
