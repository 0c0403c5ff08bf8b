import functools
import math

import jax
import numpy as np
import pytest

from stppo_jax.configs import algorithms
from stppo_jax.rl import aggregation
from stppo_jax.rl import losses
from stppo_jax.rl import segments
from tests.rl import batches
from tests.rl import loss_twin
from tests.rl import twins

TAU = 1.1  # below the rho of the random batches, so that the scale acts

_BIAS = 'correction__clipping_bias__'
_BY_LENGTH = {'bounds__name': 'by_length'}
# Every algorithm, and every option of every axis that golden_test.py leaves.
CASES = {name: (name, {}) for name in algorithms.ALGORITHMS} | {
  's_ppo': ('s_ppo', {_BIAS + 'tau': TAU}),
  'st_ppo': ('st_ppo', {_BIAS + 'tau': TAU}),
  'so_ppo': ('so_ppo', {_BIAS + 'tau': TAU}),
  'so_grpo': ('so_grpo', {_BIAS + 'tau': TAU, 'kl__coefficient': 0.3}),
  'every_level': (
    'sspo',
    {
      'correction__names': ('clipping_bias', 'tis', 'mis', 'icepop', 'geo_rs'),
      _BIAS + 'tau': TAU,
      _BIAS + 'scope': 'turn',
      _BIAS + 'level': 'turn',
      'correction__tis__level': 'turn',
      'correction__tis__reduce': 'mean',
      'correction__tis__cap': 1.05,
      'correction__mis__level': 'turn',
      'correction__mis__cap': 1.4,
      'correction__icepop__level': 'sequence',
      'correction__icepop__reduce': 'mean',
      'correction__icepop__least': 0.95,
      'correction__geo_rs__level': 'turn',
      'correction__geo_rs__band': 0.2,
      'aggregate__name': 'turn_mean',
    },
  ),
  # Shares and bounds that choose more than one token.
  'clip_cov': (
    'clip_cov',
    {
      'objective__share': 0.2,
      'objective__least': 0.1,
      'bounds__clip_high': 0.5,
    },
  ),
  'kl_cov': ('kl_cov', {'objective__share': 0.2}),
  'vapo': ('vapo', {'objective__least': 0.0}),  # rewards are about 0 there
  'turn_sum': ('turn_ppo', {'ratio__reduce': 'sum', **_BY_LENGTH}),
  'turn_gmpo': ('gmpo', {'ratio__level': 'turn'}),
  'turn_token_gradient': (
    'turn_ppo',
    {'ratio__gradient': 'token', 'bounds__name': 'entropy_scaled'},
  ),
  'bapo': ('bapo', {'bounds__positive_share': 0.55}),  # the bounds move
  'guarded_st_ppo': (
    'st_ppo',
    {'ratio__normalize': 'guard', _BIAS + 'tau': TAU},
  ),
}
# These are slow tests. The first are also compared with the code of others, in
# golden_test.py; the rest combine choices that other cases have.
_SLOW = (
  *('grpo', 'dr_grpo', 'dapo', 'gspo', 'gspo_token', 'cispo', 'reinforce'),
  *('rloo', 'minirl', 'atpo', 'gmpo', 'dppo_tv', 'dppo_kl', 'drpo', 'vespo'),
  *('clip_cov', 'kl_cov', 'sapo_gate', 'a2tgpo'),
  *('mt_grpo', 'gigpo', 'igpo', 'hgpo', 'turn_rloo', 'sampo', 'turn_gmpo'),
  'guarded_st_ppo',
)
# Other numbers of rows are other programs to compile. These have every
# statistic of a minibatch that is made of sums; the rest are slow tests.
_OTHER_ROWS = ('st_ppo', 'sspo', 'grpo_guard', 'dr_grpo')


def _slow_if(is_slow):
  return [pytest.mark.slow] if is_slow else []


EACH = pytest.mark.parametrize(
  'case', [pytest.param(x, marks=_slow_if(x in _SLOW)) for x in CASES]
)
OTHER_ROWS = pytest.mark.parametrize(
  'case',
  [pytest.param(x, marks=_slow_if(x not in _OTHER_ROWS)) for x in CASES],
)
# The forms of the segment sums agree function by function in segments_test.py,
# and the losses in hlo_test.py.
FORMS = pytest.mark.parametrize(
  'implementation',
  [
    pytest.param(form, marks=_slow_if(form != 'segment_sum'))
    for form in segments.IMPLEMENTATIONS
  ],
)
PAIRS = pytest.mark.parametrize(
  ('corrected', 'plain'), [('st_ppo', 'turn_ppo'), ('s_ppo', 'token_ppo')]
)


