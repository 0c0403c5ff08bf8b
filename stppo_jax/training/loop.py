"""Training with reinforcement learning: collect, annotate, update.

Everything that a step does is a function of (config, seed, step, state), so
that the same command resumes from the last checkpoint as if nothing had
happened.
"""

import logging
import math
import pathlib

import jax

from stppo_jax.learner import step as step_lib
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
  """Trains, or resumes, the run of a config in `workdir`.

  Args:
    config: the config of the run.
    workdir: the run's folder.
    restart: whether to begin anew and move aside what the folder holds.
    hosts: the hosts of the run; all of them call this function.

  Returns:
    The exit code: 0 done, 130 interrupted and saved, 75 preempted and saved.

  Raises:
    Exceptions with an `exit_code`: a config that does not fit its files,
    devices or workdir, or an engine that samples from another policy than the
    one that is trained (2), corrupt or missing checkpoints (3), a retriever
    out of reach, a locked workdir, or a checkpoint that cannot be saved (75),
    too many updates in a row that were skipped, or an alarm that ends the run
    (76). After the failure of one host, `HostFailed` with its exit code on the
    others.
  """
  with claim.claimed(
    config, workdir, restart=restart, hosts=hosts
  ) as folder:  # the lock, signals and votes; nothing else is written yet
    hosts = folder.hosts  # those that learn, if others only collect
    # In `start.config`, and in `loaded.config` once the start has been made,
    # the model is the start.
    start = starts.resolve(config, folder)
    parts = build_lib.build(start.config, folder)  # once, or a refusal
    folder.record()
    for note in parts.notes:
      _log.info(note)
    collecting = parts.collecting
    if collecting.follow is not None:  # this host does nothing else
      with folder.interruptible():
        collecting.follow()
      return folder.exit_code
    loaded = starts.load(start, config, parts, folder)
    learner, prefetcher = parts.learner, collecting.prefetcher
    with run_lib.Run.open(
      loaded.config,
      folder,
      loaded.state,
      checkpoint_state.TrainCheckpoints(learner, prefetcher),
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
        # A signal may end the wait: a collection can be made again.
        with run.phase('wait'):
          # Publishes the policy that the step is collected with.
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
          for rows in further:
            state, update = learner.update(
              state, batch, rows, step, values_alone=True
            )
            of_values.append(update)
          # Devices may still compute, and that time belongs to the updates.
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
