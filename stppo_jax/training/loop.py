"""Training with reinforcement learning: collect, annotate, update.

The result of a step is a function of (config, seed, step, state). So the same
command resumes from the last checkpoint, and the run goes on as if it had not
been interrupted.
"""

import logging
import math
import pathlib

import jax

from stppo_jax.learner import step as step_lib
from stppo_jax.learner import value_training
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.training import alarms
from stppo_jax.training import build as build_lib
from stppo_jax.training import checkpoint_state
from stppo_jax.training import checks
from stppo_jax.training import claim
from stppo_jax.training import metrics as metrics_lib
from stppo_jax.training import run as run_lib
from stppo_jax.training import starts

_log = logging.getLogger(__name__)


def train(
  config,
  workdir: str | pathlib.Path,
  *,
  restart: bool = False,
  hosts: hosts_lib.Hosts = hosts_lib.ALONE,
) -> int:
  """Trains the run of a config in `workdir`, or resumes it there.

  Args:
    config: the config of the run.
    workdir: the run's folder.
    restart: whether to begin anew and move the files of the folder aside.
    hosts: the hosts of the run; all of them call this function.

  Returns:
    The exit code: 0 if the run is done, 130 if it was interrupted and saved, 75
    if it was preempted and saved.

  Raises:
    Exceptions with an `exit_code`:
      2: the config does not fit its files, devices or workdir, or engine and
        trainer do not compute the same policy.
      3: checkpoints are corrupt or missing.
      75: the retriever is out of reach, the workdir is locked, or a checkpoint
        cannot be saved.
      76: too many updates in a row were skipped, or an alarm ends the run.
    HostFailed: another host has failed; the error has that host's exit code.
  """
  # `folder` has the lock; the run is not recorded yet.
  with claim.claimed(config, workdir, restart=restart, hosts=hosts) as folder:
    # If some hosts only collect, `hosts` has only the hosts with the same task
    # as this host.
    hosts = folder.hosts
    # If the run makes its start, `start.config` has the start's model shape,
    # and `loaded.config` has the start's directory as `model.path`.
    start = starts.resolve(config, folder)
    parts = build_lib.build(start.config, folder)  # this may refuse the config
    folder.record()
    for note in parts.notes:
      _log.info(note)
    collecting = parts.collecting
    if collecting.follow is not None:  # this host only collects
      with folder.interruptible():
        collecting.follow()
      return folder.exit_code
    loaded = starts.load(start, config, parts, folder)
    learner, prefetcher = parts.learner, collecting.prefetcher
    replay = value_training.Replay(config, learner.mesh)
    with run_lib.Run.open(
      loaded.config,
      folder,
      loaded.state,
      checkpoint_state.TrainCheckpoints(learner, prefetcher, replay),
      parts.tokenizer,
      num_steps=config.num_steps,
      origin=(loaded.number, loaded.name),
      evaluate=collecting.evaluate,
      prints_samples=not (
        config.evaluate.every and collecting.evaluator.questions
      ),
    ) as run:
      run.evaluate_start()
      meter = metrics_lib.StepMetrics(
        parts.config, learner, parts.placement, folder
      )
      alarm = alarms.Alarms(config, hosts)
      skips = checks.SkippedUpdates(config.updates.max_skipped)
      state = run.state
      for step in run.steps():
        # A signal may end this wait: the next start collects the step again.
        with run.phase('wait'):
          # Publishes the policy for the step, or starts collections ahead.
          # No signal may interrupt this, because all hosts publish together.
          prefetcher.schedule(step, state)
          with folder.interruptible():
            collected = prefetcher.result(step)
            collecting.release()

        with run.phase('annotate'):
          packed, gained = parts.pack(collected.trajectories, state, step)
          totals = metrics_lib.totals(
            hosts, packed, collected.seconds, learner.models
          )
          batch, annotated = learner.annotate(
            state,
            packed,
            reference=loaded.reference,
            old=prefetcher.old_policy(step),
            older=prefetcher.older_policies(step),
          )
          metrics = collecting.step_collector.complete_metrics(
            collected.metrics, step
          )
          metrics |= {k: float(x) for k, x in jax.device_get(annotated).items()}
          metrics |= gained
          if step == 0:
            checks.check_mismatch(config, metrics)
          if learner.warmup.observe(
            step, metrics.get('critic/vf_explained_var', math.nan)
          ):
            _log.info('step %d: the policy learns from now on', step + 1)

        updates, of_values = [], []
        with run.phase('update'), run.consuming_state():
          for rows in learner.minibatches(len(batch.lengths_B), step):
            state, update = learner.update(state, batch, rows, step)
            updates.append(update)
            if step_lib.exceeds_kl(update, config.updates.kl_stop):
              break
          further = learner.minibatches(
            len(batch.lengths_B), step, values_alone=True
          )
          for collection in (*replay.before(step), batch):
            for rows in further:
              state, update = learner.update(
                state, collection, rows, step, values_alone=True
              )
              of_values.append(update)
          replay.add(batch)
          # Wait for the devices, so that their time counts as this phase.
          jax.block_until_ready((updates, of_values))
        with run.phase('token_details'):
          details = learner.token_details(state, batch, hosts)

        metrics |= meter.measure(updates, totals, run.seconds, run.save_seconds)
        metrics |= alarm.measure(metrics)
        learner.adapt_kl(metrics['critic/kl_per_trajectory'], totals.trained)
        run.finish_step(
          step + 1, state, metrics, collected.trajectories, details=details
        )
        skips.check(
          step + 1, [update.metrics for update in (*updates, *of_values)]
        )
        alarm.check(step + 1)
      params = learner.merged_params(run.state.params)
      run.finish(learner.policy, params, curve=True)
  return folder.exit_code
