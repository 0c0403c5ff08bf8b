"""Properties of every algorithm, for any layout of turns, masks and numbers.

Shapes are fixed, so that an algorithm compiles once; all else is drawn.
"""

import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from stppo_jax import batch as batch_lib
from stppo_jax.configs import algorithms
from tests.rl import batches

B, L, T = batches.B, batches.L, batches.T
# All levels, bounds, objectives, aggregates and normalisations occur. Each one
# is a program to compile: only a slow test draws the last ones.
_FAST = (
  *('st_ppo', 'so_grpo', 'sspo', 'bapo', 'grpo_guard', 'topr', 'vapo'),
  *('gmpo', 'dppo_kl', 'vespo', 'clip_cov', 'kl_cov'),
)
_ALL = (*_FAST, 'gspo', 'minirl', 'dppo_tv', 'sapo_gate', 'a2tgpo', 'drpo')
# These differ in what they exponentiate. The tests of the others are slow.
_EXPONENTS = ('st_ppo', 'sspo', 'dppo_kl', 'vespo')
_CHANGES = {
  'correction__clipping_bias__tau': 0.5,
  'kl__coefficient': 0.1,
  'bounds__clip_low': 0.1,
}


def _algorithm(name):
  changes = dict(_CHANGES)
  if name in ('bapo', 'dppo_tv', 'dppo_kl'):
    del changes['bounds__clip_low']
  if name in ('clip_cov', 'kl_cov'):
    changes['objective__share'] = 0.2
  if name in ('clip_cov', 'vapo'):
    changes['objective__least'] = 0.1
  return batches.loss_algorithm(name, **changes)


def _run(algorithm, logprobs, entropy, batch):
  """Returns the loss of an algorithm and its gradient."""
  loss, (gradient, _) = jax.device_get(
    batches.loss_and_gradients(
      'segment_sum', algorithm, logprobs, entropy, batch
    )
  )
  return loss, gradient


@st.composite
def _row_layouts(draw):
  """Draws turn ids with gaps, and a loss mask with holes."""
  lengths = draw(st.lists(st.integers(0, 4), min_size=2 * T, max_size=2 * T))
  ids = []
  for turn in range(1, T + 1):
    gap, size = lengths[2 * turn - 2 : 2 * turn]
    ids += [0] * gap + [turn] * size
  ids = (ids + [0] * L)[:L]
  holes = draw(st.lists(st.booleans(), min_size=L, max_size=L))
  return ids, [i > 0 and not hole for i, hole in zip(ids, holes)]


@st.composite
def _cases(draw, spreads=(0.0, 0.05, 0.5, 3.0)):
  """Draws a batch, log-probabilities and entropy."""
  layouts = [draw(_row_layouts()) for _ in range(B)]
  turn_ids = np.array([ids for ids, _ in layouts], np.int32)
  mask = np.array([mask for _, mask in layouts], bool)
  mask[draw(st.integers(0, B - 1))] &= draw(st.booleans())  # a failed row
  rng = np.random.default_rng(draw(st.integers(0, 2**16)))
  spread = draw(st.sampled_from(spreads))
  normal = lambda: rng.normal(size=(B, L))
  old = -np.abs(normal())
  batch = batch_lib.TokenBatch(
    tokens_BL=np.zeros((B, L), np.int32),
    lengths_B=np.full(B, L, np.int32),
    turn_ids_BL=turn_ids,
    loss_mask_BL=mask,
    sampler_logprobs_BL=old + 0.3 * spread * normal(),
    rewards_BL=normal(),
    group_ids_B=np.zeros(B, np.int32),
    sentence_ids_BL=batches.sentences(turn_ids),
    old_logprobs_BL=old,
    ref_logprobs_BL=old + 0.3 * normal(),
    values_BL=normal(),
    advantages_BL=np.where(rng.random((B, L)) < 0.2, 0.0, normal()),
    returns_BL=normal(),
    turn_z_BL=3 * normal(),
  )
  return batch, old + spread * normal(), np.abs(normal())


def _assert_finite(loss, gradient):
  for x in (loss.loss, gradient, loss.ratio_BL, loss.weights_BL):
    assert np.all(np.isfinite(x))


@pytest.mark.parametrize(
  'names', [_FAST, pytest.param(_ALL, marks=pytest.mark.slow)], ids=len
)
@settings(max_examples=60)
@given(case=_cases(), number=st.integers(0, 99))
def test_any_numbers_of_turns_and_gradients_0_off_the_mask(names, case, number):
  batch, logprobs, entropy = case
  name = names[number % len(names)]
  loss, gradient = _run(_algorithm(name), logprobs, entropy, batch)
  _assert_finite(loss, gradient)
  assert not np.any(gradient[~batch.loss_mask_BL])
  assert np.all(loss.ratio_BL[~batch.loss_mask_BL] == 1)
  # Any growing numbers, with gaps: turns of no token.
  ids = np.where(batch.turn_ids_BL > 0, 2 * batch.turn_ids_BL - 1, 0)
  other = batch.replace(turn_ids_BL=ids.astype(np.int32))
  found = _run(_algorithm(name), logprobs, entropy, other)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12),
    found,
    (loss, gradient),
  )


def _losses():
  """Returns the algorithms, one of those whose losses share a program."""
  found = {}
  for name in algorithms.ALGORITHMS:
    loss = batches.loss_algorithm(name)
    found.setdefault(jax.tree.structure(loss), {})[name] = loss
  return found


@pytest.mark.parametrize(
  'losses_of_program',
  [
    pytest.param(
      found,
      marks=() if found.keys() & {*_EXPONENTS} else pytest.mark.slow,
    )
    for found in _losses().values()
  ],
  ids=', '.join,
)
@settings(max_examples=15)
@given(case=_cases(spreads=(0.5, 3.0, 7.0, 20.0)))
def test_float32_does_not_overflow_far_from_the_old_policy(
  losses_of_program, case
):
  batch, logprobs, entropy = jax.tree.map(
    lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, case
  )
  for algorithm in losses_of_program.values():
    loss, gradient = _run(algorithm, logprobs, entropy, batch)
    arrays = jax.tree.leaves((loss, gradient))
    assert {x.dtype for x in arrays} == {np.dtype(np.float32), np.dtype(bool)}
    _assert_finite(loss, gradient)
    assert np.all(loss.ratio_BL <= np.exp(np.float32(20)))
