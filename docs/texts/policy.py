"""Descriptions of the choices of ratio, bounds, objective and aggregate."""

from docs.texts import entry

_RATIO = {
  'ratio.level': {
    'token': entry.Description(
      'log r = l of the token,   l = clip(log pi_theta - log pi_old, -20, 20)',
      'PPO, arXiv 1707.06347.',
      entry.CODE,
      'The usual choice: every token has a ratio of its own.',
      "TRL: `importance_sampling_level='token'`.",
    ),
    'turn': entry.Description(
      'log r = mean of l over the policy tokens of the turn',
      'arXiv 2511.20718, Eq. 4.',
      entry.CODE,
      'A turn, which is a search or an answer, is one action of the policy.',
    ),
    'sentence': entry.Description(
      'log r = mean of l over the policy tokens of the sentence',
      'arXiv 2511.04256.',
      entry.OURS + ' A sentence ends with the token that contains a `.`, `?`, '
      '`!` or line break of the decoded turn.',
      'Turns are long.',
    ),
    'sequence': entry.Description(
      'log r = mean of l over the policy tokens of the trajectory',
      'GSPO, arXiv 2507.18071.',
      entry.CODE,
      'There is one reward for the whole trajectory.',
      "TRL: `importance_sampling_level='sequence'`.",
    ),
  },
  'ratio.gradient': {
    'segment': entry.Description(
      'd r = r * mean over the segment of d log pi_theta',
      'arXiv 2511.20718; GSPO, arXiv 2507.18071.',
      entry.CODE,
      'The usual choice: it is the gradient of the ratio as defined.',
      "TRL: `importance_sampling_level='sequence'`.",
    ),
    'token': entry.Description(
      "d r = r * d log pi_theta of the token; the value is the segment's",
      'GSPO-token, arXiv 2507.18071.',
      entry.CODE,
      'Advantages vary within a segment, and each should act on its own token.',
      'verl: policy loss `gspo`. Tunix: `loss_algo=gspo-token`.',
    ),
  },
  'ratio.reduce': {
    'mean': entry.Description(
      'log r = mean of l over the segment: the geometric mean of the ratios',
      'arXiv 2511.20718; GSPO, arXiv 2507.18071.',
      entry.CODE,
      'Segments of different lengths should have the same bounds.',
    ),
    'sum': entry.Description(
      'log r = clip(sum of l over the segment, -20, 20)',
      'It is the probability ratio of the segment itself.',
      entry.CODE,
      'The exact importance ratio is wanted. Its spread grows with the length '
      'of the segment.',
      'TRL: the ratio of `RLOOTrainer`.',
    ),
  },
  'ratio.normalize': {
    'none': entry.Description(
      "l' = l",
      '—',
      entry.PLAIN,
      'Always, except in experiments.',
    ),
    'guard': entry.Description(
      """
      l' = clip((l - m_k) s_k, -20, 20),   terms of turn k divided by s_k
      m_k = mean of l over turn k
      s_k = clip(target / std of l over turn k, 1/10, 10)
      """,
      'GRPO-Guard, arXiv 2510.22319.',
      entry.OURS + ' Experimental; the published form is for flow matching.',
      'Most ratios drift below 1. Use it with the aggregate `turn_mean`.',
    ),
  },
}

_BOUNDS = {
  'fixed': entry.Description(
    'low, high = 1 - clip_low, 1 + clip_high',
    'PPO, arXiv 1707.06347; with unequal distances DAPO, arXiv 2503.14476.',
    entry.CODE,
    'The usual choice.',
    'verl: `clip_ratio_low`, `clip_ratio_high`. TRL: `epsilon`, '
    '`epsilon_high`. slime: `--eps-clip`, `--eps-clip-high`.',
  ),
  'entropy_scaled': entry.Description(
    """
    low, high = 1 - f clip_low, 1 + f clip_high
    f = clip(H / mean H, least, most)

    H is the mean entropy of the ratio's segment, mean H the mean of H over the
    segments of the minibatch.
    """,
    'SSPO, arXiv 2511.04256.',
    entry.OURS + ' That entropy scales the bounds is from the paper; f is our '
    'choice.',
    'The policy should change more where its entropy is high than where it is '
    'low.',
  ),
  'balanced': entry.Description(
    """
    Starts from (low, high). While
      sum_{A > 0} pi_old min(A r, A clip(r))
        < positive_share * sum pi_old |min(A r, A clip(r))|
    high grows by high_step up to high_limit, then low by low_step up to
    low_limit. The sums are over the whole minibatch.
    """,
    'BAPO, arXiv 2510.18927.',
    entry.PAPER + ' Eq. 8 takes the absolute value of the whole sum; taking it '
    "of each term is our choice. The authors' script differs from both: see "
    '`bapo`.',
    'Negative advantages outweigh the positive ones, as in stale batches.',
  ),
}

