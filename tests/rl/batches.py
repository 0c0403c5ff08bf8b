"""Random batches with all that occurs: gaps, holes, a failed row."""

import copy
import dataclasses
import functools
from unittest import mock

import jax
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.configs import algorithms
from stppo_jax.configs import defaults
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import loss_context
from stppo_jax.rl import losses
from stppo_jax.rl import segments

B, L, T = 6, 16, 4
NUM_TURNS = 2 * T  # more than a row has, so that numbers may have gaps
ENTROPY = 0.01
FAILED_ROW = 3


def layout(rng):
  """Returns turn ids and loss mask.

  Turns have 1 to 4 tokens, observations 0 to 2.
  """
  turn_ids = np.zeros((B, L), np.int32)
  for b in range(B):
    i = rng.integers(1, 3)
    for turn in range(1, rng.integers(2, T + 1) + 1):
      size = rng.integers(1, 5)
      turn_ids[b, i : i + size] = turn
      i += size + rng.integers(0, 3)
  mask = turn_ids > 0
  mask[FAILED_ROW] = False
  hole = np.flatnonzero(mask[0])[1]  # written, but not to be trained on
  mask[0, hole] = False
  return turn_ids, mask


def sentences(turn_ids):
  """Returns ids of sentences of at most two tokens, counted along the row."""
  ids = np.zeros_like(turn_ids)
  for b, row in enumerate(turn_ids):
    number = size = 0
    for i in np.flatnonzero(row):
      if size == 2 or i == 0 or row[i] != row[i - 1]:
        number, size = number + 1, 0
      ids[b, i] = number
      size += 1
  return ids


def make(seed=0, spread=0.4, dtype=np.float64):
  """Returns a batch, log-probabilities and entropy, finite everywhere."""
  rng = np.random.default_rng(seed)
  turn_ids, mask = layout(rng)
  draw = lambda: rng.normal(size=(B, L)).astype(dtype)
  old = -np.abs(draw())
  # The sampler differs from the trainer, so that a mismatch is visible.
  sampler = old + 0.3 * np.random.default_rng(seed + 1).normal(size=(B, L))
  batch = batch_lib.TokenBatch(
    tokens_BL=rng.integers(0, 9, (B, L)).astype(np.int32),
    lengths_B=np.full(B, L, np.int32),
    turn_ids_BL=turn_ids,
    loss_mask_BL=mask,
    sampler_logprobs_BL=sampler.astype(dtype),
    rewards_BL=draw(),
    group_ids_B=np.arange(B, dtype=np.int32),
    sentence_ids_BL=sentences(turn_ids),
    old_logprobs_BL=old,
    ref_logprobs_BL=old + 0.3 * draw(),
    values_BL=draw(),
    advantages_BL=draw(),
    returns_BL=draw(),
    turn_z_BL=np.random.default_rng(seed + 2).normal(size=(B, L)).astype(dtype),
  )
  logprobs = old + spread * draw()
  return batch, logprobs, np.abs(draw())


def grouped(seed=0, dtype=np.float64):
  """Returns groups of 2, of 3 with a failed row, and of 1; states recur."""
  batch, _, _ = make(seed, dtype=dtype)
  rng = np.random.default_rng(seed)
  groups = np.array([4, 7, 4, 7, 2, 7], np.int32)
  # By row and turn, two states a group: also twice in one row.
  states = 10 * groups[:, None] + rng.integers(1, 3, size=(B, T + 1))
  state_ids = np.take_along_axis(states, batch.turn_ids_BL, axis=1)
  return batch.replace(
    group_ids_B=groups,
    state_ids_BL=np.where(batch.turn_ids_BL > 0, state_ids, 0).astype(np.int32),
  )


def fields(batch):
  """Returns the arrays of a batch by name, without those that are None."""
  arrays = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
  return {name: x for name, x in arrays.items() if x is not None}


def rows(batch, index):
  """Returns the batch of the given rows."""
  return batch_lib.TokenBatch(
    **{name: x[index] for name, x in fields(batch).items()}
  )


FLOATS = (
  'sampler_logprobs_BL',
  'rewards_BL',
  'old_logprobs_BL',
  'ref_logprobs_BL',
  'values_BL',
  'advantages_BL',
  'returns_BL',
  'turn_z_BL',
)


def poison_array(x, mask, value):
  return np.where(mask, x, np.asarray(value, x.dtype))


def poison(batch, value):
  """Returns the batch with a value off the loss mask of every float array."""
  mask = batch.loss_mask_BL
  return batch.replace(
    **{name: poison_array(getattr(batch, name), mask, value) for name in FLOATS}
  )


def algorithm_options(name='token_ppo', **changes):
  """Returns an algorithm of the table, changed at keys like `bounds__c`."""
  options = copy.deepcopy(algorithms.ALGORITHMS[name])
  for key, value in changes.items():
    *path, last = key.split('__')
    section = options
    for step in path:
      section = section[step]
    assert last in section, key
    if last == 'name':  # another choice has other options
      options[path[0]] = defaults.choice(path[0], value)
    else:
      section[last] = value
  return options


def algorithm(name='token_ppo', **changes):
  return algorithm_lib.build_algorithm(algorithm_options(name, **changes))


def loss_algorithm(name, **changes):
  """Returns an algorithm for the loss; of equal losses, the programs are one.

  The estimator made the advantages before; the loss does not read it.
  """
  plain = algorithm('token_ppo').advantage
  return dataclasses.replace(algorithm(name, **changes), advantage=plain)


def context(ratio, advantages, old=0.0, logprobs=0.0):
  """Returns what a part of the loss reads, with one turn per row.

  The ratio is that of every level.
  """
  batch, _, _ = make()
  ones = np.ones(ratio.shape)
  batch = batch.replace(
    loss_mask_BL=ones.astype(bool),
    turn_ids_BL=ones.astype(np.int32),
    old_logprobs_BL=old * ones,
  )
  return loss_context.LossContext(
    lambda level: ratio,
    'token',
    advantages,
    ones,
    logprobs * ones,
    batch,
    num_turns=1,
  )


def summing(implementation):
  """Returns a context in which programs are traced with one form of sums."""
  form = segments.IMPLEMENTATIONS[implementation]
  return mock.patch.object(segments, 'choose', lambda num_segments: form)


def policy_loss(algorithm, logprobs, entropy, batch, **options):
  """Returns `losses.policy_loss`; by default the batch is the minibatch."""
  options = {
    'statistics': None,
    'count': None,
    'entropy_coefficient': 0.0,
    'num_turns': T,
  } | options
  return losses.policy_loss(algorithm, logprobs, entropy, batch, **options)


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradients(
  implementation, algorithm, logprobs, entropy, batch, *statistics_and_count
):
  """Returns the loss and its gradients by log-probabilities and entropy."""
  given = dict(zip(('statistics', 'count'), statistics_and_count))
  # The forms of accelerators are as large as the number of turns.
  num_turns = NUM_TURNS if implementation == 'segment_sum' else T

  def total(x, e):
    loss = policy_loss(
      algorithm,
      x,
      e,
      batch,
      **given,
      entropy_coefficient=ENTROPY,
      num_turns=num_turns,
    )
    return loss.loss, loss

  with summing(implementation):
    gradients, loss = jax.grad(total, argnums=(0, 1), has_aux=True)(
      logprobs, entropy
    )
  return loss, gradients
