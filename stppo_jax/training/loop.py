"""The loop: publish, collect, pack, annotate, update, write.

    for step in range(first_step, num_steps):
      publish the policy, k steps old where steps are collected ahead
      trajectories = collect(questions of the step, keys of the step)
      batch        = annotate(pack(trajectories))
      state        = update on every minibatch of every epoch
      write, evaluate, checkpoint

Everything a step does is a function of (config, seed, step, state), so the
same command resumes from the last checkpoint as if nothing had happened.
"""

import contextlib
import dataclasses
import json
import pathlib
import sys

import jax

from stppo_jax.learner import weights
from stppo_jax.records import checkpoint
from stppo_jax.records import dialogues
from stppo_jax.records import plots
from stppo_jax.records import timing
from stppo_jax.records import trajectory_metrics
from stppo_jax.records import writer as writer_lib
from stppo_jax.retrieval import protocol
from stppo_jax.rollout import pack
from stppo_jax.sampling.remote import client
from stppo_jax.training import assembly
from stppo_jax.training import checkpoint_state
from stppo_jax.training import collection
from stppo_jax.training import evaluation
from stppo_jax.training import interruption
from stppo_jax.training import mismatch_check
from stppo_jax.training import model_files
from stppo_jax.training import prefetch
from stppo_jax.training import run_record
from stppo_jax.training import sft


def train(config, workdir: str | pathlib.Path) -> int:
  """Trains, or resumes, the run of a config in `workdir`.

  Returns:
    The exit code: 0 done, 130 interrupted and saved, 75 preempted and saved.

  Raises:
    Exceptions with an `exit_code`: a config that does not fit its files,
    devices or workdir, or an engine that plays another policy than the one
    that is trained (2), corrupt checkpoints (3), a retriever out of reach
    or a checkpoint that cannot be saved (75).
  """
  workdir = pathlib.Path(workdir)
  with contextlib.ExitStack() as stack:
    interrupt = stack.enter_context(interruption.Interruption())
    try:
      # All that a start leaves is whole, or made anew by the next one.
      with interrupt.abandonable():
        parts = assembly.build_components(config)  # before anything is written
        with assembly.config_errors():
          run_record.record_config(config.to_dict(), workdir)
        services = stack.enter_context(
          assembly.build_services(config, parts.questions)
        )
        sft.make_start(config, workdir, services)
        started = run_record.with_start(config, workdir)
        if started is not config:
          parts = assembly.build_components(started)
        run = _Run(started, workdir, parts, services)
        stack.callback(run.close)
        run.resume()
    except interruption.Interrupted:
      print('interrupted before the first step; the same command starts anew')
      return interrupt.exit_code
    return run.play(interrupt)


