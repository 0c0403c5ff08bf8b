"""The metrics of a training step: its updates, durations and hardware use.

`totals` adds up numbers of all hosts. From these, `StepMetrics` computes the
metrics of a step.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import model_roles
from stppo_jax.learner import step as step_lib
from stppo_jax.models import flops
from stppo_jax.models import roofline
from stppo_jax.parallel import compilation
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.parallel import memory
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import publish
from stppo_jax.parallel import topology
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.training import claim
from stppo_jax.training import components
from stppo_jax.training import engines

# Matches the path of a weight of an expert.
_OF_EXPERTS = re.compile(r'moe/\w+_proj/')


class Counts(NamedTuple):
  """The numbers of arithmetic operations for a batch, from `models.flops`.

  Attributes:
    policy: the operations of a forward pass of the policy.
    value: the operations of a forward pass of the value model.
    policy_again: the operations of the policy's forward pass that the backward
      pass does again, because their results were not kept.
    value_again: the same for the value model.
  """

  policy: float
  value: float
  policy_again: float
  value_again: float


class Totals(NamedTuple):
  """Numbers about the whole batch of a step, the same on all hosts.

  Attributes:
    rows: the number of rows of the batch.
    tokens: the number of tokens of the batch.
    sampled: the number of tokens of the batch that the policy wrote.
    trained: the number of rows with a token in the loss.
    operations: the operations of the models for the whole batch.
    collect_seconds: for each host that collects, the duration of its
      collection.
  """

  rows: int
  tokens: float
  sampled: float
  trained: int
  operations: Counts
  collect_seconds: list[float]


def totals(
  hosts: hosts_lib.Hosts,
  packed: batch_lib.TokenBatch,
  seconds: Sequence[float],
  models: model_roles.Models,
) -> Totals:
  """Adds up the numbers of a step over all hosts, and returns the totals.

  Args:
    hosts: the hosts that learn; all of them call this function.
    packed: this host's rows, as numpy arrays.
    seconds: durations of collections. If this host collects, it passes the
      duration of its collection. If other hosts collect, the first host passes
      the durations of all hosts that collect, and the other hosts pass none.
    models: policy and value model.
  """
  lengths = packed.lengths_B.tolist()
  num_losses = float(packed.loss_mask_BL.sum())
  mine = (
    len(lengths),
    float(packed.lengths_B.sum()),
    float((packed.turn_ids_BL > 0).sum()),
    int(packed.loss_mask_BL.any(axis=1).sum()),
    *_of_both(flops.forward_operations, models, lengths, num_losses),
    *_of_both(flops.recomputed_operations, models, lengths, num_losses),
    seconds,
  )
  # One exchange for all numbers, because each exchange is a round trip between
  # the hosts.
  *counts, collected = zip(*hosts.exchange('totals', mine))
  rows, tokens, sampled, trained, *done = map(sum, counts)
  return Totals(
    rows=rows,
    tokens=tokens,
    sampled=sampled,
    trained=trained,
    operations=Counts(*done),
    collect_seconds=[x for part in collected for x in part],
  )


class StepMetrics:
  """Measures the steps of a run, on all its hosts.

  Args:
    config: the config of the run.
    learner: annotates batches and updates the models.
    placement: the devices that decode; None if this host does not decode.
    folder: the run's folder. The time of compilations is measured until the
      folder is left.
  """

  def __init__(
    self,
    config,
    learner: learner_lib.Learner,
    placement: publish.Placement | None,
    folder: claim.Folder,
  ):
    self._config, self._learner = config, learner
    # `_bytes_per_second` replaces `length` by the lengths of each step.
    longest = config.env.max_length
    self._work = work(
      config, learner, placement, length=longest, losses=longest
    )
    self._slots = components.num_slots(config, folder.hosts.count)
    # The number of the first host that collects. If some hosts only collect,
    # they are numbered after the hosts that learn.
    self._first = folder.hosts.count if folder.hosts.collectors else 0
    self._compile_seconds = folder.enter(compilation.measured())

  def measure(
    self,
    updates: Sequence[step_lib.LossOutputs],
    totals: Totals,
    seconds: Mapping[str, float],
    save_seconds: float,
  ) -> dict[str, float]:
    """Returns the metrics of a step by name.

    Args:
      updates: the outputs of the step's updates.
      totals: the numbers of the step's batch.
      seconds: the durations of the step's phases, by `timing_s/{phase}`: wait
        (for the collection), annotate, update and token_details.
      save_seconds: the seconds by which the save of the previous step delayed
        the loop. They are reported here, because the metrics of that step were
        written before its save.
    """
    epochs = len(updates) * self._config.updates.minibatch_size / totals.rows
    total, updating = sum(seconds.values()), seconds['timing_s/update']
    # If the step was collected ahead, its collection took longer than the wait
    # for the result.
    collecting = max(totals.collect_seconds)
    metrics = step_lib.summarize(updates)
    metrics |= {
      'update/count': len(updates),
      **seconds,
      'timing_s/collect': collecting,
      'timing_s/step': total,
      'perf/throughput': totals.tokens / total,
      'perf/collect_tokens_per_second': totals.sampled / collecting,
      'perf/update_tokens_per_second': totals.tokens * epochs / updating,
      'timing_s/checkpoint': save_seconds,
    }
    if self._first:
      metrics['hosts/learners_idle'] = seconds['timing_s/wait'] / total
    # Each host collects on its own, and all hosts wait for the slowest one.
    if len(collected := totals.collect_seconds) > 1:
      metrics |= {
        'hosts/collect_s_min': min(collected),
        'hosts/collect_s_median': float(np.median(collected)),
        'hosts/collect_s_max': max(collected),
        'hosts/slowest': float(self._first + np.argmax(collected)),
      }
    metrics |= memory.max_memory()
    metrics |= self._utilization(totals.operations, updating / epochs)
    metrics |= self._bytes_per_second(totals, len(updates), updating)
    metrics['timing_s/compile'] = self._compile_seconds()
    return metrics

  def _utilization(self, counts: Counts, seconds: float) -> dict[str, float]:
    """Returns the shares of the devices' peak rate that updates achieve.

    The result is {} if the peak rate of the devices is not known. It is also {}
    in float32, because the known peak rates are for bfloat16.

    Args:
      counts: the operations for the batch.
      seconds: the duration of one epoch of updates over the batch.
    """
    learner = self._learner
    peak = topology.peak_operations(learner.mesh)
    if peak is None or learner.policy.config.dtype != 'bfloat16':
      return {}
    # With a single microbatch no extra pass is needed: the pass of the update
    # gives the statistics of the minibatch.
    extra_pass = learner.num_microbatches > 1
    return shares(
      counts,
      peak_operations=peak * seconds,
      has_value_model=learner.models.value is not None,
      trains_adapters=learner.models.policy.lora is not None,
      extra_pass=extra_pass and learner.algorithm.uses_minibatch_statistics,
    )

  def _bytes_per_second(
    self, totals: Totals, num_updates: int, seconds: float
  ) -> dict[str, float]:
    """Returns the rates at which a device sends and reads, in GB per second.

    The bytes that updates send and the bytes that decode reads come from the
    formulas of `roofline`. They are divided by measured durations.

    Args:
      totals: the numbers of the step's batch.
      num_updates: the number of updates of the step.
      seconds: the duration of these updates.
    """
    metrics = {}
    # The formulas assume full rows, so a minibatch counts as the number of full
    # rows that would hold its tokens.
    length = self._learner.sizes.row_length
    tokens = totals.tokens / totals.rows * self._config.updates.minibatch_size
    rows = math.ceil(tokens / length)
    updating = dataclasses.replace(
      self._work,
      updates=num_updates,
      minibatch=rows,
      microbatch=min(rows, self._work.microbatch),
      length=length,
    )
    if sent := roofline.update_sent(updating):
      metrics['perf/update_gb_sent_per_second'] = sent / seconds / 1e9
    # The number of decode steps below assumes that all slots are in use, so
    # that each step writes a token into every slot.
    slots = self._slots * len(totals.collect_seconds)
    read = roofline.decode_read(
      dataclasses.replace(
        self._work,
        length=totals.tokens / totals.rows,
        decode_steps=totals.sampled / slots,
      )
    )
    if read:  # no bytes are read if this host does not decode
      longest = max(totals.collect_seconds)
      metrics['perf/decode_gb_read_per_second'] = read / longest / 1e9
    return metrics


def _of_both(operations, models, lengths, losses) -> tuple[float, float]:
  """Returns the number of operations for the policy and for the value model.

  If `models.value` is None, there is no value model with a backbone of its own.
  The second number then means nothing, and the caller must not use it.

  Args:
    operations: `flops.forward_operations` or `flops.recomputed_operations`.
    models: policy and value model.
    lengths, losses: see `flops.forward_operations`.
  """
  policy, values = operations(models.policy.config, lengths, losses)
  if models.value is not None:
    _, values = operations(models.value.config, lengths, losses)
  return policy, values


def shares(
  counts: Counts,
  *,
  peak_operations: float,
  has_value_model: bool,
  trains_adapters: bool,
  extra_pass: bool,
) -> dict[str, float]:
  """Returns `perf/mfu` and `perf/hfu` of an epoch of updates.

  Both are shares of the peak rate. `perf/mfu` counts the operations that the
  gradient needs. `perf/hfu` also counts operations that are done again because
  their results were not kept.

  Args:
    counts: the operations for the batch.
    peak_operations: the number of operations that the devices could do at their
      peak rate in the time of the epoch.
    has_value_model: whether the value model has a backbone of its own.
    trains_adapters: whether only adapters are trained, and the weights of the
      backbone are frozen.
    extra_pass: whether the updates need one more forward pass of the policy,
      for statistics of the minibatch.
  """
  # For each product of the forward pass, the backward pass has two: one for the
  # gradient of the input, and one for the gradient of the weights. Frozen
  # weights do not need the second one.
  passes = 2 if trains_adapters else 3
  needed = passes * (counts.policy + counts.value * has_value_model)
  again = counts.policy_again + counts.value_again * has_value_model
  again += counts.policy * extra_pass
  return {
    'perf/mfu': needed / peak_operations,
    'perf/hfu': (needed + again) / peak_operations,
  }


def work(
  config,
  learner: learner_lib.Learner,
  placement: publish.Placement | None,
  *,
  length: int,
  losses: int,
) -> roofline.Work:
  """Returns the sizes of a step for the formulas of `roofline`.

  Args:
    config: the config of the run.
    learner: the learner of the run.
    placement: the devices that decode; None if this host does not decode.
    length: the number of tokens of a row.
    losses: the number of tokens of a row that are trained on.
  """
  rollout, updates = config.rollout, config.updates
  shape = learner.policy.config
  algorithm = algorithm_lib.build_algorithm(config.algorithm)
  values = config.model.value_backbone if algorithm.uses_values else 'none'
  params = learner.policy.abstract_params
  stacks = [params[name] for name in shape.stacks]
  weights = sum(x.size for x in jax.tree.leaves(stacks))
  experts = sum(
    x.size
    for path, x in jax.tree.leaves_with_path(params)
    if _OF_EXPERTS.search(
      jax.tree_util.keystr(path, simple=True, separator='/')
    )
  )
  trained = weights
  if config.model.lora.rank:
    state, _ = learner.abstract_start()
    trained = sum(x.size for x in jax.tree.leaves(state.policy.params))
  steps, rows, hosts, engine = 0.0, 0.0, 1, {}
  if placement is not None:
    engine, _ = engines.sizes(config, learner.policy, placement)
    hosts = placement.hosts
    slots = components.num_slots(config, hosts)
    # The trajectories of a step are decoded in waves. In each wave every slot
    # writes `losses` tokens, and each decode step reads all weights once.
    waves = math.ceil(rollout.trajectories_per_step / hosts / slots)
    decoding = placement.mesh
    rows = slots * mesh_lib.num_hosts(decoding) / decoding.shape['data']
    steps = float(waves * losses)
  return roofline.Work(
    shape=shape,
    axes=dict(learner.mesh.shape),
    trajectories=rollout.trajectories_per_step,
    group_size=rollout.group_size,
    minibatch=updates.minibatch_size,
    microbatch=updates.microbatch_size or updates.minibatch_size,
    updates=updates.num_epochs
    * (rollout.trajectories_per_step // updates.minibatch_size),
    length=length,
    losses=losses,
    values=values,
    adapters=config.model.lora.rank > 0,
    gathers_base=learner.models.gathers_base,
    statistics=algorithm.uses_minibatch_statistics,
    weights=weights,
    trained=trained,
    experts=experts,
    itemsize=jnp.dtype(shape.dtype).itemsize,
    decode_steps=steps,
    decode_rows=rows,
    engine_weights=engine.get(engines.WEIGHTS, 0),
    engine_cache=engine.get(engines.CACHE, 0),
    engine_length=config.env.max_length,
    engine_tensor=placement.tensor if placement is not None else 0,
    collectors=0 if placement is None else len(placement.collecting) * hosts,
    fetches=placement is not None and placement.collectors > 0,
  )
