"""Training with reinforcement learning: collect, annotate, update.

Everything that a step does is a function of (config, seed, step, state), so
that the same command resumes from the last checkpoint as if nothing had
happened.
"""

import functools
import pathlib
from typing import Any

import jax

from stppo_jax.learner import utilization
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.training import run as run_lib
from stppo_jax.training import step_metrics
from stppo_jax.training.building import trainer as trainer_lib
from stppo_jax.training.checks import host_check
from stppo_jax.training.checks import mismatch_check
from stppo_jax.training.checks import skipped_updates
from stppo_jax.training.stopping import alarms
from stppo_jax.training.stopping import crash


def train(
  config,
  workdir: str | pathlib.Path,
  *,
  restart: bool = False,
  source: Any = None,
  hosts: hosts_lib.Hosts = hosts_lib.ALONE,
) -> int:
  """Trains, or resumes, the run of a config in `workdir`.

  Args:
    config: the config of the run.
    workdir: the run's folder.
    restart: whether to begin anew and move aside what the folder holds.
    source: the config of the run that `init_from` names; not needed once the
      folder has the start that is made from it.
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
  host_check.check(hosts, config)
  with run_lib.start(workdir, hosts=hosts) as run:
    trainer = trainer_lib.build(config, run, restart=restart, source=source)
    learner, prefetcher = trainer.learner, trainer.prefetcher
    state = trainer.state
    meter = step_metrics.StepMetrics(config, learner, trainer.placement, run)
    watch = alarms.Alarms(config, hosts, run.show)
    skips = skipped_updates.SkippedUpdates(config.updates.max_skipped)
    for step in range(run.first_step, run.num_steps):
      timer = run.timer('wait', step=step + 1)
      # Publishes the policy that the step is collected with.
      prefetcher.schedule(step, state)
      # A signal may end this early, because a collection can be made again.
      with run.abandonable():
        collected = prefetcher.result(step)

      timer.begin('annotate')
      packed = trainer.pack(collected.trajectories)
      host_check.check_program(hosts, 'annotate and update', step, packed)
      totals = meter.totals(packed, collected.seconds)
      old = prefetcher.old_policy(step)
      batch, annotated = learner.annotate(
        state, packed, reference=trainer.reference, old=old
      )
      metrics = trainer.step_collector.measured(collected.metrics, step)
      metrics |= {k: float(x) for k, x in jax.device_get(annotated).items()}
      if step == 0:
        mismatch_check.check(config, metrics)

      timer.begin('update')
      updates = []
      for rows in learner.minibatches(len(batch.lengths_B), step):
        state, update = learner.update(state, batch, rows, step)
        updates.append(update)
        if utilization.exceeds_kl(update, config.updates.kl_stop):
          break
      # Devices may still compute, and that time belongs to the updates.
      jax.block_until_ready(updates)
      timer.begin('token_details')
      details = learner.token_details(state, batch, hosts)
      timer.end()

      metrics |= meter.measure(updates, totals, timer.laps)
      metrics |= watch.measure(metrics)
      learner.adapt_kl(metrics['critic/kl_per_trajectory'], totals.trained)
      run.finish_step(
        step + 1, state, metrics, collected.trajectories, details=details
      )
      dump = functools.partial(
        *(crash.write, run, config, learner, state, batch),
        # The coefficient of this step: `adapt_kl` has set that of the next one.
        kl_coefficient=metrics['critic/kl_coef'],
      )
      skips.check([update.metrics for update in updates], dump)
      watch.check(step + 1)
    run.finish(learner.policy, learner.merged_params(run.state), curve=True)
  return run.exit_code
