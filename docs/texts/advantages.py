"""Descriptions of the choices of the advantage and of the KL term."""

from docs.texts import entry

_GROUPS = 'over the trajectories of a question'

_NAMES = {
  'gae': entry.Description(
    """
    delta_i = r_i + gamma V_{i+1} - V_i
    A_i     = delta_i + gamma lambda_ A_{i+1}

    over the steps i of a trajectory, by default its policy tokens. With
    steps=bilevel, GAE over turns uses gamma_turn and lambda_turn.
    """,
    'arXiv 1506.02438.',
    entry.CODE,
    'There is a value model, and credit should differ within a trajectory.',
    'verl, Search-R1: `adv_estimator=gae`.',
  ),
  'decoupled_gae': entry.Description(
    """
    A: GAE over policy tokens with gamma and the lambda of the trajectory,
       lambda_ * max(1 - 1 / (alpha * its policy tokens), 0)
    targets of V: GAE with lambda_critic, plus V
    """,
    'VC-PPO, arXiv 2503.01491; VAPO, arXiv 2504.05118.',
    entry.PAPER + ' That a negative lambda is 0, and that the length counts '
    'policy tokens, was read in NeMo-RL, whose numbers ours equal.',
    'Values should learn returns, while the policy has a lambda below 1. With '
    '`alpha`, the outcome counts about exp(-1 / alpha) at the start of a long '
    'trajectory, whatever its length.',
    'NeMo-RL: `gae_lambda_value`, `length_adaptive_alpha`.',
  ),
  'monte_carlo': entry.Description(
    'A = sum of the rewards from here on, discounted with gamma per token',
    'REINFORCE; whitened, REINFORCE++, arXiv 2501.03262.',
    entry.CODE,
    'The simplest estimate: it needs neither a value model nor groups.',
    'verl: `adv_estimator=reinforce_plus_plus`.',
  ),
  'group_normalized': entry.Description(
    f'A = (R - mean R) / (std R + epsilon) {_GROUPS};\nstd is unbiased',
    'GRPO, arXiv 2402.03300.',
    entry.CODE + ' That a group of one has advantage 0 is our choice.',
    'There is no value model, and a question has several trajectories.',
    'verl: `adv_estimator=grpo`. TRL: `GRPOTrainer`. Tunix: `grpo`.',
  ),
  'group_centered': entry.Description(
    f'A = R - mean R {_GROUPS}',
    'Dr. GRPO, arXiv 2503.20783; MiniRL, arXiv 2512.01374.',
    entry.CODE,
    'Questions whose rewards vary little should not weigh more than others.',
    'verl: `norm_adv_by_std_in_grpo=False`. TRL: '
    "`scale_rewards='none'`. Tunix: `drgrpo`. slime: "
    '`--disable-grpo-std-normalization`.',
  ),
  'leave_one_out': entry.Description(
    "A = R - mean of the R of the question's other trajectories",
    'RLOO, arXiv 2402.14740.',
    entry.CODE,
    'Groups are small, where an unbiased baseline matters.',
    'verl: `adv_estimator=rloo`. TRL: `RLOOTrainer`. Tunix: `rloo`.',
  ),
  'turn_group': entry.Description(
    f"""
    A = z(outcome) + turn_weight z(turn reward) [before the last turn]
    z = (x - mean) / (std + epsilon) {_GROUPS}
    """,
    'MT-GRPO, arXiv 2505.11821.',
    entry.CODE + ' The form for several tool calls is our choice.',
    'Turns have rewards of their own. It cannot be used with the KL penalty in '
    'the reward, which would count as a reward of the turns. Where the policy '
    'decides when to stop, it is biased: '
    '[the baseline of a turn](../turn_baselines.md).',
  ),
  'turn_leave_one_out': entry.Description(
    """
    A_k = G_k - mean of G_k over the question's other trajectories that have a
          turn k; without any, of the latest turn that one of them has
    G_k = r_k + gamma G_{k+1} over turns
    """,
    '[The baseline of a turn](../turn_baselines.md).',
    entry.OURS,
    'Turns have rewards of their own, and the policy decides when to stop.',
  ),
  'turn_index': entry.Description(
    """
    A_k = z(outcome) + turn_weight D_k / sqrt(n_k) [before the last turn]
    D_k = z(r_k) + gamma D_{k+1},   n_k: how many z are summed in it
    z   = (x - mean) / (std + epsilon), of r_k among the turns k of a question
    """,
    'A2TGPO, arXiv 2605.06200.',
    entry.CODE,
    'Turns have rewards of their own, whose size depends on the number of the '
    'turn. It cannot be used with the KL penalty in the reward, and is biased '
    'where the policy decides when to stop, both like `turn_group`.',
    "A2TGPO's code: `igpo_norm_mode=turn-group-v1d`.",
  ),
  'gigpo': entry.Description(
    """
    A = outcome_weight N(R) + omega sum_h w_h N_h(G) / sum_h w_h
    G_k = r_k + gamma G_{k+1} over turns,   w_h = (h + 2)^power, h = 0..history
    N = (x - mean) / (std + epsilon), or x - mean (`normalize`)
    R among the trajectories of a question, by default once for each of their
    turns (`outcome_counts`), G among turns with one state and the same h states
    before; an h with N_h(G) = 0 is left out
    """,
    'GiGPO, arXiv 2505.10978; with a history, HGPO, arXiv 2602.22817.',
    entry.CODE,
    'Trajectories of one question pass through the same states.',
    'verl-agent: `adv_estimator=gigpo`, `adv_estimator=hgpo`.',
  ),
}

