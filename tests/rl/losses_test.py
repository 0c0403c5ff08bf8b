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
_KL_LOSS = {'kl__where': 'loss', 'kl__coefficient': 0.3}
# Every algorithm, and every option of every axis at least once.
CASES = {name: (name, {}) for name in algorithms.ALGORITHMS} | {
  's_ppo': ('s_ppo', {_BIAS + 'tau': TAU}),
  'st_ppo': ('st_ppo', {_BIAS + 'tau': TAU}),
  'so_ppo': ('so_ppo', {_BIAS + 'tau': TAU}),
  'so_grpo': ('so_grpo', {_BIAS + 'tau': TAU}),
  'so_sequence': (
    'st_ppo',
    {
      _BIAS + 'tau': TAU,
      _BIAS + 'scope': 'sequence',
      'aggregate__name': 'sequence_mean',
      'kl__estimator': 'k3',
      **_KL_LOSS,
    },
  ),
  'sequence_sum_k2': (
    'token_ppo',
    {
      'ratio__level': 'sequence',
      'ratio__reduce': 'sum',
      'kl__estimator': 'k2',
      **_KL_LOSS,
    },
  ),
  'dual_clip': (
    'turn_ppo',
    {'objective__name': 'dual_clip', 'objective__c': 1.3},
  ),
  'everything_corrects': (
    'st_ppo',
    {
      'correction__names': ('clipping_bias', 'tis', 'mis', 'icepop', 'geo_rs'),
      _BIAS + 'tau': TAU,
      'correction__tis__cap': 1.1,
      'correction__tis__level': 'sequence',
      'correction__mis__cap': 1.4,
      'correction__icepop__least': 0.8,
      'correction__icepop__most': 1.3,
      'correction__geo_rs__band': 0.1,
    },
  ),
  'mis_sequence': (
    'sspo',
    {
      'correction__names': ('mis',),
      'correction__mis__level': 'sequence',
      'correction__mis__cap': 1.2,
    },
  ),
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
  'turn_sum_k1': (
    'turn_ppo',
    {
      'ratio__reduce': 'sum',
      'bounds__name': 'by_length',
      'kl__estimator': 'k1',
      **_KL_LOSS,
    },
  ),
  'turn_gmpo': ('gmpo', {'ratio__level': 'turn'}),
  'capped': ('dppo_tv', {'objective__cap': 1.3}),
  'turn_gate': ('sapo_gate', {'ratio__level': 'turn'}),
  'turn_token_gradient': (
    'turn_ppo',
    {'ratio__gradient': 'token', 'bounds__name': 'entropy_scaled'},
  ),
  'turn_balanced': (
    'turn_ppo',
    {'bounds__name': 'balanced', 'bounds__positive_share': 0.55},
  ),
  'guarded_st_ppo': (
    'st_ppo',
    {'ratio__normalize': 'guard', _BIAS + 'tau': TAU},
  ),
}
ALL = pytest.mark.parametrize('case', CASES)
# The forms of the segment sums agree function by function in segments_test.py,
# so the forms of accelerators are tried on a case which uses them at every
# level that has sums and in every correction. The rest are slow tests.
_ALL_FORMS = ('every_level',)
# These are also compared with the code of others, in golden_test.py. Their
# loops are slow tests.
_GOLDEN = (
  *('grpo', 'dr_grpo', 'dapo', 'gspo', 'gspo_token', 'cispo', 'reinforce'),
  *('rloo', 'minirl', 'atpo', 'gmpo', 'dppo_tv', 'dppo_kl', 'drpo', 'vespo'),
  *('clip_cov', 'kl_cov', 'dual_clip', 'mis_sequence'),
)
# Other numbers of rows, and gradients by more arrays, are other programs to
# compile. Every level and every correction has a case here; the rest are slow
# tests.
_OTHER_ROWS = (
  *_ALL_FORMS,
  'everything_corrects',
  'so_sequence',
  'guarded_st_ppo',
  'dr_grpo',
)
# The paper's algorithms; another sum of log-ratios, and another denominator.
_FLOAT32 = ('token_ppo', 'turn_ppo', 's_ppo', 'st_ppo', 'sspo', 'dr_grpo')
OTHER_ROWS = pytest.mark.parametrize(
  'case',
  [
    pytest.param(case, marks=() if case in _OTHER_ROWS else pytest.mark.slow)
    for case in CASES
  ],
)
FORMS = pytest.mark.parametrize(
  ('case', 'implementation'),
  [
    pytest.param(
      case,
      form,
      marks=()
      if case in _ALL_FORMS or (form == 'segment_sum' and case not in _GOLDEN)
      else pytest.mark.slow,
    )
    for case in CASES
    for form in segments.IMPLEMENTATIONS
  ],
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

  frozen = lambda x: twin(x, frozen=logprobs).loss
  slots = np.argwhere(mask)
  expected = twins.differences(frozen, logprobs, slots)
  np.testing.assert_allclose(gradient, expected, rtol=2e-6, atol=1e-9)
  weights, count = _weights(algorithm.aggregate, batch)
  np.testing.assert_allclose(
    entropy_gradient,
    -batches.ENTROPY * np.asarray(weights) / count,
    rtol=1e-12,
  )


# The denominator is a number to the ratio, whatever its level: every level and
# every aggregate are in one of these.
_PAIRS = (
  ('token', 'token_mean'),
  ('turn', 'token_mean'),
  ('turn', 'turn_mean'),
  ('sentence', 'sequence_mean'),
  ('sequence', 'sequence_sum'),
  ('sequence', 'constant_length'),
)


@pytest.mark.parametrize(
  ('level', 'aggregate'),
  [
    pytest.param(
      level,
      aggregate,
      marks=() if (level, aggregate) in _PAIRS else pytest.mark.slow,
    )
    for level in segments.LEVELS
    for aggregate in aggregation.AGGREGATES
  ],
)
def test_at_the_old_policy(level, aggregate):
  batch, _, entropy = batches.make()
  mask = batch.loss_mask_BL
  algorithm = batches.algorithm(
    's_ppo', ratio__level=level, aggregate__name=aggregate
  )
  old = batch.old_logprobs_BL
  loss, (gradient, _) = _run(algorithm, old, entropy, batch)
  np.testing.assert_array_equal(loss.ratio_BL, np.ones(mask.shape))
  np.testing.assert_array_equal(loss.weights_BL, np.ones(mask.shape))
  assert not np.any(loss.cut_BL)
  weights, count = _weights(algorithm.aggregate, batch)
  pull = -batch.advantages_BL * np.asarray(weights) / count
  expected = np.zeros(mask.shape)
  for tokens in twins.members(level, batch):
    for b, i in tokens:
      expected[b, i] = sum(pull[token] for token in tokens) / len(tokens)
  np.testing.assert_allclose(gradient, expected, rtol=1e-12)


def _same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


# Two programs may round differently, so equal formulas agree to the last bits.
_close = functools.partial(
  jax.tree.map,
  functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-15),
)


