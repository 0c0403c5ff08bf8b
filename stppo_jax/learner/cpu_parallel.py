"""Updates on one CPU device, every core on its own share of microbatches.

XLA's CPU backend splits every single operation over all cores and joins them
again after it. On microbatches that fit a core's cache an operation is too
short for that to pay: at the quickstart's sizes the cores wait more than they
compute. Here every core runs a whole program on its share of the microbatches,
and the cores are joined only for numbers of the whole minibatch: its statistics
and the sum of its gradients.

The rows of a minibatch are sorted by length, and each microbatch may be cut off
behind its longest row, so that short rows are not computed at the length of
long ones.

The result is that of `step.update` up to the order of the float32 sums. A
mesh of several devices splits the rows itself and does not use this module.
"""

from collections.abc import Callable
from collections.abc import Sequence
from concurrent import futures
import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.learner import policy_loss
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import step as step_lib
from stppo_jax.rl import algorithm as algorithm_lib

Tree = Any


def is_supported(
  mesh: jax.sharding.Mesh, algorithm: algorithm_lib.Algorithm
) -> bool:
  """Returns whether the mesh is one CPU and microbatches may be small.

  They may not under a correction whose scope is the microbatch, because its
  result depends on their size.
  """
  one_cpu = mesh.size == 1 and mesh.devices.item().platform == 'cpu'
  return one_cpu and not algorithm.depends_on_microbatches


def num_workers(num_microbatches: int, cores: int | None = None) -> int:
  """Returns how many cores can take equal shares of the microbatches.

  Args:
    num_microbatches: microbatches of a minibatch.
    cores: cores to use; None counts those that this process may run on.
  """
  if cores is None:
    affinity = getattr(os, 'sched_getaffinity', None)  # absent on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
  return math.gcd(num_microbatches, cores)


def unit(max_length: int, num_lengths: int) -> int:
  """Returns the unit of an `Updater` with so many lengths.

  Args:
    max_length: tokens of the longest trajectory.
    num_lengths: `updates.core_lengths`; 1 cuts nothing off.
  """
  return math.ceil(max_length / num_lengths) if num_lengths > 1 else 0