_OPTIONS = {
  'advantage.steps': {
    'token': entry.Description(
      'every policy token is a step',
      '—',
      entry.CODE,
      'The default.',
    ),
    'turn': entry.Description(
      """
      a turn is a step, at its first token: the rewards of the turn are summed
      there, all tokens of the turn get its advantage, and the value model is
      trained at this token only
      """,
      'arXiv 2511.20718 describes turns as actions.',
      entry.OURS,
      'Credit and discounts should be per turn, as in `turn_mdp_ppo`.',
    ),
    'bilevel': entry.Description(
      'GAE over turns, whose returns become the last rewards of a GAE over\n'
      'the tokens of each turn',
      'RAGEN, arXiv 2504.20073.',
      entry.CODE,
      'Discounts should be per turn, and credit should differ within a turn.',
      'RAGEN: `bi_level_gae`.',
    ),
  },
  'advantage.observation_tokens': {
    'skipped': entry.Description(
      'GAE as if the tokens of observations were deleted',
      '—',
      entry.OURS,
      'The default: the policy did not write them.',
    ),
    'included': entry.Description(
      """
      all tokens from a row's first policy token to its last are steps
      """,
      'arXiv 2511.20718.',
      entry.CODE,
      'To repeat a run of the reference implementation. With gamma = lambda_ = '
      '1 this changes whitening only. Otherwise GAE reads the values at '
      'observations, so `critic_tokens` must be `response`.',
    ),
  },
  'advantage.critic_tokens': {
    'policy': entry.Description(
      'value loss = mean over the steps that are policy tokens',
      '—',
      entry.OURS,
      'The default: where observations are skipped, GAE reads only the values '
      'at these tokens.',
    ),
    'response': entry.Description(
      """
      value loss = mean over all steps, from a row's first policy token to its
      last, observations included
      """,
      'arXiv 2511.20718.',
      entry.CODE,
      'To repeat a run of the reference implementation. Use it together with '
      '`observation_tokens=included`.',
    ),
  },
  'advantage.baseline': {
    'critic': entry.Description(
      'GAE with V',
      '—',
      entry.CODE,
      'The default.',
    ),
    'explained': entry.Description(
      """
      GAE with V, if 1 - var(targets - V) / var(targets) > 0 over the policy
      tokens of a collection; otherwise with the mean of the targets
      """,
      'EVPO, arXiv 2604.19485.',
      entry.OURS + ' The rule was read in the abstract.',
      'Values that explain nothing should not be a baseline: they add more '
      'variance than they take.',
    ),
  },
  'advantage.whiten': {
    'none': entry.Description(
      'A, unchanged',
      '—',
      entry.PLAIN,
      'The estimator compares groups, so its advantages are centred already.',
    ),
    'policy': entry.Description(
      '(A - mean) / sqrt(var + 1e-8) over the policy tokens of a collection',
      '—',
      entry.CODE,
      'The default of `gae` and `monte_carlo`.',
    ),
    'all': entry.Description(
      """
      (A - mean) / sqrt(var + 1e-8), with mean and variance over all tokens from
      a row's first policy token to its last, observations included
      """,
      'arXiv 2511.20718.',
      entry.CODE,
      'To repeat a run of the reference implementation.',
    ),
  },
  'advantage.normalize': {
    'std': entry.Description(
      'N(x) = (x - mean) / (std + epsilon)',
      'GiGPO, arXiv 2505.10978.',
      entry.CODE,
      'The default of `gigpo`.',
      'verl-agent: `gigpo.mode=mean_std_norm`.',
    ),
    'none': entry.Description(
      'N(x) = x - mean',
      'GiGPO, arXiv 2505.10978.',
      entry.CODE,
      'Questions and states whose rewards vary little should not weigh more '
      'than others, as in `group_centered`.',
      'verl-agent: `gigpo.mode=mean_norm`.',
    ),
  },
  'advantage.outcome_counts': {
    'per_turn': entry.Description(
      'mean and std of R over the turns of all trajectories of a question',
      'GiGPO, arXiv 2505.10978.',
      entry.CODE,
      "The default of `gigpo`, and of its authors' code. Long trajectories "
      'weigh more.',
      'verl-agent: `compute_mean_std_cross_steps=True`.',
    ),
    'per_trajectory': entry.Description(
      'mean and std of R over the trajectories of a question',
      'GiGPO, arXiv 2505.10978, Eq. 3.',
      entry.PAPER,
      'Every trajectory should weigh the same.',
      'verl-agent: `compute_mean_std_cross_steps=False`.',
    ),
  },
}

