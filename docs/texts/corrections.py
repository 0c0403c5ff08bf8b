"""How much each term is believed: what each choice is."""

from docs.texts import entry

_SORL = 'arXiv 2511.20718.'
_K = 'k = pi_old (trainer) / mu (sampler)'

_NAMES = {
  'clipping_bias': entry.Description(
    """
    U, V = policy tokens with the ratio w outside, inside the bounds (the sign
           of A is ignored);  N_U, N_V = rms of w A over them
    norm=coefficient: term * s,  s = 1 / rho if rho > tau else 1,
                      rho = N_U / (N_V + 1e-8)
    norm=gradient:    g_policy / max(|c|, floor),
                      c = gradient of the aggregate of w A log pi over U

    U empty: s = 1. V empty: N_V is 0 for the scopes minibatch and microbatch,
    and 1 for sequence and turn.
    """,
    _SORL,
    entry.CODE,
    'Several updates per collection, when clipped tokens outweigh the others. '
    'Watch `stab/rho`, which is measured for every row.',
  ),
  'tis': entry.Description(
    f'term * min(k, cap)\n{_K}',
    'Truncated importance sampling for engines that differ (Yao et al., 2025).',
    entry.CODE,
    'The sampler is another engine, or of another precision. The bias is '
    'small, and no term is lost.',
    'verl: `rollout_is=token`. TRL: '
    "`vllm_importance_sampling_mode='token_truncate'`. slime: `--use-tis`, "
    '`--tis-clip`.',
  ),
  'mis': entry.Description(
    f'term * (k if k <= cap else 0)\n{_K}',
    'Masked importance sampling (Liu et al., 2025).',
    entry.CODE,
    'As `tis`, when the tokens beyond the cap are not to be trusted at all.',
    "TRL: `vllm_importance_sampling_mode='token_mask'`.",
  ),
  'icepop': entry.Description(
    f'term * (k if least <= k <= most else 0)\n{_K} of the token',
    'Ring-1T, arXiv 2510.18855.',
    entry.CODE,
    'As `mis`, with a lower end: mixtures of experts, where routing differs.',
    'verl: a threshold of two numbers, `rollout_is_threshold=0.5_5.0`.',
  ),
  'geo_rs': entry.Description(
    f'term * (1 if |mean of log k over the trajectory| <= band else 0)\n{_K}',
    'Rejection by the geometric mean; documentation of verl.',
    entry.CODE,
    'Whole trajectories are off, a little at every token. Watch '
    '`stab/rejected`: the default band is narrow.',
    'verl: `rollout_rs=seq_mean_k1`.',
  ),
}

_BIAS = {
  'norm': {
    'coefficient': entry.Description(
      's = 1 / rho if rho > tau else 1',
      _SORL,
      entry.CODE,
      'The reference.',
    ),
    'gradient': entry.Description(
      'g_policy <- g_policy / max(|c|, floor)',
      _SORL,
      entry.REVIEWS + ' The floor is ours: without it a small |c| would '
      'enlarge steps.',
      'The form that the reviews describe. It costs one more pull-back; tau '
      'and scope do not apply.',
    ),
  },
  'scope': {
    'minibatch': entry.Description(
      'rho over all policy tokens of one optimiser step, on all devices',
      _SORL,
      entry.OURS + ' It is the one that cutting the batch does not change.',
      'The default.',
    ),
    'microbatch': entry.Description(
      'rho over one microbatch, on all devices',
      _SORL,
      entry.CODE + ' There it is of one GPU.',
      'Nearest to the reference. It changes with `updates.microbatch_size`.',
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
      entry.OURS,
      'Only turns with much clipping should be scaled.',
    ),
  },
  'level': {
    'token': entry.Description(
      'w = exp(l) of the token, whatever the level of the loss',
      _SORL,
      entry.CODE,
      'The reference, with turn ratios in the loss too.',
    ),
    'turn': entry.Description(
      "w = the turn's ratio, which all of its tokens share",
      _SORL,
      entry.OURS,
      'To clip and to measure at the same level.',
    ),
  },
  'applies_to': {
    'policy': entry.Description(
      'policy terms are scaled; entropy and KL are not',
      _SORL,
      entry.CODE,
      'The reference.',
    ),
    'value': entry.Description(
      'value terms are scaled by the same s',
      _SORL,
      entry.OURS,
      'The critic, too, should move less on such minibatches.',
    ),
  },
}

_LEVELS = {
  'token': entry.Description(
    f'{_K} of the token',
    '—',
    entry.CODE,
    'Low variance.',
    'verl: `rollout_is=token`.',
  ),
  'sequence': entry.Description(
    f'{_K}: the product over the policy tokens of the\n'
    'trajectory; log k is clipped to [-20, 20]',
    '—',
    entry.CODE,
    'The unbiased weight. Over long trajectories it is 0 or above any cap.',
    'verl: `rollout_is=sequence`. TRL: '
    "`vllm_importance_sampling_mode='sequence_...'`.",
  ),
}

_TRUNCATED = {
  'mismatch': entry.Description(
    'term * min(k, cap)',
    '—',
    entry.CODE,
    'The objective bounds the ratio by itself.',
  ),
  'product': entry.Description(
    'term * min(k r, cap) / r: of mismatch and staleness together',
    'MiniRL, arXiv 2512.01374.',
    entry.PAPER,
    'Objectives that weigh by r: `masked`, `unclipped`.',
  ),
}

CHOICES = {
  'correction.names': _NAMES,
  **{f'correction.clipping_bias.{key}': text for key, text in _BIAS.items()},
  'correction.tis.level': _LEVELS,
  'correction.tis.truncated': _TRUNCATED,
  'correction.mis.level': _LEVELS,
}
