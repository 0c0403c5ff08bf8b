"""Descriptions of the corrections and of their options."""

from docs.texts import entry

_SORL = 'arXiv 2511.20718.'
_K = 'k = pi_old (trainer) / mu (sampler)'

_NAMES = {
  'clipping_bias': entry.Description(
    """
    U, V = policy tokens whose ratio w is outside, inside the bounds (the sign
           of A is ignored);  N_U, N_V = rms of w A over U, over V
    norm=coefficient: term * s,  s = 1 / rho if rho > tau else 1,
                      rho = N_U / (N_V + 1e-8)
    norm=gradient:    g_policy / max(|c|, floor),
                      c = gradient of the aggregate of w A log pi over U

    Where U is empty, s = 1. Where V is empty, N_V is 0 for the scopes minibatch
    and microbatch, and 1 for sequence and turn.
    """,
    _SORL,
    entry.CODE,
    'There are several updates per collection, and clipped tokens outweigh '
    'the others. The metric `stab/rho` shows rho for every algorithm.',
  ),
  'tis': entry.Description(
    f'term * min(k, cap)\n{_K}',
    'Truncated importance sampling for engines that differ (Yao et al., 2025).',
    entry.CODE,
    'The sampler is another engine or has another precision. The bias is '
    'small, and every term is kept.',
    'verl: `rollout_is=token`. TRL: '
    "`vllm_importance_sampling_mode='token_truncate'`. slime: `--use-tis`, "
    '`--tis-clip`.',
  ),
  'mis': entry.Description(
    f'term * (k if k <= cap else 0)\n{_K}',
    'Masked importance sampling (Liu et al., 2025).',
    entry.CODE,
    'Like `tis`, when tokens beyond the cap should not be trusted at all.',
    "TRL: `vllm_importance_sampling_mode='token_mask'`.",
  ),
  'icepop': entry.Description(
    f'term * (k if least <= k <= most else 0)\n{_K}',
    'Ring-1T, arXiv 2510.18855.',
    entry.CODE,
    'The model has experts, and sampler and trainer route tokens differently. '
    'It is like `mis`, with a lower limit too.',
    'verl: a threshold of two numbers, `rollout_is_threshold=0.5_5.0`.',
  ),
  'geo_rs': entry.Description(
    f'term * (1 if |log k| <= band else 0)\n{_K}',
    'Rejection by the geometric mean; documentation of verl.',
    entry.CODE,
    'Sampler and trainer differ a little at every token of some trajectories. '
    'The default band is narrow: the metric `stab/rejected` shows the share of '
    'policy tokens that is rejected. By default, log k is the mean over the '
    'trajectory.',
    'verl: `rollout_rs=seq_mean_k1`.',
  ),
}