def _row(case):
  name, changes = CASES[case]
  return batches.algorithm_options(name, **changes)


def _algorithm(case):
  name, changes = CASES[case]
  return batches.loss_algorithm(name, **changes)


@jax.jit
def _weights(aggregate, batch):
  return aggregation.aggregate_weights(
    batch,
    float,
    num_turns=batches.NUM_TURNS,
    name=aggregate.name,
    **aggregate.arguments(),
  )


# By default the form of the segment sums that a CPU uses: the choice by
# platform would be another program to compile for every case.
def _run(algorithm, *arguments, implementation='segment_sum'):
  """Returns the loss and its gradients by log-probabilities and entropy."""
  return jax.device_get(
    batches.loss_and_gradients(implementation, algorithm, *arguments)
  )


@EACH
@FORMS
def test_value_is_the_loop_and_gradient_its_differences(case, implementation):
  batch, logprobs, entropy = batches.make(spread=0.6)
  mask = batch.loss_mask_BL
  row, algorithm = _row(case), _algorithm(case)
  loss, (gradient, entropy_gradient) = _run(
    algorithm, logprobs, entropy, batch, implementation=implementation
  )
  twin = functools.partial(
    loss_twin.policy_loss,
    row,
    entropy=entropy,
    batch=batch,
    entropy_coefficient=batches.ENTROPY,
  )
  expected = twin(logprobs)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-11)
  close(loss.loss, expected.loss)
  close(loss.policy, expected.policy)
  close(np.where(mask, loss.weights_BL, 1), expected.scales)
  close(np.where(mask, loss.low, 0), np.where(mask, expected.low, 0))
  close(np.where(mask, loss.high, 0), np.where(mask, expected.high, 0))
  np.testing.assert_array_equal(loss.cut_BL, expected.cut)
  assert loss.bias == 0
  if row['correction']['names']:
    assert expected.scales.min() < 1

  # A wrong slope of any token changes those of random directions.
  for direction in np.random.default_rng(0).normal(size=(4, *mask.shape)):
    up, down = (
      twin(logprobs + step * direction, frozen=logprobs).loss
      for step in (1e-6, -1e-6)
    )
    np.testing.assert_allclose(
      np.sum(gradient * direction), (up - down) / 2e-6, rtol=2e-6, atol=1e-9
    )
  weights, count = _weights(algorithm.aggregate, batch)
  close(entropy_gradient, -batches.ENTROPY * np.asarray(weights) / count)


@pytest.mark.parametrize('case', ['s_ppo', 'turn_ppo', 'sspo', 'gspo'])
def test_at_the_old_policy(case):
  batch, _, entropy = batches.make()
  mask = batch.loss_mask_BL
  algorithm = _algorithm(case)
  old = batch.old_logprobs_BL
  loss, (gradient, _) = _run(algorithm, old, entropy, batch)
  np.testing.assert_array_equal(loss.ratio_BL, np.ones(mask.shape))
  np.testing.assert_array_equal(loss.weights_BL, np.ones(mask.shape))
  assert not np.any(loss.cut_BL)
  # The denominator of a ratio is a number to the gradient.
  weights, count = _weights(algorithm.aggregate, batch)
  pull = -batch.advantages_BL * np.asarray(weights) / count
  expected = np.zeros(mask.shape)
  for tokens in twins.members(algorithm.ratio.level, batch):
    for token in tokens:
      expected[token] = sum(pull[t] for t in tokens) / len(tokens)
  np.testing.assert_allclose(gradient, expected, rtol=1e-12)


def _same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


# Two programs may round differently, so equal formulas agree to the last bits.
_close = functools.partial(
  jax.tree.map,
  functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-15),
)


def _loss_and_gradient(*arguments):
  loss, gradient = _run(*arguments)
  return loss.loss, gradient