_SCHULMAN = 'J. Schulman, "Approximating KL divergence", 2020.'

_KL = {
  'kl.where': {
    'reward': entry.Description(
      'reward of a token <- reward - coefficient * estimate under pi_old',
      'arXiv 1909.08593.',
      entry.CODE,
      'There is a value model, or the estimator is `leave_one_out`.',
      'verl: `use_kl_in_reward`. slime: `--kl-coef`.',
    ),
    'loss': entry.Description(
      'loss <- loss + coefficient * aggregate of the estimate under pi_theta',
      'GRPO, arXiv 2402.03300.',
      entry.CODE,
      'The estimator compares groups by their rewards, which a penalty would '
      'change.',
      'verl: `use_kl_loss`. TRL: `beta`. slime: `--use-kl-loss`.',
    ),
    'nowhere': entry.Description(
      'no term; the divergence is still measured',
      '—',
      entry.PLAIN,
      'The policy may move far from its start.',
    ),
  },
  'kl.estimator': {
    'k1': entry.Description(
      'x = log pi - log ref of the sampled token',
      _SCHULMAN,
      entry.CODE,
      'The term is in the reward, where k1 is unbiased. In the loss its '
      'gradient has expectation 0.',
      'verl: `kl` or `k1`. slime: `--kl-loss-type k1`.',
    ),
    'k2': entry.Description(
      'x^2 / 2',
      _SCHULMAN,
      entry.CODE,
      'The term is in the loss: on policy, the gradient of k2 is the gradient '
      'of the divergence.',
      'verl: `mse` or `k2`. slime: `--kl-loss-type k2`.',
    ),
    'k3': entry.Description(
      'exp(-x) - 1 + x',
      _SCHULMAN,
      entry.CODE,
      'The term is in the loss: k3 is never negative and has a low variance. '
      'On policy, its gradient is that of KL(ref || pi), not of KL(pi || ref). '
      'It is unbounded: x = -10 gives 22,015.',
      'TRL: `beta`. slime: `--kl-loss-type k3`.',
    ),
    'k3_clamped': entry.Description(
      'min(exp(-x) - 1 + x, 10)',
      _SCHULMAN + ' The clamp is from verl.',
      entry.CODE,
      'Like k3, but a token far from the reference has no gradient instead of '
      'a huge one.',
      'verl, Search-R1: `low_var_kl`.',
    ),
  },
  'kl.controller': {
    'fixed': entry.Description(
      'coefficient <- coefficient',
      '—',
      entry.PLAIN,
      'The default.',
    ),
    'adaptive': entry.Description(
      """
      coefficient <- coefficient (1 + e * trajectories / horizon)
      e = clip(KL per trajectory / target - 1, -0.2, 0.2)
      """,
      'arXiv 1909.08593, Eq. 4.',
      entry.CODE,
      'The divergence should stay near a known value. The coefficient is '
      'saved in checkpoints.',
      'verl: `kl_ctrl.type=adaptive`.',
    ),
  },
}

CHOICES = {'advantage.name': _NAMES} | _OPTIONS | _KL