_BIAS = {
  'norm': {
    'coefficient': entry.Description(
      's = 1 / rho if rho > tau else 1',
      _SORL,
      entry.CODE,
      'The default, which the reference implementation has.',
    ),
    'gradient': entry.Description(
      'g_policy <- g_policy / max(|c|, floor)',
      _SORL,
      entry.REVIEWS + ' The floor is our choice: without it a small |c| would '
      'enlarge steps.',
      "You want the form that the paper's reviews describe. It costs a second "
      'backward pass; tau and scope do not apply.',
    ),
  },
  'scope': {
    'minibatch': entry.Description(
      'rho over all policy tokens of one optimiser step, on all devices',
      _SORL,
      entry.OURS + ' Cutting the batch does not change it.',
      'The default.',
    ),
    'microbatch': entry.Description(
      'rho over one microbatch, on all devices',
      _SORL,
      entry.CODE + ' The microbatch of the reference implementation is that of '
      'one GPU.',
      'You want what is nearest to the reference implementation. The result '
      'depends on `updates.microbatch_size` and `updates.row_length`.',
    ),
    'sequence': entry.Description(
      'rho over each trajectory, N_V = 1 where nothing is inside',
      _SORL + ' Version 2, SO-GRPO.',
      entry.CODE,
      'Only trajectories with much clipping should be scaled.',
    ),
    'turn': entry.Description(
      'rho over each turn, N_V = 1 where nothing is inside',
      _SORL,
      entry.OURS
      + ' The reference implementation has a form of it with tau = 5, N_V = 0 '
      'where nothing is inside, and one s for the batch, the mean over its '
      'turns. There, a batch of short clipped turns has almost no gradient.',
      'Only turns with much clipping should be scaled.',
    ),
  },
  'level': {
    'token': entry.Description(
      'w = exp(l) of the token, at any level of the loss',
      _SORL,
      entry.CODE,
      'The default. The reference implementation takes token ratios here even '
      'where the loss has turn ratios.',
    ),
    'turn': entry.Description(
      "w = the turn's ratio, which all of its tokens share",
      _SORL,
      entry.OURS,
      'Clipping and the correction should use the same ratio.',
    ),
  },
  'applies_to': {
    'policy': entry.Description(
      'policy terms are scaled; entropy and KL are not',
      _SORL,
      entry.CODE,
      'The default, which the reference implementation has.',
    ),
    'value': entry.Description(
      'value terms are scaled by the same s',
      _SORL,
      entry.OURS,
      'The value model, too, should change less on such minibatches.',
    ),
  },
}

_LEVELS = {
  'token': entry.Description(
    f'{_K} of the token',
    '—',
    entry.CODE,
    'The variance should be low.',
    'verl: `rollout_is=token`.',
  ),
  'turn': entry.Description(
    f'{_K}, one for the policy tokens of a turn',
    '—',
    entry.OURS,
    'A turn is one action of the policy: all of its tokens are believed alike.',
  ),
  'sequence': entry.Description(
    f'{_K}, one for the policy tokens of a trajectory',
    '—',
    entry.CODE,
    'The reward is that of the trajectory.',
    'verl: `rollout_is=sequence`. TRL: '
    "`vllm_importance_sampling_mode='sequence_...'`.",
  ),
}

_REDUCES = {
  'mean': entry.Description(
    'log k = mean over the tokens of the level: their geometric mean',
    'The rejection of verl; as a weight it is our choice.',
    entry.CODE,
    'Trajectories are long. A small difference at every token, in the same '
    'direction, makes a product vanish, and with it the update: over 2,000 '
    'tokens of log k = -0.001 the product is 0.14 and the mean 0.999. In a run '
    'of NeMo-RL with 40 to 60 turns, products had a mean of 0.06 (its pull '
    'request 2269).',
    'verl: `rollout_rs=seq_mean_k1`.',
  ),
  'sum': entry.Description(
    'log k = clip(sum over the tokens of the level, -20, 20): their product',
    'It is the probability ratio of the tokens together.',
    entry.CODE,
    'The weight should be unbiased. For long trajectories it is near 0 or '
    'above any cap: see the metrics `mismatch/sequence/sum/*`.',
    'verl: `rollout_is=sequence`.',
  ),
}

_TRUNCATED = {
  'mismatch': entry.Description(
    'term * min(k, cap)',
    '—',
    entry.CODE,
    'The objective itself bounds the ratio.',
  ),
  'product': entry.Description(
    'term * min(k r, cap) / r: mismatch and staleness are truncated together',
    'MiniRL, arXiv 2512.01374.',
    entry.PAPER,
    'The objective multiplies by r: `masked` or `unclipped`.',
  ),
}

CHOICES = {
  'correction.names': _NAMES,
  **{f'correction.clipping_bias.{key}': text for key, text in _BIAS.items()},
  'correction.tis.level': _LEVELS,
  'correction.tis.reduce': _REDUCES,
  'correction.tis.truncated': _TRUNCATED,
  **{
    f'correction.{name}.{key}': text
    for name in ('mis', 'icepop', 'geo_rs')
    for key, text in (('level', _LEVELS), ('reduce', _REDUCES))
  },
}