_OBJECTIVE = {
  'pessimistic': entry.Description(
    'term = max(-A r, -A clip(r))',
    'PPO, arXiv 1707.06347, Eq. 7.',
    entry.CODE,
    'The usual choice.',
    'verl: policy loss `vanilla`.',
  ),
  'dual_clip': entry.Description(
    'term = max(-A r, -A clip(r)), and at most -A c where A < 0',
    'arXiv 1912.09729, Eq. 5.',
    entry.CODE,
    'Ratios are very large where advantages are negative, as in stale batches.',
    'verl: `clip_ratio_c`, always on. TRL: `delta`. Tunix: `epsilon_c`.',
  ),
  'detached': entry.Description(
    'term = -sg(clip(r)) A log pi_theta',
    'CISPO, arXiv 2506.13585, Eq. 4.',
    entry.CODE,
    'Ratios should be bounded without cutting the gradient of any token.',
    "verl: policy loss `cispo`. TRL: `loss_type='cispo'`.",
  ),
  'masked': entry.Description(
    """
    term = -M sg(r) A log pi_theta
    M    = 0 where r > high and A > 0, or r < low and A < 0; else 1
    """,
    'MiniRL, arXiv 2512.01374.',
    entry.PAPER,
    'A correction should truncate the ratio. The gradient is that of '
    '`pessimistic`, but the ratio is a weight that is not differentiated.',
  ),
  'unclipped': entry.Description(
    'term = -sg(r) A log pi_theta',
    'It is REINFORCE with an importance weight.',
    entry.PLAIN,
    'There is one update per collection, or the effect of clipping is of '
    'interest.',
    'verl: the REINFORCE loss of its bypass mode.',
  ),
}

_AGGREGATE = {
  'token_mean': entry.Description(
    'sum over policy tokens / policy tokens',
    'PPO as in most code; DAPO, arXiv 2503.14476.',
    entry.CODE,
    'The usual choice. Long trajectories weigh more.',
    "verl: `token-mean`. TRL: `loss_type='bnpo'` or `'dapo'`. Tunix: "
    '`token-mean`.',
  ),
  'turn_mean': entry.Description(
    "mean over turns of the mean over the turn's policy tokens",
    '—',
    entry.PLAIN,
    'Every turn should weigh the same, whatever its length.',
  ),
  'sequence_mean': entry.Description(
    """
    mean over trajectories of the mean over the trajectory's policy tokens
    """,
    'GRPO, arXiv 2402.03300.',
    entry.CODE,
    'Every trajectory should weigh the same.',
    "verl: `seq-mean-token-mean`. TRL: `loss_type='grpo'`. Tunix: "
    '`sequence-mean-token-mean`.',
  ),
  'sequence_sum': entry.Description(
    'sum over policy tokens / trajectories',
    'The policy gradient of a trajectory is a sum.',
    entry.CODE,
    'No normalisation by length is wanted. The step grows with length, so '
    'lower the learning rate.',
    "verl: `seq-mean-token-sum`. TRL: `loss_type='luspo'`. Tunix: "
    '`seq-mean-token-sum`.',
  ),
  'constant_length': entry.Description(
    'sum over policy tokens / (trajectories * max_response_tokens)',
    'Dr. GRPO, arXiv 2503.20783.',
    entry.CODE,
    'Like `sequence_sum`, at the scale of a mean.',
    "verl: `seq-mean-token-sum-norm`. TRL: `loss_type='dr_grpo'`. Tunix: "
    '`sequence-mean-token-scale`.',
  ),
}

CHOICES = _RATIO | {
  'bounds.name': _BOUNDS,
  'objective.name': _OBJECTIVE,
  'aggregate.name': _AGGREGATE,
}
