"""The policy loss of any algorithm as plain float64 loops.

Detached values are computed at `frozen`, the others at `logprobs`, so that
finite differences of the twin are the intended gradient.
"""

import dataclasses
import math

import jax
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
  token_live, token_still = live, still
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

  name, choice = row['objective']['name'], row['objective']
  if name == 'geometric':
    trusted, far = _trusted(token_live, token_still, advantages, low, high)
    means = np.exp(twins.log_ratios(trusted, batch, options['level']))
  chosen = _chosen(choice, frozen, weight, low, high, batch)
  correct = _correct(choice, batch)

  term, divergence = np.zeros(mask.shape), np.zeros(mask.shape)
  cut = np.zeros(mask.shape, bool)
  for t in tokens:
    a, r, w = advantages[t], ratio[t], weight[t]
    harmful = (w > high[t] and a > 0) or (w < low[t] and a < 0)
    clipped = lambda x: min(max(x, low[t]), high[t])
    if name in _PESSIMISTIC:
      term[t] = max(-a * r, -a * clipped(r))
      cut[t] = harmful
      if name == 'dual_clip' and a < 0:
        term[t] = min(term[t], -a * choice['c'])
        cut[t] |= w > choice['c']
      if name == 'clip_cov' and t in chosen:
        term[t], cut[t] = 0.0, True
      if t in correct:
        share = len(tokens) / len(correct)
        term[t] -= choice['coefficient'] * share * logprobs[t]
    elif name == 'kl_cov':
      penalty = choice['coefficient'] * abs(math.log(r))
      term[t] = -a * r + (penalty if t in chosen else 0.0)
    elif name == 'geometric':
      term[t], cut[t] = -a * means[t], far[t]
    elif name == 'soft_gate':
      tau = choice['tau_positive' if a > 0 else 'tau_negative']
      term[t] = -a * 4 / tau / (1 + math.exp(-tau * (r - 1)))
    elif name == 'quadratic':
      old = math.exp(batch.old_logprobs_BL[t])
      penalty = abs(a) * old * (r - 1) ** 2 / (2 * choice['threshold'])
      term[t] = penalty - a * r
    else:
      weights = {
        'detached': clipped(w),
        'masked': 0.0 if harmful else min(w, choice.get('cap', w)),
        'unclipped': w,
        'tapered': 1.0 if a > 0 else clipped(w),
        'gamma_weighted': _gamma(w, a, choice),
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


_PESSIMISTIC = ('pessimistic', 'dual_clip', 'clip_cov', 'positive_examples')


def _logs(logprobs, batch):
  out = np.zeros(batch.loss_mask_BL.shape)
  for t in twins.policy_tokens(batch.loss_mask_BL):
    out[t] = twins.clipped_log(logprobs[t] - batch.old_logprobs_BL[t])
  return out


def _trusted(live, still, advantages, low, high):
  """Returns the logs of token ratios, clipped, and where they are clipped."""
  out, far = np.array(live), np.zeros(live.shape, bool)
  for t in np.ndindex(live.shape):
    w, a = math.exp(still[t]), advantages[t]
    if w > high[t] and a > 0:
      out[t], far[t] = math.log(high[t]), True
    if w < low[t] and a < 0:
      out[t], far[t] = math.log(low[t]), True
  return out, far


def _gamma(w, a, choice):
  if choice['name'] != 'gamma_weighted':
    return None
  side = 'positive' if a >= 0 else 'negative'
  decay = choice[f'decay_{side}']
  return w ** choice[f'power_{side}'] * math.exp(decay * (1 - w))


def _chosen(choice, logprobs, ratio, low, high, batch):
  """Returns the set of tokens that are chosen by their covariance."""
  tokens = twins.policy_tokens(batch.loss_mask_BL)
  if choice['name'] not in ('clip_cov', 'kl_cov'):
    return set()
  advantages = batch.advantages_BL
  mean = lambda x: sum(x[t] for t in tokens) / len(tokens)
  middle, center = mean(advantages), mean(logprobs)
  ranked = []
  for t in tokens:
    covariance = (advantages[t] - middle) * (logprobs[t] - center)
    if choice['name'] == 'kl_cov':
      ranked.append((covariance, t))
    elif choice['least'] < covariance < choice['most'] and not (
      (ratio[t] > high[t] and advantages[t] > 0)
      or (ratio[t] < low[t] and advantages[t] < 0)
    ):
      key = jax.random.key(0, impl='threefry2x32')
      for x in (batch.old_logprobs_BL[t], advantages[t]):
        key = jax.random.fold_in(key, np.float32(x).view(np.uint32))
      ranked.append((float(jax.random.uniform(key, dtype=float)), t))
  count = max(int(len(tokens) * choice['share']), 1)
  return {t for _, t in sorted(ranked)[::-1][:count]}


def _correct(choice, batch):
  """Returns the set of tokens of trajectories that are imitated."""
  if choice['name'] != 'positive_examples':
    return set()
  rows = twins.members('sequence', batch)
  least = choice['least']
  return {t for row in rows if batch.rewards_BL[row[-1]] >= least for t in row}


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
  if options['name'] == 'by_reward':
    sigmoid = 1 / (1 + np.exp(-batch.turn_z_BL))
    f = 1 + options['strength'] * (2 * sigmoid - 1)
    return 1 - f * options['clip_low'], 1 + f * options['clip_high']
  if options['name'] == 'balanced':
    return tuple(full(x) for x in _balanced(options, ratio, batch))
  segments = twins.members(row['ratio']['level'], batch)
  means = [sum(entropy[t] for t in s) / len(s) for s in segments]
  mean = sum(means) / len(means)
  low, high = full(1.0), full(1.0)
  for tokens, own in zip(segments, means, strict=True):
    for t in tokens:
      if options['name'] in _TOKEN_BOUNDS:
        of_token = _TOKEN_BOUNDS[options['name']]
        low[t], high[t] = of_token(options, batch.old_logprobs_BL[t])
        continue
      if options['name'] == 'by_length':
        f = len(tokens) ** -options['exponent']
      else:
        f = min(max(own / mean, options['least']), options['most'])
      low[t] = 1 - f * options['clip_low']
      high[t] = 1 + f * options['clip_high']
  return low, high


def _total_variation(options, old):
  p = math.exp(old)
  return (p - options['fall']) / p, (p + options['rise']) / p


def _binary_kl(options, old):
  p = math.exp(old)

  def divergence(log):
    q = p * math.exp(log)
    rest = math.log((1 - p + 1e-8) / (1 - q + 1e-8))
    return p * -log + (1 - p) * rest

  def furthest(limit, far):
    if divergence(far) <= limit:
      return math.exp(far)
    near = 0.0
    for _ in range(200):
      middle = (near + far) / 2
      if divergence(middle) <= limit:
        near = middle
      else:
        far = middle
    return math.exp(near)

  return furthest(options['fall'], -20.0), furthest(options['rise'], -old)


_TOKEN_BOUNDS = {
  'total_variation': _total_variation,
  'binary_kl': _binary_kl,
}


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


def _k(batch, options):
  logs = np.zeros(batch.loss_mask_BL.shape)
  for t in twins.policy_tokens(batch.loss_mask_BL):
    logs[t] = twins.clipped_log(
      batch.old_logprobs_BL[t] - batch.sampler_logprobs_BL[t]
    )
  return np.exp(
    twins.log_ratios(logs, batch, options['level'], options['reduce'])
  )


def _tis(row, ratio_at, batch, low, high):
  options = row['correction']['tis']
  k = _k(batch, options)
  if options['truncated'] == 'mismatch':
    return np.minimum(k, options['cap'])
  ratio = ratio_at(row['ratio']['level'])
  return np.minimum(k * ratio, options['cap']) / ratio


def _by_k(name, factor):
  """Returns a correction whose factor depends on k and the options alone."""

  def correction(row, ratio_at, batch, low, high):
    options = row['correction'][name]
    return factor(_k(batch, options), options)

  return correction


_CORRECTIONS = {
  'clipping_bias': _clipping_bias,
  'tis': _tis,
  'mis': _by_k('mis', lambda k, x: np.where(k > x['cap'], 0, k)),
  'icepop': _by_k(
    'icepop', lambda k, x: np.where((k < x['least']) | (k > x['most']), 0, k)
  ),
  'geo_rs': _by_k(
    'geo_rs', lambda k, x: np.where(np.abs(np.log(k)) > x['band'], 0.0, 1.0)
  ),
}
