"""The policy loss of any algorithm as plain float64 loops.

Detached values are computed at `frozen`, the others at `logprobs`, so that
finite differences of the twin are the intended gradient.
"""

import dataclasses
import math

import numpy as np

from tests.rl import twins


@dataclasses.dataclass
class Loss:
  loss: float
  policy: float
  scales: np.ndarray
  cut: np.ndarray
  low: np.ndarray
  high: np.ndarray


def policy_loss(
  row, logprobs, entropy, batch, entropy_coefficient, frozen=None
):
  frozen = logprobs if frozen is None else frozen
  mask, advantages = batch.loss_mask_BL, batch.advantages_BL
  tokens = twins.policy_tokens(mask)
  options = row['ratio']

  live, still = (_logs(x, batch) for x in (logprobs, frozen))
  unit = np.ones(mask.shape)
  if options['normalize'] == 'guard':
    shift, unit = _guard(still, batch)
    normal = lambda logs: np.clip((logs - shift) * unit, -20, 20)
    live, still = (np.where(mask, normal(x), 0) for x in (live, still))

  def ratio_at(level, logs):
    return np.exp(twins.log_ratios(logs, batch, level, options['reduce']))

  ratio = ratio_at(options['level'], live)
  weight = ratio_at(options['level'], still)
  if options['gradient'] == 'token' and options['level'] != 'token':
    ratio = weight * np.exp(live - still)

  low, high = _bounds(row, weight, entropy, batch)
  scales = 1 / unit
  for name in row['correction']['names']:
    scales = scales * _CORRECTIONS[name](
      row, lambda level: ratio_at(level, still), batch, low, high
    )

  term, divergence = np.zeros(mask.shape), np.zeros(mask.shape)
  cut = np.zeros(mask.shape, bool)
  for t in tokens:
    a, r, w = advantages[t], ratio[t], weight[t]
    harmful = (w > high[t] and a > 0) or (w < low[t] and a < 0)
    clipped = lambda x: min(max(x, low[t]), high[t])
    name = row['objective']['name']
    if name in ('pessimistic', 'dual_clip'):
      term[t] = max(-a * r, -a * clipped(r))
      cut[t] = harmful
      if name == 'dual_clip' and a < 0:
        term[t] = min(term[t], -a * row['objective']['c'])
        cut[t] |= w > row['objective']['c']
    else:
      weights = {
        'detached': clipped(w),
        'masked': 0.0 if harmful else w,
        'unclipped': w,
      }
      term[t] = -weights[name] * a * logprobs[t]
      cut[t] = name == 'masked' and harmful
    if row['kl']['where'] == 'loss':
      x = logprobs[t] - batch.ref_logprobs_BL[t]
      divergence[t] = {
        'k1': x,
        'k2': x * x / 2,
        'k3': math.exp(-x) - 1 + x,
        'k3_clamped': min(math.exp(-x) - 1 + x, 10),
      }[row['kl']['estimator']]

  mean = lambda x: twins.aggregate(x, batch, **row['aggregate'])
  policy = mean(scales * term)
  other = row['kl']['coefficient'] * mean(divergence)
  loss = policy + other - entropy_coefficient * mean(entropy)
  return Loss(loss, policy, np.where(mask, scales, 1), cut, low, high)


def _logs(logprobs, batch):
  out = np.zeros(batch.loss_mask_BL.shape)
  for t in twins.policy_tokens(batch.loss_mask_BL):
    out[t] = twins.clipped_log(logprobs[t] - batch.old_logprobs_BL[t])
  return out


