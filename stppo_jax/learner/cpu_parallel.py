"""Updates on one CPU device, with a share of the microbatches for each core.

XLA's CPU backend splits every single operation over all cores, and after each
operation it waits for all cores. If a microbatch fits a core's cache, its
operations are so short that the waiting takes more time than the splitting
saves: at the quickstart's sizes the cores wait longer than they compute. In
this module every core runs a whole program on its share of the microbatches.
The cores wait for each other only to form the statistics and the summed
gradient of the whole minibatch.

The result equals the result of `step.update`, up to the order of float32 sums.
A mesh of several devices divides the rows among the devices and does not use
this module.
"""

from collections.abc import Callable
from concurrent import futures
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.learner import minibatches
from stppo_jax.learner import packing as packing_lib
from stppo_jax.learner import policy_loss
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import step as step_lib
from stppo_jax.learner import value_training
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import diagnostics as diagnostics_lib

Tree = Any


def is_supported(
  mesh: jax.sharding.Mesh, algorithm: algorithm_lib.Algorithm
) -> bool:
  """Returns whether this module can update on a mesh with an algorithm.

  The mesh must be one CPU device. The microbatches of the cores do not have the
  configured size, so the algorithm must have no correction whose result depends
  on the size of microbatches.
  """
  one_cpu = mesh.size == 1 and mesh.devices.item().platform == 'cpu'
  return one_cpu and not algorithm.depends_on_microbatches


def num_cores() -> int:
  """Returns the number of cores that this process may run on."""
  # macOS has no `os.sched_getaffinity`. There, all cores of the machine count.
  affinity = getattr(os, 'sched_getaffinity', None)
  return len(affinity(0)) if affinity else os.cpu_count() or 1


