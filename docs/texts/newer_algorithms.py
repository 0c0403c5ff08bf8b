"""Descriptions of algorithms that were published after arXiv 2511.20718."""

from docs.texts import entry

ALGORITHMS = {
  'atpo': entry.Description(
    """
    r_k  = sg(exp(mean over the policy tokens of turn k of l))
             * pi_theta / sg(pi_theta) of the token
    loss = mean over trajectories of
             mean over its policy tokens of max(-A r_k, -A clip(r_k))
    A    = (R - mean R) / (std R + epsilon) over a question's trajectories
    """,
    'AT2PO, arXiv 2601.04767.',
    entry.CODE + ' This holds for the loss. Its advantages come from trees of '
    'trajectories, which share their first turns; without trees, those of '
    '`grpo` take their place.',
    'The ratio of a turn, with bounds that are made for a mean: they are 60 '
    'times narrower than those of `turn_ppo`.',
    'The code of its authors: `policy_loss=gspo_turn`.',
  ),
  'sampo': entry.Description(
    """
    r_k  = as in atpo
    loss = mean over turns of
             mean over its policy tokens of max(-A r_k, -A clip(r_k))
           + kl.coefficient * min(k3, 10)
    A    = as in gigpo, with differences from the mean that are not divided
    """,
    'SAMPO, arXiv 2602.21534.',
    entry.CODE + ' There the ratio is called that of a sequence, and every '
    'sequence is one turn.',
    'The ratio of a turn and the credit of a turn, without a value model. '
    'Groups of equal rewards are replaced, as in `dapo`.',
    'ARL-Arena: `algorithm.adv_estimator=sampo`.',
  ),
  'turn_mdp_ppo': entry.Description(
    """
    delta_k = (rewards of turn k) + gamma V_{k+1} - V_k
    V_k  = value before the first token of turn k
    A_k  = delta_k + gamma lambda_ A_{k+1}, for all tokens of turn k, whitened
    loss = mean over policy tokens of max(-A_k r_k, -A_k clip(r_k))

    r_k is the turn ratio of turn_ppo.
    """,
    'arXiv 2512.17008, which calls it Turn-PPO.',
    entry.OURS
    + ' That a turn is one action, with a value before it, and gamma '
    'and lambda were read in summaries of the paper; that the ratio is the '
    'geometric mean of the turn, and the bounds, is our choice.',
    'A value of the state before a turn can be learned where one within a turn '
    'cannot. It is **not** the `turn_ppo` of this page: that one, of '
    'arXiv 2511.20718, has the ratio of a turn and the advantages of tokens. '
    'Here a turn has one advantage, too.',
  ),
  'gmpo': entry.Description(
    """
    loss = mean over trajectories of
             -mean A * exp(mean over its policy tokens of log w')
    w'   = the token ratio, clipped where that lowers the objective
    A    = (R - mean R) / (std R + epsilon) over a question's trajectories
    """,
    'arXiv 2507.20673.',
    entry.CODE,
    'Like `gspo`, but one token with an extreme ratio does not move the ratio '
    'of its trajectory. With `ratio.level=turn` it is the same for turns.',
    'verl: policy loss `geo_mean`.',
  ),
  'dppo_tv': entry.Description(
    """
    loss = sum over policy tokens of -M sg(min(r, cap)) A log pi_theta
           / (trajectories * max_response_tokens)
    M    = 0 where A > 0 and pi_theta - pi_old > rise, or
           where A < 0 and pi_old - pi_theta > fall; else 1
    A    = R - mean R over a question's trajectories
    """,
    'arXiv 2602.04879.',
    entry.CODE + ' prime-rl adds the square of l, which is no part of this.',
    'Ratios of rare tokens are clipped although their probability hardly '
    'changes, as happens with large vocabularies.',
    'verl: policy loss `dppo_tv`. prime-rl: its default loss.',
  ),
  'dppo_kl': entry.Description(
    """
    loss = the loss of dppo_tv, with another M
    M    = 0 where A > 0, pi_theta > pi_old and KL > rise, or
           where A < 0, pi_theta < pi_old and KL > fall; else 1
    KL   = pi_old log(pi_old / pi_theta)
             + (1 - pi_old) log((1 - pi_old) / (1 - pi_theta))
    """,
    'arXiv 2602.04879.',
    entry.CODE,
    'Like `dppo_tv`, but a rare token that becomes far rarer is held back.',
    'verl: policy loss `dppo_kl`.',
  ),
  'sapo_gate': entry.Description(
    """
    loss = mean over trajectories of
             mean over its policy tokens of -A sigmoid(tau (r - 1)) 4 / tau
    tau  = tau_positive where A > 0, else tau_negative
    A    = (R - mean R) / (std R + epsilon) over a question's trajectories
    """,
    'SAPO, arXiv 2511.20347. Two other methods have that name (arXiv '
    '2603.10069, arXiv 2605.29697), so this one has that of its gate.',
    entry.CODE,
    'The update should fade with the distance from the old policy, faster for '
    'tokens that are made rarer.',
    "verl: policy loss `sapo`. TRL: `loss_type='sapo'`.",
  ),
  'topr': entry.Description(
    """
    loss = sum over policy tokens of -sg(w) A log pi_theta / trajectories
    w    = 1 where A > 0, else min(r, 1),   r: the product over the trajectory
    A    = R - mean R over a question's trajectories
    """,
    'arXiv 2503.14286.',
    entry.CODE + ' Trinity-RFT, which has token ratios. That r is the ratio of '
    'the trajectory was read in summaries of the paper. The baseline is our '
    'choice: there, rewards are 1 and -1.',
    'Trajectories are stale or of another policy, and bad ones should not be '
    'pushed away further once the policy no longer writes them.',
    'Trinity-RFT: `algorithm_type=topr`.',
  ),
  'vespo': entry.Description(
    """
    loss   = mean over policy tokens of -sg(phi(r)) A log pi_theta
    phi(r) = r^k exp(lambda (1 - r)),   r: the product over the trajectory
    k, lambda = power_positive, decay_positive where A >= 0,
                power_negative, decay_negative where A < 0
    A      = (R - mean R) / (std R + epsilon) over a question's trajectories
    """,
    'arXiv 2602.10693.',
    entry.CODE,
    'Data are stale by many updates, and a ratio of the whole trajectory is '
    'wanted that neither explodes nor depends on the length by a mean.',
    "TRL: `loss_type='vespo'`.",
  ),
  'clip_cov': entry.Description(
    """
    loss = mean over policy tokens of max(-A r, -A clip(r)), and 0 at a share
           of them: a random choice of those with least < cov < most
    cov  = (A - mean A) (log pi_theta - mean log pi_theta)
    A    = (R - mean R) / (std R + epsilon) over a question's trajectories
    """,
    'arXiv 2505.22617.',
    entry.CODE,
    'The entropy falls too fast. Few tokens, of a high covariance, lower it.',
    'verl: policy loss `clip_cov`.',
  ),
  'kl_cov': entry.Description(
    """
    loss = mean over policy tokens of -A r, and coefficient |l| in addition
           at the share of them with the highest cov
    cov  = (A - mean A) (log pi_theta - mean log pi_theta)
    A    = (R - mean R) / (std R + epsilon) over a question's trajectories
    """,
    'arXiv 2505.22617.',
    entry.CODE,
    'Like `clip_cov`. Nothing else is clipped, so do few updates per '
    'collection.',
    'verl: policy loss `kl_cov`.',
  ),
  'vapo': entry.Description(
    """
    loss = mean over policy tokens of max(-A w, -A clip(w))
           + coefficient * mean over the policy tokens of correct trajectories
             of -log pi_theta
    A    = GAE, whitened, lambda of a trajectory = 1 - 1 / (alpha * its policy
           tokens), but at least 0
    V learns returns (lambda_critic = 1)

    w is the token ratio. A trajectory is correct if its outcome is at least
    `least`.
    """,
    'VAPO, arXiv 2504.05118; the separate lambdas: arXiv 2503.01491.',
    entry.PAPER + ' That a negative lambda is 0, and that the length counts '
    'policy tokens, was read in NeMo-RL, whose numbers ours equal. What is '
    'correct is our choice.',
    'Dialogues are long and of different lengths, and the outcome is their '
    'only reward. Pretrain the values: `loss.value_warmup_steps=50` updates '
    'nothing else in the first 50 steps, on dialogues of the same policy. With '
    'alpha 0.05 a row of up to 20 tokens has lambda 0, so raise it for short '
    'dialogues. The outcome is the sum of all rewards on the last token: '
    '`env.rewards.search_penalty` and `env.rewards.overlong` lower it, and '
    'where it never reaches `least` nothing is imitated. The metric '
    '`actor/imitated` is the share of trajectories that are.',
    'NeMo-RL: `length_adaptive_alpha`, `gae_lambda_value`.',
  ),
  'evpo': entry.Description(
    """
    loss = mean over policy tokens of max(-A w, -A clip(w))
    A    = GAE with V' in place of V, whitened
    V'   = V, if 1 - var(returns - V) / var(returns) > 0 over the policy tokens
           of the collection; otherwise the mean return

    w is the token ratio.
    """,
    'arXiv 2604.19485.',
    entry.OURS + ' The rule was read in the abstract: the critic where the '
    'explained variance of the batch is positive, the mean of the batch '
    'otherwise. That it is about GAE with lambda 1, over policy tokens and '
    'whitened, is our choice.',
    'It is not known whether the values are worth anything: until they are, '
    'advantages are those without a critic. It equals `token_ppo` afterwards.',
  ),
  'turn_rloo': entry.Description(
    """
    A_k  = G_k - mean of G_k over the question's other trajectories that have
           a turn k,   G_k = r_k + gamma G_{k+1}
    loss = sum over policy tokens of -sg(r) A_k log pi_theta / trajectories
    """,
    'Our choice; [the baseline of a turn](turn_baselines.md) derives it.',
    entry.OURS,
    'Turns have rewards of their own, and the policy decides when to stop: '
    '`mt_grpo` is biased there. Like `rloo`, of which it is the form for '
    'turns, it clips nothing, so do few updates per collection.',
  ),
  'a2tgpo': entry.Description(
    """
    A_k  = z(outcome) + turn_weight * D_k / sqrt(n_k) on all turns but the last,
           z(outcome) on the last
    D_k  = z(r_k) + gamma D_{k+1},   n_k: how many z are summed in it
    z    = (x - mean) / (std + epsilon), of r_k over the turns k of a question
    loss = the loss of atpo
    """,
    'A2TGPO, arXiv 2605.06200.',
    entry.CODE + ' There, r_k is the information gain of a turn (IGPO, arXiv '
    '2510.14967), and the bounds of a turn are scaled by 1 + 0.3 (2 '
    'sigmoid(z(r_k)) - 1). Here, r_k is any reward of turns, such as '
    '`env.rewards.information_gain`, and bounds are not scaled. For these '
    'gains the policy that is about to be updated is asked, also with '
    '`rollout.steps_ahead`, for the probability of the first golden answer '
    'before every turn: up to `env.max_turns` + 1 forward passes of each '
    'trajectory, each over all tokens so far.',
    'Turns have rewards of their own, whose size depends on the number of the '
    'turn. It is biased where the policy decides when to stop: '
    '[the baseline of a turn](turn_baselines.md).',
    'Its authors: `igpo_norm_mode=turn-group-v1d`, `igpo_adv_rescale_alpha` '
    'for turn_weight.',
  ),
  'hgpo': entry.Description(
    """
    A    = sum_h w_h N_h(G) / sum_h w_h,   w_h = (h + 2)^power
    G_k  = r_k + gamma G_{k+1}
    N_h  = (x - mean) / (std + epsilon) over the turns of a question with the
           same state as this one and the same h states before; h = 0..history
    loss = mean over policy tokens of max(-A r, -A clip(r))
           + kl.coefficient * min(k3, 10)
    """,
    'arXiv 2602.22817.',
    entry.CODE,
    'States recur, but what came before them matters: `gigpo` compares turns '
    'with one state whatever their past.',
    'verl-agent: `algorithm.adv_estimator=hgpo`, `length_weight_alpha` for '
    'power.',
  ),
}