class Updater:
  """Updates like `step.update`, on one device and several cores.

  Args:
    spec: static; `num_workers` divides its `num_microbatches`.
    method: one of `policy_loss`.
    optimizers: the optimisers.
    num_workers: programs that run at the same time.
    unit: microbatches are cut off at multiples of so many tokens; 0: never.
    out_shardings: layout of the state.
  """

  def __init__(
    self,
    spec: step_lib.Spec,
    method: step_lib.Method,
    optimizers: state_lib.Optimizers,
    *,
    num_workers: int,
    unit: int,
    out_shardings: Tree,
  ):
    self._spec, self._method = spec, method
    self._optimizers = optimizers
    self._num_workers = num_workers
    self._unit = unit
    self._pool = futures.ThreadPoolExecutor(num_workers, 'update')
    self._compiled = set()
    self._select = jax.jit(_select_rows, static_argnames='length')
    self._cast = jax.jit(functools.partial(step_lib.cast, spec=spec))
    self._outputs = jax.jit(
      functools.partial(policy_loss.outputs_of, spec=spec)
    )
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
    rows: np.ndarray,
    hyperparameters: step_lib.Hyperparameters,
  ) -> tuple[state_lib.TrainState, step_lib.LossOutputs]:
    """Updates on some rows of a batch; see `step.update`.

    Args:
      state, frozen, hyperparameters: see `step.update`.
      batch: the annotated batch.
      rows: int32, the rows of the batch that form the minibatch.
    """
    minibatch, microbatches = self._split(batch, rows)
    params = self._cast(state.with_frozen(frozen))
    inputs, outputs = hyperparameters.loss, None
    if inputs.algorithm.uses_minibatch_statistics:
      outputs = self._map(
        lambda share: [self._outputs(params, m) for m in share],
        microbatches,
        'outputs',
      )
    context = self._context(minibatch, inputs, outputs)
    sums = self._map(
      lambda share: _sum_share(share, lambda m: self._sums(params, m, context)),
      microbatches,
      ('sums', jax.tree.structure(context)),
    )
    return self._apply(state, sums, hyperparameters)

  def _split(self, batch, rows):
    """Returns the minibatch and its microbatches, from short rows to long ones.

    Each microbatch has a leading axis of length 1. The rows of the minibatch
    have the order that `minibatches.join` gives to those of the microbatches.
    """
    lengths = np.asarray(batch.lengths_B)[rows]
    order = np.argsort(lengths, kind='stable')
    rows_nB = np.asarray(rows)[order].reshape(self._spec.num_microbatches, -1)
    longest_n = lengths[order].reshape(rows_nB.shape)[:, -1]
    padded = batch.tokens_BL.shape[1]
    microbatches = [
      self._select(
        batch,
        rows_1B,
        length=microbatch_length(longest, padded, self._unit),
      )
      for rows_1B, longest in zip(rows_nB[:, None], longest_n)
    ]
    minibatch = self._select(batch, rows_nB.T.reshape(-1), length=padded)
    return minibatch, microbatches

  def _map(
    self, function: Callable[[Tree], Tree], microbatches: Tree, kind: Any
  ) -> list[Tree]:
    """Applies a function to every worker's microbatches, on a thread each.

    Which worker gets which microbatch does not depend on time, so equal calls
    give equal bits. With n workers, each gets every n-th microbatch, because
    the first ones are short and the last ones long.

    Calls from one thread would run one after the other. The first call for
    given shapes does run that way, so that a program is compiled once and not
    by all threads at the same time.
    """
    workers = range(self._num_workers)
    shares = [microbatches[n :: self._num_workers] for n in workers]
    shapes = lambda m: tuple(x.shape for x in jax.tree.leaves(m))
    kinds = {(kind, shapes(microbatch)) for microbatch in microbatches}
    if kinds <= self._compiled:
      return list(self._pool.map(function, shares))
    self._compiled |= kinds
    return [function(share) for share in shares]

  def _join_context(self, minibatch, inputs, outputs):
    if outputs is not None:
      length = minibatch.tokens_BL.shape[1]
      pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2])))
      # Undoes the distribution to the workers.
      in_order = [pair for pairs in zip(*outputs) for pair in pairs]
      outputs = _concatenate(jax.tree.map(pad, in_order))
    context = policy_loss.join_context(
      minibatch, inputs, outputs, spec=self._spec
    )
    if self._spec.models.policy.config.num_experts:
      return context
    # The minibatch is read for the load of experts only. Without it, its length
    # does not matter to the program that sums.
    return context._replace(minibatch=None)

  def _join_and_apply(self, state, sums, hyperparameters):
    summands, diagnostics = zip(*sums)
    add = lambda *x: functools.reduce(jnp.add, x)
    gradient, metrics = jax.tree.map(add, *summands)
    gradient, outputs = self._method.finish(
      gradient,
      step_lib.LossOutputs(metrics, _concatenate(sum(diagnostics, []))),
      hyperparameters.loss,
    )
    return step_lib.apply_gradients(
      state, gradient, outputs, hyperparameters, optimizers=self._optimizers
    )


def microbatch_length(longest: int, padded: int, unit: int) -> int:
  """Returns the tokens that a microbatch keeps of each row.

  Args:
    longest: tokens of its longest row without padding.
    padded: tokens of a row of the batch with padding.
    unit: the result is a multiple of it, or `padded`; 0: it is `padded`.
  """
  if not unit:
    return padded
  return min(padded, unit * max(1, math.ceil(longest / unit)))


def _select_rows(batch, rows, *, length):
  return jax.tree.map(lambda x: x[rows], batch.first_tokens(length))


@functools.partial(jax.jit, donate_argnums=0)
def _add(total, summand):
  return jax.tree.map(jnp.add, total, summand)


def _sum_share(share, sum_microbatch):
  """Returns the sums and the diagnostics of one worker's microbatches."""
  total, diagnostics = None, []
  for microbatch in share:
    gradient, outputs = sum_microbatch(microbatch)
    summand = gradient, outputs.metrics
    total = summand if total is None else _add(total, summand)
    diagnostics.append(outputs.diagnostics)
  return total, diagnostics


def _concatenate(trees: Sequence[Tree]) -> Tree:
  return jax.tree.map(lambda *x: jnp.concatenate(x), *trees)
