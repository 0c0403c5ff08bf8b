"""The metrics of a training step that no part of it returns by itself.

They say what the updates did, how long each phase took, and how busy the
devices were.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses

from stppo_jax import batch as batch_lib
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import step as step_lib
from stppo_jax.learner import utilization
from stppo_jax.models import roofline
from stppo_jax.parallel import compilation
from stppo_jax.parallel import memory as memory_lib
from stppo_jax.parallel import publish
from stppo_jax.records import timing
from stppo_jax.tools.plan import memory
from stppo_jax.training import host_metrics
from stppo_jax.training import run as run_lib
from stppo_jax.training import step_work
from stppo_jax.training.checks import batch_sizes


class StepMetrics:
  """Measures the steps of a run, on all its hosts.

  Args:
    config: the config of the run.
    learner: annotates and updates.
    placement: the devices that decode; None with a remote engine.
    run: the run; what is compiled until it ends is measured.
  """

  def __init__(
    self,
    config,
    learner: learner_lib.Learner,
    placement: publish.Placement | None,
    run: run_lib.Run,
  ):
    self._config = config
    self._learner = learner
    engine = {}
    if placement is not None:
      engine = memory.engine_sizes(config, learner.policy, placement)
    # `_bytes_per_second` puts in the lengths of each step.
    longest = config.env.max_length
    self._work = step_work.build(
      config, learner, placement, engine, length=longest, losses=longest
    )
    self._slots = batch_sizes.num_slots(config, run.hosts.count)
    self._run = run
    self._compile_seconds = run.enter(compilation.measured())

  def totals(
    self, packed: batch_lib.TokenBatch, seconds: float
  ) -> host_metrics.Totals:
    """Returns the numbers of a step's batch; all hosts call it.

    Args:
      packed: this host's rows, as numpy arrays.
      seconds: the time that this host has collected.
    """
    return host_metrics.totals(
      self._run.hosts, packed, seconds, self._learner.policy.config
    )

  def measure(
    self,
    updates: Sequence[step_lib.LossOutputs],
    totals: host_metrics.Totals,
    laps: Mapping[str, float],
  ) -> dict[str, float]:
    """Returns the metrics of a step by name.

    Args:
      updates: what its updates returned.
      totals: the numbers of its batch.
      laps: the seconds of its phases, by the names of `timing.Timer`.
    """
    epochs = len(updates) * self._config.updates.minibatch_size / totals.rows
    metrics = utilization.summarize(updates)
    metrics['update/count'] = len(updates)
    metrics |= timing.step_metrics(
      laps,
      tokens=totals.tokens,
      sampled=totals.sampled,
      collect_seconds=max(totals.collect_seconds),
      save_seconds=self._run.save_seconds,
      num_epochs=epochs,
    )
    if len(totals.collect_seconds) > 1:
      metrics |= host_metrics.collect_seconds(totals.collect_seconds)
    metrics |= memory_lib.max_memory()
    metrics |= self._learner.utilization(
      totals.operations, seconds=laps['timing_s/update'], epochs=epochs
    )
    metrics |= self._bytes_per_second(
      totals, len(updates), laps['timing_s/update']
    )
    metrics['timing_s/compile'] = self._compile_seconds()
    return metrics

  def _bytes_per_second(
    self, totals: host_metrics.Totals, num_updates: int, seconds: float
  ) -> dict[str, float]:
    """Returns what a device sends and reads, by the formulas of `roofline`.

    Args:
      totals: the numbers of the step's batch.
      num_updates: the number of its updates.
      seconds: their duration.
    """
    metrics = {}
    work = dataclasses.replace(
      self._work,
      updates=num_updates,
      length=totals.length,
      losses=totals.losses,
    )
    if sent := roofline.update_sent(work):
      metrics['perf/update_gb_sent_per_second'] = sent / seconds / 1e9
    # Every call writes a token into each slot, if all slots are in use.
    slots = self._slots * len(totals.collect_seconds)
    read = roofline.decode_read(
      dataclasses.replace(
        self._work,
        length=totals.tokens / totals.rows,
        decode_steps=totals.sampled / slots,
      )
    )
    if read:  # there is none with a remote engine
      longest = max(totals.collect_seconds)
      metrics['perf/decode_gb_read_per_second'] = read / longest / 1e9
    return metrics
