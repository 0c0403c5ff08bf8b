"""Slow, readable float64 references: plain loops over rows and tokens."""

import math

import numpy as np


def policy_tokens(mask):
  return [(b, i) for b, i in np.argwhere(mask)]


def moments(x, mask):
  values = [x[b, i] for b, i in policy_tokens(mask)]
  mean = sum(values) / len(values)
  return mean, sum((v - mean) ** 2 for v in values) / (len(values) - 1)


def whiten(x, mask):
  mean, variance = moments(x, mask)
  out = np.zeros(x.shape)
  for b, i in policy_tokens(mask):
    out[b, i] = (x[b, i] - mean) / math.sqrt(variance + 1e-8)
  return out


def members(level, turn_ids, mask):
  """The lists of tokens [(b, i), ...] of all segments of a level."""
  name = {
    'token': lambda b, i: (b, i),
    'turn': lambda b, i: (b, turn_ids[b, i]),
    'sequence': lambda b, i: b,
  }[level]
  groups = {}
  for b, i in policy_tokens(mask):
    groups.setdefault(name(b, i), []).append((b, i))
  return list(groups.values())


def ratios(logprobs, old, turn_ids, mask, level, reduce='mean'):
  out = np.ones(mask.shape)
  for tokens in members(level, turn_ids, mask):
    logs = [
      min(max(logprobs[b, i] - old[b, i], -20.0), 20.0) for b, i in tokens
    ]
    total = sum(logs) / (len(logs) if reduce == 'mean' else 1)
    for b, i in tokens:
      out[b, i] = math.exp(min(max(total, -20.0), 20.0))
  return out


def aggregate(x, turn_ids, mask, name):
  """The mean over tokens, or over segments of the segment's mean."""
  level = name.removesuffix('_mean')
  means = [
    sum(x[b, i] for b, i in tokens) / len(tokens)
    for tokens in members(level, turn_ids, mask)
  ]
  return sum(means) / len(means)


def bias_scale(weighted, outside, tokens, tau, kept_empty):
  """s over a set of tokens, from w A and the test of the band."""
  rms = lambda values: math.sqrt(sum(v * v for v in values) / len(values))
  clipped = [weighted[b, i] for b, i in tokens if outside[b, i]]
  kept = [weighted[b, i] for b, i in tokens if not outside[b, i]]
  if not clipped:
    return 1.0
  rho = rms(clipped) / ((rms(kept) if kept else kept_empty) + 1e-8)
  return 1 / rho if rho > tau else 1.0


def bias_scales(ratio, advantages, turn_ids, mask, *, scope, tau, low, high):
  level = {'minibatch': None, 'microbatch': None}.get(scope, scope)
  groups = members(level, turn_ids, mask) if level else [policy_tokens(mask)]
  outside = (ratio < low) | (ratio > high)
  out = np.ones(mask.shape)
  for tokens in groups:
    empty = 1.0 if level else 0.0
    scale = bias_scale(ratio * advantages, outside, tokens, tau, empty)
    for b, i in tokens:
      out[b, i] = scale
  return out


def gae(rewards, values, gamma, lambda_):
  """Of one row's lists, with nothing but steps in them."""
  out, advantage, following = [], 0.0, 0.0
  for reward, value in zip(rewards[::-1], values[::-1], strict=True):
    advantage = reward + gamma * following - value + gamma * lambda_ * advantage
    following = value
    out.append(advantage)
  return out[::-1]


def policy_loss(
  row, logprobs, entropy, batch, entropy_coefficient, scales=None
):
  """(loss, policy term, scales [B, L]); `scales` freezes the correction."""
  mask, turn_ids = batch.loss_mask_BL, batch.turn_ids_BL
  advantages, old = batch.advantages_BL, batch.old_logprobs_BL
  low = 1 - row['bounds']['clip_low']
  high = 1 + row['bounds']['clip_high']

  def ratio_at(level):
    return ratios(logprobs, old, turn_ids, mask, level, row['ratio']['reduce'])

  options = row['correction']['clipping_bias']
  if scales is None:
    scales = np.ones(mask.shape)
    selected = 'clipping_bias' in row['correction']['names']
    if selected and options['norm'] == 'coefficient':
      scales = bias_scales(
        ratio_at(options['level']),
        advantages,
        turn_ids,
        mask,
        scope=options['scope'],
        tau=options['tau'],
        low=low,
        high=high,
      )
  ratio = ratio_at(row['ratio']['level'])
  term, divergence = np.zeros(mask.shape), np.zeros(mask.shape)
  for b, i in policy_tokens(mask):
    clipped = min(max(ratio[b, i], low), high)
    a = advantages[b, i]
    term[b, i] = scales[b, i] * max(-a * ratio[b, i], -a * clipped)
    if row['kl']['where'] == 'loss':
      x = logprobs[b, i] - batch.ref_logprobs_BL[b, i]
      divergence[b, i] = {
        'k1': x,
        'k2': x * x / 2,
        'k3': math.exp(-x) - 1 + x,
      }[row['kl']['estimator']]
  mean = lambda x: aggregate(x, turn_ids, mask, row['aggregate']['name'])
  policy = mean(term)
  other = row['kl']['coefficient'] * mean(divergence)
  return policy + other - entropy_coefficient * mean(entropy), policy, scales


def differences(function, x, slots, epsilon=1e-6):
  """Central differences of a scalar function at the given slots of x."""
  out = np.zeros(x.shape)
  for slot in slots:
    up, down = x.copy(), x.copy()
    up[tuple(slot)] += epsilon
    down[tuple(slot)] -= epsilon
    out[tuple(slot)] = (function(up) - function(down)) / (2 * epsilon)
  return out