class _Run:
  """The parts of one run, and what a step does with them."""

  def __init__(
    self,
    config,
    workdir,
    parts: assembly.Components,
    services: assembly.Services,
  ):
    self._config = config
    self._workdir = workdir
    self._services = services
    self._tokenizer = parts.tokenizer
    self._learner = parts.learner
    with assembly.config_errors():
      self._state = self._learner.start()
      self._reference = self._learner.reference()
      self._sentences = assembly.build_sentences(config, self._tokenizer)
    self._evaluator = evaluation.Evaluator(
      config, services, self._tokenizer, self._learner.policy
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
    with assembly.config_errors():
      self._prefetcher = self._build_prefetcher(self._learner.mesh)
    self._evaluates = config.evaluate.every > 0 and bool(
      services.questions.evaluation(config.evaluate.num_questions)
    )
    self._done = 0
    # Metrics and dialogues of a step that waits for its evaluation.
    self._unwritten: tuple[dict, list] | None = None
    self._save_seconds = 0.0

  def _build_prefetcher(self, mesh: jax.sharding.Mesh) -> prefetch.Prefetcher:
    """What collects: on another thread where that pays and is safe."""
    config, services = self._config, self._services
    rollout, loop = config.rollout, None
    devices = max(mesh.size, assembly.build_mesh(config, local=True).size)
    if rollout.steps_ahead and devices == 1:
      loop = prefetch.StoppableLoop(services.loop)
      services = dataclasses.replace(services, loop=loop)
    collector, engine = assembly.build_collector(
      config,
      services,
      self._tokenizer,
      self._learner.policy,
      slots=rollout.slots or rollout.trajectories_per_step,
      group_size=rollout.group_size,
    )
    player = collection.StepCollector(
      config, services, collector, self._writer.show
    )
    return prefetch.Prefetcher(
      player.collect,
      lambda params, version: engine.publish(
        self._learner.merged_params(self._state, params), version
      ),
      steps_ahead=rollout.steps_ahead,
      num_steps=config.num_steps,
      loop=loop,
    )

  def resume(self) -> None:
    """Goes to the newest checkpoint, and forgets what was written after it."""
    found = checkpoint_state.newest(
      self._checkpointer, self._learner, self._state
    )
    if found is not None:
      self._done, state, host = found
      self._state = dataclasses.replace(state, published=())
      self._prefetcher.restore(self._done, state.published)
      self._learner.kl_coefficient = host['kl_coefficient']
      if 'unwritten' in host:
        self._unwritten = json.loads(host['unwritten'])
    # The line of the start, and one that waited, are about to be written.
    again = self._done == 0 or self._unwritten is not None
    self._writer.truncate_after(self._done - again)

  def close(self) -> None:
    """Ends collecting and the display, and releases the files."""
    self._prefetcher.close()
    self._writer.close()
    self._checkpointer.close()

  def play(self, interrupt: interruption.Interruption) -> int:
    """Plays the remaining steps; the exit code."""
    try:
      if self._done == 0 and self._config.evaluate.every:
        with interrupt.abandonable():
          scores = self._evaluate()
        self._writer.write(0, scores)
      if self._unwritten is not None:
        self._finish_step(interrupt)
      while self._done < self._config.num_steps:
        self._step(interrupt)
    except interruption.Interrupted:
      self._save()
      self._writer.show(
        f'interrupted after step {self._done}, saved; the same command resumes'
      )
      return interrupt.exit_code
    except (
      protocol.RetrieverUnreachable,
      client.EngineUnreachable,
      interruption.Outage,
    ):
      self._save()
      raise
    self._finish()
    return 0

  def _step(self, interrupt: interruption.Interruption) -> None:
    """One step. Interrupted while collecting, it has not happened."""
    config, step = self._config, self._done
    timer = timing.Timer()
    with interrupt.abandonable():
      self._schedule()
      collected = self._prefetcher.result(step)
    timer.lap('wait')
    trajectories, metrics = collected.trajectories, collected.metrics
    packed = pack.pack(
      trajectories,
      length_bucket=config.rollout.length_bucket,
      sentences=self._sentences,
      with_expert_ids=config.updates.routing_replay == 'sampler',
    )
    old = None
    if config.rollout.steps_ahead and config.updates.old_policy == 'sampled':
      old = self._prefetcher.policy(step)
    batch, annotations = self._learner.annotate(
      packed, self._state, self._reference, old
    )
    metrics |= {k: float(v) for k, v in jax.device_get(annotations).items()}
    if step == 0:  # later ones are of other weights, if collected ahead
      mismatch_check.check(metrics, limit=config.rollout.mismatch_limit)
    timer.lap('annotate')
    self._state, report = self._learner.update_epochs(self._state, batch, step)
    self._done += 1
    timer.lap('update')
    self._learner.adapt_kl(
      metrics['critic/kl_per_trajectory'],
      num_trajectories=int(packed.loss_mask_BL.any(axis=1).sum()),
    )
    metrics |= report | timer.laps
    metrics['timing_s/collect'] = collected.seconds
    metrics['timing_s/step'] = sum(timer.laps.values())
    metrics |= timing.speed(
      packed, metrics, num_epochs=config.updates.num_epochs
    )
    # The save follows the line it belongs to: its time stands in the next one.
    metrics['timing_s/checkpoint'] = self._save_seconds
    self._save_seconds = 0.0
    kept = max(config.writer.trajectories, config.writer.samples)
    self._unwritten = metrics, self._records(trajectories[:kept])
    self._finish_step(interrupt)

  def _schedule(self) -> None:
    """Lets collections begin that wait for the policy of now."""
    params = self._state.policy.params
    if self._config.rollout.steps_ahead:
      params = self._learner.copy_policy(self._state)
    self._prefetcher.schedule(self._done, params)

  def _finish_step(self, interrupt: interruption.Interruption) -> None:
    """Evaluates, writes and saves an updated step.

    Interrupted while evaluating, its update is not lost: what is unwritten is
    saved with the state, and the next start concludes it in the same way.
    """
    metrics, records = self._unwritten
    if self._due(self._config.evaluate.every):
      timer = timing.Timer()
      with interrupt.abandonable():
        metrics = metrics | self._evaluate()
      timer.lap('evaluate')
      metrics |= timer.laps
      metrics['timing_s/step'] += metrics['timing_s/evaluate']
    self._unwritten = None
    self._writer.write(self._done, metrics)
    self._writer.write_trajectories(self._done, records)
    if not self._due(self._config.checkpoint.every):
      return
    if not self._evaluates:
      self._show(f'step {self._done}', self._samples(records))
    # Last: killed in between, the lines are written again, never missing.
    timer = timing.Timer()
    self._save()
    timer.lap('checkpoint')
    self._save_seconds = timer.laps['timing_s/checkpoint']

  def _evaluate(self) -> dict[str, float]:
    """Greedy scores of the fixed questions; shows a few of the dialogues."""
    # The retriever's statistics are of one or the other.
    self._prefetcher.drain()
    scores, trajectories = self._evaluator.run(
      self._learner.merged_params(self._state)
    )
    records = self._records(self._samples(trajectories))
    self._show(f'evaluation after step {self._done}', records)
    return self._evaluator.metrics(scores)

  def _records(self, trajectories: list) -> list[dict]:
    return [trajectory_metrics.record(t, self._tokenizer) for t in trajectories]

  def _samples(self, items: list) -> list:
    """As many as are printed, from all over."""
    count = self._config.writer.samples
    return items[:: max(len(items) // max(count, 1), 1)][:count]

  def _show(self, title: str, records: list) -> None:
    for record in records:
      self._writer.show(title)
      self._writer.show(dialogues.render(record, colour=sys.stdout.isatty()))

  def _due(self, every: int) -> bool:
    last = self._done == self._config.num_steps
    return every > 0 and (last or self._done % every == 0)

  def _save(self) -> None:
    host = {'kl_coefficient': self._learner.kl_coefficient}
    if self._unwritten is not None:
      # Text, because a metric may be nan and a manifest may not.
      host['unwritten'] = json.dumps(self._unwritten)
    published = self._prefetcher.published(
      self._done, self._state.policy.params
    )
    state = dataclasses.replace(self._state, published=published)
    checkpoint_state.save(self._checkpointer, self._done, state, host)

  def _finish(self) -> None:
    """The files a person opens first, and where they are."""
    curve = self._workdir / 'learning_curve.png'
    plots.learning_curve(self._workdir / 'metrics.jsonl', curve)
    policy = self._workdir / 'policy'
    params = self._learner.merged_params(self._state)
    model_files.export(
      self._config,
      policy,
      self._learner.policy,
      params,
      self._tokenizer,
      dtype=weights.TRAINED,
    )
    self._writer.show(
      f'done. metrics: {self._workdir / "metrics.jsonl"}\n'
      f'curve: {curve}\n'
      f'dialogues: {self._workdir}/trajectories-*.jsonl\n'
      f'policy (Hugging Face format): {policy}'
    )