@PAIRS
def test_infinite_tau_or_nothing_clipped_is_no_correction(corrected, plain):
  plain = batches.algorithm(plain)
  for tau, spread in ((math.inf, 0.6), (1e-6, 0.02), (TAU, 0.6)):
    batch, logprobs, entropy = batches.make(spread=spread)
    rest = (logprobs, entropy, batch)
    corrects = batches.algorithm(corrected, **{_BIAS + 'tau': tau})
    actual, expected = (_loss_and_gradient(x, *rest) for x in (corrects, plain))
    if tau == TAU:
      assert abs(actual[0] - expected[0]) > 1e-4
    else:
      _close(actual, expected)


def test_one_token_turns_are_token_ppo_and_one_turn_the_sequence_ratio():
  batch, *rest = batches.make(spread=0.6)
  mask = batch.loss_mask_BL
  number = np.where(mask, np.cumsum(mask, axis=1), 0).astype(np.int32)
  few = np.where(number <= batches.T, number, 0)
  alone = batch.replace(turn_ids_BL=few, loss_mask_BL=few > 0)
  whole = batch.replace(turn_ids_BL=mask.astype(np.int32))
  for level, batch in (('token', alone), ('sequence', whole)):
    other = batches.algorithm(ratio__level=level)
    _close(
      _loss_and_gradient(batches.algorithm('turn_ppo'), *rest, batch),
      _loss_and_gradient(other, *rest, batch),
    )


@EACH
def test_only_policy_tokens_count_in_any_order_of_rows(case):
  batch, logprobs, entropy = batches.make(spread=0.6)
  mask = batch.loss_mask_BL
  run = functools.partial(_run, _algorithm(case))
  whole, gradients = run(logprobs, entropy, batch)
  for array in gradients:
    assert np.all(array[~mask] == 0)
  for value in (np.nan, -np.inf):
    poisoned = (
      batches.poison_array(logprobs, mask, value),
      batches.poison_array(entropy, mask, value),
      batches.poison(batch, value),
    )
    _same(run(*poisoned), (whole, gradients))

  order = [5, 3, 1, 0, 2, 4]
  loss, permuted = run(
    logprobs[order], entropy[order], batches.rows(batch, order)
  )
  expected = whole.loss, [array[order] for array in gradients]
  _close((loss.loss, [*permuted]), expected)

  nothing = batch.replace(loss_mask_BL=np.zeros_like(mask))
  empty, zeros = run(logprobs, entropy, batches.poison(nothing, np.nan))
  assert not any(map(np.any, (empty.loss, *zeros)))


@jax.jit
def _statistics(algorithm, logprobs, entropy, batch):
  return losses.minibatch_statistics(
    algorithm, logprobs, entropy, batch, num_turns=batches.NUM_TURNS
  )


# The statistics are those of the batch without the failed row.
@OTHER_ROWS
def test_losses_of_microbatches_add_up_to_that_of_the_batch(case):
  batch, logprobs, entropy = batches.make(spread=0.6)
  algorithm = _algorithm(case)
  whole, (gradient, _) = _run(algorithm, logprobs, entropy, batch)
  failed = batches.FAILED_ROW
  assert not np.any(gradient[failed])

  def chosen(rows):
    return logprobs[rows], entropy[rows], batches.rows(batch, rows)

  alone = chosen([5, 1, 0, 2, 4])
  statistics = _statistics(algorithm, *alone)
  _, count = _weights(algorithm.aggregate, alone[-1])
  total, gradients = 0.0, np.zeros_like(gradient)
  for rows in ([0, 2, 1], [5, failed, 4]):
    loss, (pulled, _) = _run(algorithm, *chosen(rows), statistics, count)
    total += loss.loss
    gradients[rows] = pulled
  np.testing.assert_allclose(total, whole.loss, rtol=1e-12)
  np.testing.assert_allclose(gradients, gradient, rtol=1e-11, atol=1e-15)


def test_no_gradient_flows_into_advantages_and_the_old_policy():
  batch, logprobs, entropy = batches.make(spread=0.6)
  algorithm = _algorithm('so_grpo')

  def loss(arrays):
    return batches.policy_loss(
      algorithm, logprobs, entropy, batch.replace(**arrays)
    ).loss

  names = ('advantages_BL', 'old_logprobs_BL', 'ref_logprobs_BL')
  gradients = jax.jit(jax.grad(loss))(
    {name: getattr(batch, name) for name in names}
  )
  assert not any(map(np.any, gradients.values()))
