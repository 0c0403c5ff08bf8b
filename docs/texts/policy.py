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
  'by_length': entry.Description(
    """
    low, high = 1 - clip_low n^-exponent, 1 + clip_high n^-exponent

    n is the number of policy tokens of the ratio's segment.
    """,
    '[The bounds of a turn](../turn_bounds.md).',
    entry.OURS,
    'Segments have different lengths. The mean of n independent log-ratios has '
    'a spread proportional to n^(-1/2), so one width for all trusts almost '
    'every long turn and few short ones. Measure the spread before you choose '
    'the exponent: tokens of a turn are not independent.',
  ),
  'total_variation': entry.Description(
    """
    low, high = 1 - fall / pi_old, 1 + rise / pi_old
    so that     pi_old - fall <= pi_theta <= pi_old + rise
    """,
    'DPPO with the binary total variation, arXiv 2602.04879.',
    entry.CODE + ' verl, prime-rl.',
    'The ratio of a rare token is large after a harmless change, and that of a '
    'likely token is near 1 after a great one. It bounds the probability of '
    'the token itself, so the level of the ratio should be `token`.',
    'verl: policy loss `dppo_tv`. prime-rl: `dppo_mask_low`, `dppo_mask_high`.',
  ),
  'binary_kl': entry.Description(
    """
    KL = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))
    KL <= fall where pi < pi_old;  KL <= rise where pi > pi_old

    The bounds of the ratio are the two solutions, found by halving intervals.
    """,
    'DPPO with the binary divergence, arXiv 2602.04879.',
    entry.CODE + ' verl.',
    'Like `total_variation`, but a probability that falls to almost 0 counts '
    'as far, too.',
    'verl: policy loss `dppo_kl`.',
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
  'geometric': entry.Description(
    """
    term = -A exp(mean over the segment of log w'),   w: the token ratio
    w'   = high where w > high and A > 0, low where w < low and A < 0; else w
    """,
    'GMPO, arXiv 2507.20673.',
    entry.CODE,
    'One token with an extreme ratio should not decide about its segment. The '
    'bounds are those of a token; `ratio.level` says over which tokens the '
    'mean is formed, and the gradient goes through all of them.',
    'verl: policy loss `geo_mean`.',
  ),
  'soft_gate': entry.Description(
    """
    term = -A sigmoid(tau (r - 1)) 4 / tau
    tau  = tau_positive where A > 0, else tau_negative
    """,
    'SAPO, arXiv 2511.20347.',
    entry.CODE,
    'The gradient should fade with the distance from the old policy instead of '
    'ending at a bound. The bounds are not used.',
    "verl: policy loss `sapo`. TRL: `loss_type='sapo'`.",
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
    term = -M sg(min(r, cap)) A log pi_theta
    M    = 0 where r > high and A > 0, or r < low and A < 0; else 1
    """,
    'MiniRL, arXiv 2512.01374; DPPO, arXiv 2602.04879, with a cap.',
    entry.CODE + ' verl has it for DPPO; that of MiniRL was read in the paper.',
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
  'tapered': entry.Description(
    """
    term = -sg(w) A log pi_theta
    w    = 1 where A > 0, else clip(r)
    """,
    'TOPR, arXiv 2503.14286.',
    entry.CODE + ' Trinity-RFT, which has token ratios. That the ratio is that '
    'of the trajectory was read in summaries of the paper.',
    'Good trajectories of older policies should be learned at full weight, and '
    'bad ones only as far as the policy would still write them.',
    'Trinity-RFT: `policy_loss_fn=topr`.',
  ),
  'gamma_weighted': entry.Description(
    """
    term   = -sg(phi(r)) A log pi_theta
    phi(r) = r^k exp(lambda (1 - r))
    k, lambda = power_positive, decay_positive where A >= 0,
                power_negative, decay_negative where A < 0
    """,
    'VESPO, arXiv 2602.10693.',
    entry.CODE,
    'The weight of a trajectory should fade on both sides of 1, although the '
    'product of its ratios varies by orders of magnitude. The bounds are not '
    'used.',
    "TRL: `loss_type='vespo'`, where a sampler's mismatch is part of r.",
  ),
  'clip_cov': entry.Description(
    """
    term = max(-A r, -A clip(r)), but 0 at the chosen tokens
    cov  = (A - mean A) (log pi_theta - mean log pi_theta)

    A share of the policy tokens is chosen, at random, of those that are not
    clipped and have least < cov < most.
    """,
    'Clip-Cov, arXiv 2505.22617.',
    entry.CODE + ' The means are those of the minibatch, there of a '
    "microbatch. The choice is a function of a token's stored numbers, so a "
    'token that stays eligible stays chosen.',
    'The entropy falls too fast: tokens of high covariance lower it most.',
    'verl: policy loss `clip_cov`.',
  ),
  'kl_cov': entry.Description(
    """
    term = -A r, and coefficient |log r| in addition at the chosen tokens
    cov  = (A - mean A) (log pi_theta - mean log pi_theta)

    The share of the policy tokens with the highest cov is chosen.
    """,
    'KL-Cov, arXiv 2505.22617.',
    entry.CODE
    + ' The means are those of the minibatch, there of a microbatch.',
    'Like `clip_cov`, but these tokens are held back instead of dropped. '
    'Nothing is clipped, and the bounds are not used.',
    'verl: policy loss `kl_cov`.',
  ),
  'positive_examples': entry.Description(
    """
    term = max(-A r, -A clip(r)) - coefficient * n log pi_theta, the second part
           in trajectories whose outcome is least or more
    n    = policy tokens / those of these trajectories, in the minibatch
    """,
    'VAPO, arXiv 2504.05118.',
    entry.PAPER + ' What counts as correct is our choice.',
    'Correct trajectories are rare, and should be used better.',
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
