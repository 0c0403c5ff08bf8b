import functools
import math

import jax
import numpy as np

from stppo_jax.rl import diagnostics
from tests.rl import batches
from tests.rl import twins


@jax.jit
def _diagnose(logprobs, entropy, batch):
  algorithm = batches.algorithm(
    'st_ppo',
    correction__names=('clipping_bias', 'icepop'),
    correction__clipping_bias__tau=1.1,
    correction__icepop__least=0.9,
    bounds__clip_low=0.1,
  )
  num_turns = batches.T + 1  # no row reaches the last turn
  with batches.summing('segment_sum'):
    loss = batches.policy_loss(
      algorithm, logprobs, entropy, batch, num_turns=num_turns
    )
    found = diagnostics.policy_diagnostics(
      algorithm, loss, logprobs, entropy, batch, num_turns=num_turns
    )
  return found, loss


def _metrics(*arrays):
  return diagnostics.summarize(_diagnose(*arrays)[0])


def _twin(logprobs, entropy, batch, scales):
  mask, turn_ids = batch.loss_mask_BL, batch.turn_ids_BL
  low, high = 0.9, 1.2
  out = {}
  for level in ('token', 'turn', 'sentence', 'sequence'):
    ratio = twins.ratios(logprobs, batch.old_logprobs_BL, batch, level)
    r = ratio[mask]
    out[f'ratio/{level}/mean'] = r.mean()
    out[f'ratio/{level}/std'] = r.std()
    out[f'ratio/{level}/min'] = r.min()
    out[f'ratio/{level}/max'] = r.max()
    out[f'ratio/{level}/ess'] = r.sum() ** 2 / (r.size * (r**2).sum())
    for turn in range(1, batches.T + 1):
      own = mask & (turn_ids == turn)
      out[f'ratio/{level}/std/turn_{turn}'] = ratio[own].std()
    sides = {'low': ratio < low, 'high': ratio > high}
    for side, outside in sides.items():
      name = f'clipfrac/{level}/{side}'
      out[name] = outside[mask].mean()
      for turn in range(1, batches.T + 1):
        own = mask & (turn_ids == turn)
        out[f'{name}/turn_{turn}'] = outside[own].mean()
    if level == 'turn':
      a = batch.advantages_BL
      cut = (sides['high'] & (a > 0)) | (sides['low'] & (a < 0))
      out['actor/pg_clipfrac'] = cut[mask].mean()
    if level == 'token':
      outside = (sides['low'] | sides['high'])[mask]
      weighted = r * batch.advantages_BL[mask]
      n_u = math.sqrt((weighted[outside] ** 2).mean())
      n_v = math.sqrt((weighted[~outside] ** 2).mean())
      out['stab/norm_clipped'], out['stab/norm_unclipped'] = n_u, n_v
      out['stab/rho'] = n_u / (n_v + 1e-8)
  out['stab/scale'] = scales[mask].mean()
  out['stab/rejected'] = (scales[mask] == 0).mean()
  out['bounds/low'], out['bounds/high'] = low, high
  log_ratio = (logprobs - batch.old_logprobs_BL)[mask]
  out['actor/ppo_kl'] = -log_ratio.mean()
  out['actor/entropy'] = entropy[mask].mean()
  return out


def _assert_metrics(actual, expected, rtol=1e-10):
  assert actual.keys() == expected.keys()
  for name, value in expected.items():
    assert isinstance(actual[name], float), name
    np.testing.assert_allclose(
      actual[name], value, rtol=rtol, atol=1e-14, err_msg=name
    )


def test_metrics_are_the_loop_and_poison_changes_nothing():
  batch, logprobs, entropy = batches.make(spread=0.6)
  mask = batch.loss_mask_BL
  found, loss = _diagnose(logprobs, entropy, batch)
  scales = np.asarray(loss.weights_BL)
  assert scales.min() == 0 and np.any((scales > 0) & (scales < 1))
  metrics = diagnostics.summarize(found)
  _assert_metrics(metrics, _twin(logprobs, entropy, batch, scales))
  poisoned = _metrics(
    batches.poison_array(logprobs, mask, np.nan),
    batches.poison_array(entropy, mask, np.inf),
    batches.poison(batch, np.nan),
  )
  _assert_metrics(poisoned, metrics, rtol=0)


def test_diagnostics_of_microbatches_merge_to_those_of_the_batch():
  batch, logprobs, entropy = batches.make(spread=0.02)  # no scale
  whole, _ = _diagnose(logprobs, entropy, batch)
  row = np.arange(batches.B)[:, None]
  masks = [batch.loss_mask_BL & (row // 2 == i) for i in range(3)]
  parts = [
    _diagnose(logprobs, entropy, batch.replace(loss_mask_BL=mask))[0]
    for mask in masks
  ]
  expected = diagnostics.summarize(whole)
  merged = functools.reduce(jax.jit(diagnostics.merge), parts)
  stacked = jax.tree.map(lambda *x: np.stack(x), *parts)
  for found in (merged, jax.jit(diagnostics.merge_stacked)(stacked)):
    _assert_metrics(diagnostics.summarize(found), expected)


def test_no_tokens_are_zeros():
  batch, logprobs, entropy = batches.make()
  empty = batch.replace(loss_mask_BL=np.zeros_like(batch.loss_mask_BL))
  metrics = _metrics(logprobs, entropy, empty)
  assert set(metrics.values()) == {0.0}
  assert not any('turn_' in name for name in metrics)


def test_small_spreads_survive_float32_and_levels_without_ids_are_left_out():
  batch, logprobs, entropy = batches.make(spread=1e-4)
  precise = _metrics(logprobs, entropy, batch)
  arrays = jax.tree.map(
    lambda x: x.astype(np.float32) if x.dtype == np.float64 else x,
    (logprobs, entropy, batch.replace(sentence_ids_BL=None)),
  )
  single = _metrics(*arrays)
  assert not any('sentence' in name for name in single)
  # The log-ratio itself is rounded to about 1e-7 of 1e-4.
  for name in ('ratio/token/std', 'ratio/turn/std'):
    np.testing.assert_allclose(single[name], precise[name], rtol=1e-2)


def test_critic_diagnostics_by_hand():
  batch, _, _ = batches.make()
  steps = batch.loss_mask_BL & (np.arange(batches.L) % 3 > 0)
  batch = batch.replace(value_mask_BL=steps)
  critic = jax.jit(diagnostics.critic_diagnostics)
  off = {
    name: batches.poison_array(getattr(batch, name), steps, np.nan)
    for name in ('values_BL', 'returns_BL')
  }
  metrics = critic(batch.replace(**off))
  values, returns = batch.values_BL[steps], batch.returns_BL[steps]
  expected = {
    'critic/vf_explained_var': 1 - np.var(returns - values) / np.var(returns)
  }
  for name in ('values', 'returns'):
    x = getattr(batch, f'{name}_BL')[steps]
    expected[f'critic/{name}/mean'] = x.mean()
    expected[f'critic/{name}/min'] = x.min()
    expected[f'critic/{name}/max'] = x.max()
  assert metrics.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-12, err_msg=name)
  found = critic(batch.replace(returns_BL=np.ones(steps.shape)))
  assert float(found['critic/vf_explained_var']) == 0
  none = critic(batch.replace(value_mask_BL=np.zeros_like(steps)))
  assert not any(map(float, none.values()))
