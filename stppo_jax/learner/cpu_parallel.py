"""An update on a CPU: each core works on microbatches of its own.

A program for a CPU cuts every operation among the cores, and waits for all of
them each time; operations on microbatches that fit a core's cache are over
before that pays. Here each core runs a program of its own, on some of the
microbatches, and they meet where a minibatch has to be known as a whole. What
is summed is that of `step.update`, in another order.

Several devices cut the rows among themselves, and need none of this.
"""

from collections.abc import Callable
from collections.abc import Mapping
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
from stppo_jax.learner import loss
from stppo_jax.learner import microbatches
from stppo_jax.learner import optimizer as optimizer_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import update as update_lib
from stppo_jax.models import functional
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import diagnostics as diagnostics_lib

Tree = Any


def suits(mesh: jax.sharding.Mesh, algorithm: algorithm_lib.Algorithm) -> bool:
  """Whether one CPU is all there is, and microbatches may be any."""
  correction = algorithm.correction
  told = (
    'clipping_bias' in correction.names
    and correction.clipping_bias.scope == 'microbatch'
  )
  one = mesh.size == 1 and mesh.devices.item().platform == 'cpu'
  return one and not told


def workers(num_microbatches: int) -> int:
  """How many programs can share the microbatches alike; 1: there is one."""
  return math.gcd(num_microbatches, _cores())


def _cores() -> int:
  """Those that this process may run on."""
  if hasattr(os, 'sched_getaffinity'):  # not on every system
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


class Updater:
  """Updates as `step.update` does, on one device.

  Args:
    losses: of the models.
    num_microbatches: of a minibatch.
    num_workers: programs at a time; divides the microbatches.
    policy_optimizer, value_optimizer: from `optimizer.build_optimizer`.
    out_shardings: of the state.
  """

  def __init__(
    self,
    losses: loss.Losses,
    *,
    num_microbatches: int,
    num_workers: int,
    policy_optimizer: optimizer_lib.Optimizer,
    value_optimizer: optimizer_lib.Optimizer,
    out_shardings: Tree,
  ):
    self._losses = losses
    self._shares = (num_microbatches, num_workers)
    self._pool = futures.ThreadPoolExecutor(num_workers, 'update')
    self._compiled = set()
    self._looks = {}
    self._take = jax.jit(self._taken)
    self._weights = jax.jit(losses.weights)
    self._scores = jax.jit(losses.scores)
    self._whole = jax.jit(self._known)
    self._sums = jax.jit(losses.sums)
    optimizers = {
      'policy_optimizer': policy_optimizer,
      'value_optimizer': value_optimizer,
    }
    self._apply = jax.jit(
      functools.partial(_applied, **optimizers),
      donate_argnums=0,
      out_shardings=(out_shardings, None, None),
    )

  def update(
    self,
    state: state_lib.TrainState,
    batch: batch_lib.TokenBatch,
    rows: np.ndarray,
    algorithm: algorithm_lib.Algorithm,
    numbers: Mapping[str, Any],
    frozen: functional.Params | None,
  ) -> tuple[
    state_lib.TrainState, dict[str, jax.Array], diagnostics_lib.Diagnostics
  ]:
    """See `step.update`; `rows` are those of the batch to learn from."""
    taken, shares = self._take(batch, rows)
    weights = self._weights(state, frozen)
    scores = None
    if self._looks_first(algorithm, taken):
      scores = self._each(self._scores, (weights,), shares)
    whole = self._whole(algorithm, taken, scores)
    known = (weights, whole, algorithm, numbers)
    sums = self._each(self._sums, known, shares)
    return self._apply(state, sums, algorithm, numbers)

  def _looks_first(self, algorithm, taken) -> bool:
    """See `Losses.looks_first`, traced once for rows of the same options."""
    kind = jax.tree.structure(algorithm)
    if kind not in self._looks:
      self._looks[kind] = self._losses.looks_first(algorithm, taken)
    return self._looks[kind]

  def _each(
    self, program: Callable[..., Tree], known: tuple, shares: Sequence[Tree]
  ) -> list[Tree]:
    """What the program finds of each share, at the same time.

    Programs that one thread calls run one after the other. So they do at the
    first time, when there is something to compile, once for all.
    """
    kind = (program, *(x.shape for x in jax.tree.leaves(shares[0])))
    run = functools.partial(program, *known)
    if kind in self._compiled:
      return list(self._pool.map(run, shares))
    self._compiled.add(kind)
    return [run(share) for share in shares]

  def _taken(self, batch, rows):
    """Rows of the batch, whole and in shares."""
    num_microbatches, num_workers = self._shares
    taken = jax.tree.map(lambda x: x[rows], batch)
    cut = microbatches.cut(taken, num_microbatches)
    size = num_microbatches // num_workers
    share = lambda n: jax.tree.map(lambda x: x[n * size : (n + 1) * size], cut)
    return taken, [share(n) for n in range(num_workers)]

  def _known(self, algorithm, taken, scores):
    if scores is not None:
      scores = _concatenated(scores)
    return self._losses.whole(algorithm, taken, scores, cut=True)


def _applied(state, sums, algorithm, numbers, **optimizers):
  summands, stacked = zip(*sums)
  added = jax.tree.map(lambda *x: functools.reduce(jnp.add, x), *summands)
  found = loss.combined(algorithm, added, _concatenated(stacked))
  state, metrics = update_lib.apply(state, found, numbers, **optimizers)
  return state, metrics, found.diagnostics


def _concatenated(parts: Sequence[Tree]) -> Tree:
  return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
