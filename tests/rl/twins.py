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


def members(level, batch):
  """Returns the lists of tokens [(b, i), ...] of all segments of a level."""
  name = {
    'token': lambda b, i: (b, i),
    'turn': lambda b, i: (b, batch.turn_ids_BL[b, i]),
    'sentence': lambda b, i: (b, batch.sentence_ids_BL[b, i]),
    'sequence': lambda b, i: b,
  }[level]
  groups = {}
  for b, i in policy_tokens(batch.loss_mask_BL):
    groups.setdefault(name(b, i), []).append((b, i))
  return list(groups.values())


def clipped_log(x):
  return min(max(x, -20.0), 20.0)


def log_ratios(logs, batch, level, reduce='mean'):
  """Returns token log-ratios, reduced over the segments of a level."""
  out = np.zeros(batch.loss_mask_BL.shape)
  for tokens in members(level, batch):
    total = sum(logs[token] for token in tokens)
    for token in tokens:
      out[token] = (
        total / len(tokens) if reduce == 'mean' else clipped_log(total)
      )
  return out


def ratios(logprobs, old, batch, level, reduce='mean'):
  logs = np.zeros(batch.loss_mask_BL.shape)
  for token in policy_tokens(batch.loss_mask_BL):
    logs[token] = clipped_log(logprobs[token] - old[token])
  return np.exp(log_ratios(logs, batch, level, reduce))


def aggregate(x, batch, name, max_response_tokens=None):
  """Returns an aggregate: a mean over tokens or over segments, or a sum."""
  if name in ('sequence_sum', 'constant_length'):
    rows = members('sequence', batch)
    total = sum(x[token] for tokens in rows for token in tokens)
    return total / len(rows) / (max_response_tokens or 1)
  means = [
    sum(x[token] for token in tokens) / len(tokens)
    for tokens in members(name.removesuffix('_mean'), batch)
  ]
  return sum(means) / len(means)


def bias_scale(weighted, outside, tokens, tau, kept_empty):
  """Returns s over a set of tokens, from w A and whether w is in the band."""
  rms = lambda values: math.sqrt(sum(v * v for v in values) / len(values))
  clipped = [weighted[b, i] for b, i in tokens if outside[b, i]]
  kept = [weighted[b, i] for b, i in tokens if not outside[b, i]]
  if not clipped:
    return 1.0
  rho = rms(clipped) / ((rms(kept) if kept else kept_empty) + 1e-8)
  return 1 / rho if rho > tau else 1.0


def bias_scales(ratio, advantages, batch, *, scope, tau, low, high):
  mask = batch.loss_mask_BL
  level = {'minibatch': None, 'microbatch': None}.get(scope, scope)
  groups = members(level, batch) if level else [policy_tokens(mask)]
  outside = (ratio < low) | (ratio > high)
  out = np.ones(mask.shape)
  for tokens in groups:
    empty = 1.0 if level else 0.0
    scale = bias_scale(ratio * advantages, outside, tokens, tau, empty)
    for b, i in tokens:
      out[b, i] = scale
  return out


def gae(rewards, values, gamma, lambda_):
  """Returns GAE of one row, whose lists contain its steps only."""
  out, advantage, following = [], 0.0, 0.0
  for reward, value in zip(rewards[::-1], values[::-1], strict=True):
    advantage = reward + gamma * following - value + gamma * lambda_ * advantage
    following = value
    out.append(advantage)
  return out[::-1]


def differences(function, x, slots, epsilon=1e-6):
  """Returns central differences of a scalar function at some indices of x."""
  out = np.zeros(x.shape)
  for slot in slots:
    up, down = x.copy(), x.copy()
    up[tuple(slot)] += epsilon
    down[tuple(slot)] -= epsilon
    out[tuple(slot)] = (function(up) - function(down)) / (2 * epsilon)
  return out