def _loss_and_gradient(ran):
  return ran[0].loss, ran[1]


@pytest.mark.parametrize(
  'corrected,plain', [('st_ppo', 'turn_ppo'), ('s_ppo', 'token_ppo')]
)
def test_infinite_tau_is_no_correction(corrected, plain):
  batch, logprobs, entropy = batches.make(spread=0.6)
  infinite = batches.algorithm(corrected, **{_BIAS + 'tau': math.inf})
  corrects = batches.algorithm(corrected, **{_BIAS + 'tau': TAU})
  plain = batches.algorithm(plain)
  rest = (logprobs, entropy, batch)
  expected = _run(plain, *rest)
  _close(
    _loss_and_gradient(_run(infinite, *rest)), _loss_and_gradient(expected)
  )
  assert abs(_run(corrects, *rest)[0].loss - expected[0].loss) > 1e-4


@pytest.mark.parametrize(
  'corrected,plain', [('st_ppo', 'turn_ppo'), ('s_ppo', 'token_ppo')]
)
def test_nothing_clipped_is_no_correction(corrected, plain):
  batch, logprobs, entropy = batches.make(spread=0.02)
  rest = (logprobs, entropy, batch)
  tiny = batches.algorithm(corrected, **{_BIAS + 'tau': 1e-6})
  _close(
    _loss_and_gradient(_run(tiny, *rest)),
    _loss_and_gradient(_run(batches.algorithm(plain), *rest)),
  )