class Updater:
  """Updates like `step.update`, on one device and several cores.

  Args:
    spec: the models and the static sizes.
    method: how the gradient is computed, see `step.Method`.
    optimizers: the optimisers.
    num_workers: the number of threads, each of which runs programs on its share
      of the microbatches.
    out_shardings: the shardings of the updated state.
  """

  def __init__(
    self,
    spec: step_lib.Spec,
    method: step_lib.Method,
    optimizers: state_lib.Optimizers,
    *,
    num_workers: int,
    out_shardings: Tree,
  ):
    self._spec, self._method = spec, method
    self._optimizers = optimizers
    self._num_workers = num_workers
    self._pool = futures.ThreadPoolExecutor(num_workers, 'update')
    # The pairs (kind of programs, shapes of a microbatch) whose programs have
    # been called and so are compiled; see `_map`.
    self._compiled = set()
    self._select = jax.jit(lambda x, rows: jax.tree.map(lambda y: y[rows], x))
    self._split = jax.jit(lambda x, packing: minibatches.split(x, packing))
    self._cast = jax.jit(spec.models.cast)
    self._outputs = jax.jit(self._placed_outputs, static_argnames='num_rows')
    self._context = jax.jit(self._join_context)
    self._sums = jax.jit(
      functools.partial(step_lib.sum_gradients, method=method, spec=spec)
    )
    self._apply = jax.jit(
      self._join_and_apply,
      donate_argnums=0,
      out_shardings=(out_shardings, None),
    )

  def update(
    self,
    state: state_lib.TrainState,
    frozen: Tree,
    batch: batch_lib.TokenBatch,
    packed: packing_lib.Packed,
    hyperparameters: step_lib.Hyperparameters,
  ) -> tuple[state_lib.TrainState, step_lib.LossOutputs]:
    """Updates on some rows of a batch; see `step.update`.

    Args:
      state, frozen, hyperparameters: see `step.update`.
      batch: the annotated batch.
      packed: the rows of the batch that form the minibatch, and their packing.
    """
    minibatch = self._select(batch, packed.rows)
    packing = packed.packing
    # Each microbatch is cut out separately, with a leading axis of length 1. So
    # the programs below take a single microbatch, and their shapes do not
    # depend on the number of microbatches.
    microbatches = [
      self._split(minibatch, jax.tree.map(lambda x: x[n : n + 1], packing))
      for n in range(len(packing.rows))
    ]
    params = self._cast(state.with_frozen(frozen).params)
    inputs, outputs = hyperparameters.loss, None
    statistics = inputs.algorithm.uses_minibatch_statistics
    if statistics and self._method is not value_training.METHOD:
      count = len(packed.rows)
      outputs = self._map(
        lambda share: functools.reduce(
          _add, [self._outputs(params, m, num_rows=count) for m in share]
        ),
        microbatches,
        'outputs',
      )
    context = self._context(minibatch, inputs, outputs)

    def summand(microbatch):
      gradient, outputs = self._sums(params, microbatch, context)
      return (gradient, outputs.metrics), outputs.diagnostics

    sums = self._map(
      lambda share: functools.reduce(_join, map(summand, share)),
      microbatches,
      ('sums', jax.tree.structure(context)),
    )
    return self._apply(state, sums, hyperparameters)

  def _map(
    self, function: Callable[[Tree], Tree], microbatches: Tree, kind: Any
  ) -> list[Tree]:
    """Returns the results of a function for each worker's microbatches.

    The assignment of microbatches to workers does not depend on timing, so
    equal calls give equal bits.

    Each worker has a thread, because calls from a single thread would run one
    after the other. There is one exception: for new shapes, the calling thread
    calls the function for one worker after the other. So a program is compiled
    once, and not by all threads at the same time.

    Args:
      function: maps the list of a worker's microbatches to a pytree.
      microbatches: the microbatches of all workers.
      kind: a hashable name of the programs that the function calls.
    """
    size = min(self._num_workers, len(microbatches))
    shares = [microbatches[n::size] for n in range(size)]
    shapes = lambda m: (
      jax.tree.structure(m),
      *(x.shape for x in jax.tree.leaves(m)),
    )
    kinds = {(kind, shapes(microbatch)) for microbatch in microbatches}
    if kinds <= self._compiled:
      return list(self._pool.map(function, shares))
    self._compiled |= kinds
    return [function(share) for share in shares]

  def _placed_outputs(self, params, microbatch, *, num_rows):
    """Returns a microbatch's outputs in arrays [B, L] of the whole minibatch.

    The rows of other microbatches are 0, so the sum of these arrays over the
    microbatches has the outputs of all rows. Because the arrays are added one
    by one, no program depends on the number of microbatches.
    """
    outputs = policy_loss.outputs_of(params, microbatch, spec=self._spec)
    return minibatches.join(outputs, microbatch.packing, num_rows)

  def _join_context(self, minibatch, inputs, outputs):
    if outputs is not None:
      outputs = functools.reduce(_add, outputs)
    context = policy_loss.join_context(
      minibatch, inputs, outputs, spec=self._spec
    )
    if self._spec.models.policy.config.num_experts:
      return context
    # The loss reads the minibatch's arrays only for the load of experts. For a
    # model without experts the arrays are left out, so that the programs of the
    # loss do not depend on the shapes of these arrays.
    return context._replace(minibatch=None)

  def _join_and_apply(self, state, sums, hyperparameters):
    (gradient, metrics), diagnostics = functools.reduce(_join, sums)
    gradient, outputs = self._method.finish(
      gradient,
      step_lib.LossOutputs(metrics, diagnostics),
      hyperparameters.loss,
    )
    return step_lib.apply_gradients(
      state, gradient, outputs, hyperparameters, optimizers=self._optimizers
    )


@functools.partial(jax.jit, donate_argnums=0)
def _add(total, summand):
  return jax.tree.map(jnp.add, total, summand)


@functools.partial(jax.jit, donate_argnums=0)
def _join(total, summand):
  """Adds the sums, and merges the diagnostics, of two sets of microbatches."""
  sums, diagnostics = zip(total, summand)
  # The value loss has no diagnostics.
  merged = diagnostics_lib.merge(*diagnostics) if diagnostics[0] else ()
  return _add(*sums), merged
