"""Descriptions of the algorithms and of the preference losses."""

from docs.texts import entry
from docs.texts import newer_algorithms

_SORL = 'arXiv 2511.20718'

ALGORITHMS = {
  'token_ppo': entry.Description(
    """
    loss = mean over policy tokens of max(-A r, -A clip(r))
    r    = pi_theta / pi_old of the token
    A    = whitened GAE; the reward is the outcome minus kl.coefficient * k1
    """,
    'PPO, arXiv 1707.06347; with a search engine, arXiv 2503.09516.',
    entry.CODE,
    'The baseline. Every other algorithm is described by how it differs from '
    'this one.',
    'verl: `adv_estimator=gae`, policy loss `vanilla`. Search-R1: '
    '`adv_estimator=gae`. Tunix: policy loss `ppo`. slime: '
    '`--advantage-estimator ppo`.',
  ),
  'turn_ppo': entry.Description(
    """
    log r_k = mean over the policy tokens of turn k of
              log pi_theta - log pi_old
    loss    = mean over policy tokens of max(-A r_k, -A clip(r_k))

    The gradient goes through the mean: each token of a turn moves the ratio
    that all of them share. Clipping is decided per token, because A differs
    within a turn.
    """,
    f'{_SORL}, Eq. 4.',
    entry.CODE + ' The paper says the same.',
    'Dialogues have several turns, and no token should be clipped only because '
    'its own ratio is unusual. The comparison with `token_ppo` shows the '
    'effect of the level alone. Another method of that name, arXiv 2512.17008, '
    'is `turn_mdp_ppo` here.',
    'verl and TRL have no ratio per turn. Their sequence ratio is that of a '
    'turn if every turn is passed as a sequence of its own: in TRL with '
    '`ratio.gradient=segment`, in verl with `ratio.gradient=token`.',
  ),
  's_ppo': entry.Description(
    """
    loss = mean over policy tokens of s max(-A r, -A clip(r))
    s    = 1 / rho if rho > tau else 1,   rho = N_U / N_V

    N_U and N_V are the root mean squares of w A over the tokens whose token
    ratio w is outside and inside the bounds.
    """,
    f'{_SORL}.',
    entry.CODE + ' The reference implementation computes rho per microbatch of '
    'one GPU. Here it is computed over the whole minibatch, so that cutting a '
    'batch changes nothing.',
    'There are several updates per collection: updates in which clipped tokens '
    'dominate become smaller. The comparison with `token_ppo` shows the effect '
    'of the correction alone.',
  ),
  'st_ppo': entry.Description(
    """
    log r_k = mean over the policy tokens of turn k of
              log pi_theta - log pi_old
    loss    = mean over policy tokens of s max(-A r_k, -A clip(r_k))
    s       = 1 / rho if rho > tau else 1,   rho = N_U / N_V

    The loss uses turn ratios; rho is that of s_ppo, from token ratios.
    """,
    f'{_SORL}.',
    entry.CODE + ' rho is computed over the same tokens as in `s_ppo`.',
    'This is the subject of the project: turn ratios and the correction '
    'together.',
  ),
  'so_ppo': entry.Description(
    'loss = the loss of st_ppo',
    f'{_SORL}, version 2, which renames it.',
    entry.PAPER,
    'You prefer the newer name of `st_ppo`.',
  ),
  'so_grpo': entry.Description(
    """
    loss = mean over policy tokens of s_y max(-A r_k, -A clip(r_k))
           + kl.coefficient * min(k3, 10)
    s_y  = as in s_ppo, with rho computed over the trajectory y
    A    = (R - mean R) / (std R + epsilon) over a question's trajectories
    """,
    f'{_SORL}, version 2, whose runs have groups of 5.',
    entry.CODE + ' A script of the reference implementation uses token ratios '
    'instead (`ratio.level=token`).',
    'Like `st_ppo`, but there is no value model.',
  ),
  'bilevel_ppo': entry.Description(
    """
    G_k  = return of turn k: GAE over turns with gamma_turn, lambda_turn
    A    = GAE over the tokens of turn k alone, with G_k as its only reward
    loss = the loss of token_ppo
    """,
    'RAGEN, arXiv 2504.20073.',
    entry.CODE + ' That the value of a turn is the one before its first token, '
    'and that turns have their own lambda, is our choice.',
    'Credit should be discounted per turn instead of per token, or turns have '
    'rewards of their own.',
    'RAGEN: `bi_level_gae` with `high_level_gamma`.',
  ),
  'grpo': entry.Description(
    """
    loss = mean over trajectories of
             mean over its policy tokens of max(-A r, -A clip(r))
           + kl.coefficient * k3
    A    = (R - mean R) / (std R + epsilon) over a question's trajectories
    """,
    'DeepSeekMath, arXiv 2402.03300.',
    entry.CODE,
    'There is no value model, and rewards vary among the trajectories of one '
    'question. The tokens of short trajectories weigh more.',
    'verl: `adv_estimator=grpo`, `loss_agg_mode=seq-mean-token-mean`. TRL: '
    "`loss_type='grpo'`. Tunix: policy loss `grpo`. slime: "
    '`--advantage-estimator grpo`.',
  ),
  'dr_grpo': entry.Description(
    """
    loss = sum over policy tokens of max(-A r, -A clip(r))
           / (trajectories * max_response_tokens)
    A    = R - mean R over a question's trajectories
    """,
    'arXiv 2503.20783.',
    entry.CODE,
    'The weight of a trajectory should depend neither on its length nor on the '
    'spread of the rewards, as it does in `grpo`.',
    'verl: `norm_adv_by_std_in_grpo=False`, '
    '`loss_agg_mode=seq-mean-token-sum-norm`. TRL: '
    "`loss_type='dr_grpo'`, `scale_rewards='none'`. slime: "
    '`--disable-grpo-std-normalization`.',
  ),
  'dapo': entry.Description(
    """
    loss = mean over policy tokens of max(-A r, -A clip(r)),
           with the upper bound further from 1 than the lower
    A    = (R - mean R) / (std R + epsilon) over a question's trajectories
    R    = outcome - env.rewards.overlong * min(max(1 - d / n, 0), 1)
    d    = env.max_length - length of the trajectory, 0 if it was cut off
    n    = env.overlong_fraction * env.max_length
    """,
    'arXiv 2503.14476.',
    entry.CODE + ' That the length is that of the whole trajectory is our '
    'choice.',
    'Entropy should not collapse: the probability of rare tokens may grow '
    'further than with equal bounds. The key `rollout.resample_rounds` sets '
    'its dynamic sampling, which replaces groups of equal rewards because they '
    'teach nothing. To see the effect of the bounds alone, set this key and '
    '`env.rewards.overlong` to 0.',
    'verl: `clip_ratio_high=0.28`, `loss_agg_mode=token-mean`. TRL: '
    "`loss_type='dapo'`. Tunix: `loss_agg_mode='token-mean'`.",
  ),
  'gspo': entry.Description(
    """
    log r = mean over the policy tokens of the trajectory of
            log pi_theta - log pi_old
    loss  = mean over trajectories of max(-A r, -A clip(r))
    A     = (R - mean R) / (std R + epsilon) over a question's trajectories
    """,
    'arXiv 2507.18071.',
    entry.CODE,
    'There is one reward for the whole trajectory, so the ratio is that of the '
    'trajectory too. Its bounds are far narrower, because a mean over many '
    'tokens changes little.',
    "TRL: `importance_sampling_level='sequence'`. slime: "
    '`--advantage-estimator gspo`. (verl and Tunix: see `gspo_token`.)',
  ),
  'gspo_token': entry.Description(
    """
    r    = sg(r of gspo) * pi_theta / sg(pi_theta) of the token
    loss = mean over trajectories of
             mean over its policy tokens of max(-A r, -A clip(r))
    """,
    'arXiv 2507.18071.',
    entry.CODE,
    'Like `gspo`; the two differ as soon as A varies within a trajectory.',
    'verl: policy loss `gspo`. Tunix: `loss_algo=gspo-token`.',
  ),
  'sspo': entry.Description(
    """
    log r = mean over the policy tokens of a sentence of
            log pi_theta - log pi_old
    low, high = 1 - f clip_low, 1 + f clip_high
    f     = clip(H / mean H, least, most),   H: the mean entropy of the sentence
    loss  = mean over trajectories of
              mean over its policy tokens of max(-A r, -A clip(r))
    """,
    'arXiv 2511.04256.',
    entry.OURS
    + " The sentence ratio and bounds that scale with the sentence's "
    'entropy are from the paper; f and the ends of sentences are our choice.',
    'Turns are too long for one ratio. The level is between those of `grpo` '
    'and `gspo`.',
  ),
  'bapo': entry.Description(
    """
    loss = mean over policy tokens of max(-A r, -A clip(r, low, high))

    Starting from (low, high), high grows by high_step up to high_limit, then
    low by low_step up to low_limit, until
      sum_{A > 0} pi_old min(A r, A clip(r))
        >= positive_share * sum pi_old |min(A r, A clip(r))|
    """,
    'arXiv 2510.18927.',
    entry.PAPER + ' The absolute value inside the sum is our choice.',
    'Batches are stale, and their negative advantages outweigh the positive '
    'ones. The metrics `bounds/low` and `bounds/high` show the bounds.',
  ),
  'cispo': entry.Description(
    """
    loss = mean over policy tokens of -sg(clip(r)) A log pi_theta,
           with a lower bound below 0, which no ratio reaches
    """,
    'MiniMax-M1, arXiv 2506.13585, Eq. 4.',
    entry.CODE + ' The bounds are those of an example of verl; the paper gives '
    'none.',
    'Clipping should bound the weight of a token, not drop its gradient, so '
    'that rare tokens which begin a new thought keep learning.',
    "verl: policy loss `cispo`. TRL: `loss_type='cispo'`, where "
    '`epsilon_high` is the bound itself.',
  ),
  'reinforce': entry.Description(
    """
    loss = sum over policy tokens of -sg(r) A log pi_theta / trajectories
    A    = whitened reward-to-go, discounted with gamma
    """,
    'Williams, "Simple statistical gradient-following algorithms for '
    'connectionist reinforcement learning", 1992.',
    entry.CODE + " It equals verl's loss with importance weights.",
    'There is one update per collection, no value model and no groups. With '
    'more updates, nothing bounds the weights r.',
    'verl: `adv_estimator=reinforce_plus_plus` (whitened likewise). slime: '
    '`--advantage-estimator reinforce_plus_plus`.',
  ),
  'rloo': entry.Description(
    """
    loss = sum over policy tokens of -sg(r) A log pi_theta / trajectories
    A    = R - mean of the R of the question's other trajectories
    R    = outcome - kl.coefficient * k1
    """,
    'arXiv 2402.14740.',
    entry.CODE + ' This holds for the advantage; that nothing is clipped is '
    'our choice.',
    'There are few trajectories per question, for which an unbiased baseline '
    'matters.',
    'verl: `adv_estimator=rloo`. TRL: `RLOOTrainer`, which clips the '
    'sequence ratio as PPO does.',
  ),
  'minirl': entry.Description(
    """
    loss = sum over policy tokens of
             -M sg(min(pi_theta / mu, cap)) A log pi_theta / trajectories
    M    = 0 where r > high and A > 0, or r < low and A < 0; else 1
    r    = pi_theta / pi_old,   mu: the sampler's probability
    A    = R - mean R over a question's trajectories
    """,
    'arXiv 2512.01374.',
    entry.PAPER,
    "The sampler's probabilities differ from the trainer's (another engine, "
    'another precision). The ratio to the old policy decides which tokens are '
    'dropped; the ratio to the sampler is the weight.',
  ),
  'grpo_guard': entry.Description(
    """
    l' = clip((l - m_k) s_k, -20, 20)
    m_k = mean of l over turn k
    s_k = clip(target / std of l over turn k, 1/10, 10)
    r   = exp(l'),   l = log pi_theta - log pi_old
    loss = mean over turns of
             mean over its tokens of max(-A r, -A clip(r)) / s_k

    target is the mean of std over turns. A turn without spread has s_k = 1.
    """,
    'arXiv 2510.22319.',
    entry.OURS + ' Experimental. The published form is for flow matching; '
    'this is our version of it for tokens.',
    'Most ratios drift below 1, so that the upper bound is never reached.',
  ),
  'mt_grpo': entry.Description(
    """
    A = z(outcome) + turn_weight * z(turn reward) on all turns but the last,
        z(outcome) on the last
    z = (x - mean) / (std + epsilon) over a question's trajectories
    loss = mean over policy tokens of max(-A r, -A clip(r))
    """,
    'arXiv 2505.11821.',
    entry.CODE + " The authors' code has one tool call; that all turns before "
    'the last share z(turn reward) is our choice.',
    'Turns have rewards of their own: set `env.rewards.turn_search`, '
    '`env.rewards.turn_answer_found`, or `env.rewards.turn_first_found`, which '
    'pays the first turn alone that finds the answer (TSPO, arXiv 2601.22776, '
    'of which we know the abstract).',
  ),
  'gigpo': entry.Description(
    """
    A   = N(R) + omega * N(G),   G_k = r_k + gamma G_{k+1}
    N   = (x - mean) / (std + epsilon): R over the turns of a question's
          trajectories, G over all turns that began in the same state
    loss = mean over policy tokens of max(-A r, -A clip(r))
           + kl.coefficient * min(k3, 10)
    """,
    'arXiv 2505.10978.',
    entry.CODE + ' In the paper, R is compared over trajectories '
    '(`advantage.outcome_counts=per_trajectory`).',
    'Trajectories of one question pass through the same states, such as equal '
    'search results, so that their next turns can be compared.',
    'verl-agent: `adv_estimator=gigpo`, `gigpo.step_advantage_w` for omega.',
  ),
  **newer_algorithms.ALGORITHMS,
}

_TDPO = """
    loss = -log sigmoid(beta (u - shift))
    u    = R(w) - R(l),   R(y) = sum_t log pi_theta(y_t) - log ref(y_t)
    K(y) = sum_t KL(ref || pi_theta) over the whole vocabulary
    w, l: preferred, dispreferred trajectory; the sums are over policy tokens
    """

PREFERENCES = {
  'tdpo1': entry.Description(
    _TDPO + 'shift = K(l) - K(w)',
    'arXiv 2404.11999.',
    entry.CODE + ' That the sums leave observations out is our choice.',
    'Both trajectories should be kept near the reference policy; `tdpo2` does '
    'this for the dispreferred one only.',
  ),
  'tdpo2': entry.Description(
    _TDPO + 'shift = alpha (K(l) - sg(K(w)))',
    'arXiv 2404.11999.',
    entry.CODE + ' That the sums leave observations out is our choice.',
    'There are pairs of good and bad trajectories, but no environment. Without '
    'the shift it is DPO.',
  ),
}