def test_one_token_turns_are_token_ppo_and_one_turn_the_sequence_ratio():
  batch, logprobs, entropy = batches.make(spread=0.6)
  mask = batch.loss_mask_BL
  number = np.where(mask, np.cumsum(mask, axis=1), 0).astype(np.int32)
  turn, token = batches.algorithm('turn_ppo'), batches.algorithm('token_ppo')
  few = np.where(number <= batches.T, number, 0)
  alone = batch.replace(turn_ids_BL=few, loss_mask_BL=few > 0)
  _close(
    _loss_and_gradient(_run(turn, logprobs, entropy, alone)),
    _loss_and_gradient(_run(token, logprobs, entropy, alone)),
  )
  whole = batch.replace(turn_ids_BL=mask.astype(np.int32))
  sequence = batches.algorithm(ratio__level='sequence')
  _close(
    _loss_and_gradient(_run(turn, logprobs, entropy, whole)),
    _loss_and_gradient(_run(sequence, logprobs, entropy, whole)),
  )


@FORMS
@pytest.mark.parametrize('value', [np.nan, -np.inf])
def test_poison_reaches_neither_value_nor_gradient(case, implementation, value):
  batch, logprobs, entropy = batches.make(spread=0.6)
  mask = batch.loss_mask_BL
  algorithm = _algorithm(case)
  poisoned = (
    batches.poison_array(logprobs, mask, value),
    batches.poison_array(entropy, mask, value),
    batches.poison(batch, value),
  )
  clean = (logprobs, entropy, batch)
  run = functools.partial(_run, algorithm, implementation=implementation)
  loss, gradient = run(*poisoned)
  _same((loss, gradient), run(*clean))
  for array in gradient:
    assert np.all(array[~mask] == 0)


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


@OTHER_ROWS
def test_rows_may_be_permuted(case):
  batch, logprobs, entropy = batches.make(spread=0.6)
  algorithm = _algorithm(case)
  whole, (gradient, _) = _run(algorithm, logprobs, entropy, batch)
  order = [5, 3, 1, 0, 2, 4]
  rest = (logprobs[order], entropy[order], batches.rows(batch, order))
  loss, (permuted, _) = _run(algorithm, *rest)
  _close((loss.loss, permuted), (whole.loss, gradient[order]))


@OTHER_ROWS
def test_an_empty_batch_has_a_zero_loss_and_gradient(case):
  batch, logprobs, entropy = batches.make()
  empty = batches.poison(
    batch.replace(loss_mask_BL=np.zeros_like(batch.loss_mask_BL)), np.nan
  )
  algorithm = _algorithm(case)
  loss, gradient = _run(algorithm, logprobs, entropy, empty)
  assert loss.loss == 0
  for array in gradient:
    assert not np.any(array)


def test_no_gradient_flows_into_advantages_and_the_old_policy():
  batch, logprobs, entropy = batches.make(spread=0.6)
  algorithm = _algorithm('so_sequence')

  def loss(arrays):
    return batches.policy_loss(
      algorithm, logprobs, entropy, batch.replace(**arrays)
    ).loss

  names = ('advantages_BL', 'old_logprobs_BL', 'ref_logprobs_BL')
  gradients = jax.jit(jax.grad(loss))(
    {name: getattr(batch, name) for name in names}
  )
  for array in gradients.values():
    assert not np.any(array)


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(
      name,
      marks=() if name in _FLOAT32 else pytest.mark.slow,
    )
    for name in algorithms.ALGORITHMS
  ],
)
def test_float32_in_float32_out(name):
  batch, logprobs, entropy = batches.make(dtype=np.float32, spread=0.6)
  loss = jax.eval_shape(
    functools.partial(batches.loss_and_gradients, 'segment_sum'),
    _algorithm(name),
    logprobs.astype(np.float32),
    entropy.astype(np.float32),
    batch,
  )
  assert {x.dtype for x in jax.tree.leaves(loss)} == {
    np.dtype(np.float32),
    np.dtype(bool),
  }