def _guard(logs, batch):
  """Returns the shift and the scale of every token's turn."""
  turns = twins.members('turn', batch)
  spreads, shifts = [], []
  for tokens in turns:
    values = [logs[t] for t in tokens]
    mean = sum(values) / len(values)
    spreads.append(
      math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    )
    shifts.append(mean)
  varied = [spread for spread in spreads if spread > 1e-6]
  target = sum(varied) / len(varied) if varied else 0.0
  shift, scale = np.zeros(logs.shape), np.ones(logs.shape)
  for tokens, spread, b in zip(turns, spreads, shifts, strict=True):
    for t in tokens:
      shift[t] = b
      if spread > 1e-6:
        scale[t] = min(max(target / spread, 0.1), 10.0)
  return shift, scale


def _bounds(row, ratio, entropy, batch):
  options = row['bounds']
  full = lambda x: np.full(batch.loss_mask_BL.shape, x)
  if options['name'] == 'fixed':
    return full(1 - options['clip_low']), full(1 + options['clip_high'])
  if options['name'] == 'balanced':
    return tuple(full(x) for x in _balanced(options, ratio, batch))
  segments = twins.members(row['ratio']['level'], batch)
  means = [sum(entropy[t] for t in s) / len(s) for s in segments]
  mean = sum(means) / len(means)
  low, high = full(1.0), full(1.0)
  for tokens, own in zip(segments, means, strict=True):
    f = min(max(own / mean, options['least']), options['most'])
    for t in tokens:
      low[t] = 1 - f * options['clip_low']
      high[t] = 1 + f * options['clip_high']
  return low, high


def _balanced(options, ratio, batch):
  low, high = options['low'], options['high']
  while True:
    positive = total = 0.0
    for t in twins.policy_tokens(batch.loss_mask_BL):
      a, r = batch.advantages_BL[t], ratio[t]
      term = min(r * a, min(max(r, low), high) * a)
      weight = math.exp(batch.old_logprobs_BL[t])
      positive += weight * term if a > 0 else 0.0
      total += weight * abs(term)
    if positive >= options['positive_share'] * total:
      return low, high
    if high < options['high_limit']:
      high = min(high + options['high_step'], options['high_limit'])
    elif low < options['low_limit']:
      low = min(low + options['low_step'], options['low_limit'])
    else:
      return low, high


def _clipping_bias(row, ratio_at, batch, low, high):
  options = row['correction']['clipping_bias']
  if options['norm'] == 'gradient':
    return np.ones(batch.loss_mask_BL.shape)
  return twins.bias_scales(
    ratio_at(options['level']),
    batch.advantages_BL,
    batch,
    scope=options['scope'],
    tau=options['tau'],
    low=low,
    high=high,
  )


def _log_k(batch, level, reduce='sum'):
  logs = np.zeros(batch.loss_mask_BL.shape)
  for t in twins.policy_tokens(batch.loss_mask_BL):
    logs[t] = twins.clipped_log(
      batch.old_logprobs_BL[t] - batch.sampler_logprobs_BL[t]
    )
  return twins.log_ratios(logs, batch, level, reduce)


def _tis(row, ratio_at, batch, low, high):
  options = row['correction']['tis']
  k = np.exp(_log_k(batch, options['level']))
  if options['truncated'] == 'mismatch':
    return np.minimum(k, options['cap'])
  ratio = ratio_at(row['ratio']['level'])
  return np.minimum(k * ratio, options['cap']) / ratio


def _mis(row, ratio_at, batch, low, high):
  options = row['correction']['mis']
  k = np.exp(_log_k(batch, options['level']))
  return np.where(k > options['cap'], 0, k)


def _icepop(row, ratio_at, batch, low, high):
  options = row['correction']['icepop']
  k = np.exp(_log_k(batch, 'token'))
  return np.where((k < options['least']) | (k > options['most']), 0, k)


def _geo_rs(row, ratio_at, batch, low, high):
  mean = _log_k(batch, 'sequence', 'mean')
  return np.where(np.abs(mean) > row['correction']['geo_rs']['band'], 0.0, 1.0)


_CORRECTIONS = {
  'clipping_bias': _clipping_bias,
  'tis': _tis,
  'mis': _mis,
  'icepop': _icepop,
  'geo_rs': _geo_rs,
}
