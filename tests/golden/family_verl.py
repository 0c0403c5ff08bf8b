"""The results of verl for the batch; see make_family.py."""

import types

import family_batch
import numpy as np
import torch
from verl.trainer.ppo import core_algos as losses
from verl.trainer.ppo import rollout_corr_helper as mismatch
from verl.utils import torch_functional
from verl.workers import config as verl_config

OPTIONS = family_batch.OPTIONS


def _actor(low, high, c=family_batch.NEVER, **options):
  return verl_config.ActorConfig(
    strategy='fsdp',
    rollout_n=1,
    ppo_micro_batch_size_per_gpu=1,
    clip_ratio_low=low,
    clip_ratio_high=high,
    clip_ratio_c=c,
    tau_pos=OPTIONS['tau_positive'],
    tau_neg=OPTIONS['tau_negative'],
    policy_loss=verl_config.PolicyLossConfig(**options),
  )


def _policy(
  x,
  name,
  mode,
  *,
  low=OPTIONS['low'],
  high=OPTIONS['high'],
  c=family_batch.NEVER,
  weights=None,
  mask=None,
  **options,
):
  return losses.get_policy_loss_fn(name)(
    old_log_prob=x.old_logprobs_BL,
    log_prob=x.logprobs_BL,
    advantages=x.advantages_BL,
    response_mask=x.loss_mask_BL if mask is None else mask,
    loss_agg_mode=mode,
    config=_actor(low, high, c, **options),
    rollout_is_weights=weights,
  )


# How a loss counts the tokens whose gradient is cut. CISPO counts the clipped
# weights, which cut nothing.
_CUT = {
  'vanilla': ('actor/pg_clipfrac', 'actor/pg_clipfrac_lower'),
  'gspo': ('actor/pg_clipfrac', 'actor/pg_clipfrac_lower'),
  'dppo_tv': ('actor/pg_clipfrac',),
  'dppo_kl': ('actor/pg_clipfrac',),
}


def _policies(x):
  """Returns results that differ in ratio, bounds, objective or aggregate."""
  sequence = {'low': OPTIONS['sequence_low'], 'high': OPTIONS['sequence_high']}
  geometric = OPTIONS['geometric_clip']
  probability, divergence = (
    {
      'low': OPTIONS[f'{kind}_low'],
      'high': OPTIONS[f'{kind}_high'],
      'c': OPTIONS['weight_cap'],
    }
    for kind in ('probability', 'divergence')
  )
  kl_cov = {
    'kl_cov_ratio': OPTIONS['kl_cov_share'],
    'ppo_kl_coef': OPTIONS['kl_cov_coefficient'],
  }
  # All of the tokens between the bounds: then nothing is random.
  clip_cov = {
    'clip_cov_ratio': 1.0,
    'clip_cov_lb': OPTIONS['clip_cov_least'],
    'clip_cov_ub': OPTIONS['clip_cov_most'],
  }
  calls = {
    'token_mean': ('vanilla', 'token-mean', {}),
    'sequence_mean': ('vanilla', 'seq-mean-token-mean', {}),
    'sequence_sum': ('vanilla', 'seq-mean-token-sum', {}),
    'constant_length': ('vanilla', 'seq-mean-token-sum-norm', {}),
    'dual_clip': ('vanilla', 'token-mean', {'c': OPTIONS['dual_clip']}),
    'gspo_token': ('gspo', 'seq-mean-token-mean', sequence),
    'turn_token': ('gspo', 'token-mean', {}),
    'turn_token_mean': ('gspo', 'seq-mean-token-mean', {}),
    'cispo': ('cispo', 'token-mean', {'low': 1.0}),
    # These replace the clipping of the ratio.
    'gmpo': ('geo_mean', 'token-mean', {'low': geometric, 'high': geometric}),
    'dppo_tv': ('dppo_tv', 'token-mean', probability),
    'dppo_kl': ('dppo_kl', 'token-mean', divergence),
    'sapo': ('sapo', 'token-mean', {}),
    'kl_cov': ('kl_cov', 'token-mean', kl_cov),
    'clip_cov': ('clip_cov', 'token-mean', clip_cov),
  }
  results = {}
  for case, (name, mode, options) in calls.items():
    cut = family_batch.by_turn if case.startswith('turn_') else lambda x: x
    call = lambda x: _policy(cut(x), name, mode, **options)
    results[case] = family_batch.differentiated(lambda x: call(x)[0], x)
    if name in _CUT:
      metrics = call(x)[1]
      results[case]['cut_fraction'] = sum(metrics[key] for key in _CUT[name])
  return results


def _reinforce(x, weights, mode):
  loss, _ = losses.compute_policy_loss_reinforce(
    rollout_log_prob=x.sampler_logprobs_BL,
    log_prob=x.logprobs_BL,
    advantages=x.advantages_BL,
    response_mask=x.loss_mask_BL,
    loss_agg_mode=mode,
    config=_actor(OPTIONS['low'], OPTIONS['high']),
    rollout_is_weights=weights,
  )
  return loss


def _weights(log_ratio_BL, x, level, threshold):
  weights_BL, _ = mismatch.compute_rollout_correction_weights(
    log_ratio_BL.detach(), x.loss_mask_BL, level, threshold
  )
  return weights_BL


def _weighted(x):
  """Returns results of objectives whose ratio is a weight."""
  mode = 'seq-mean-token-sum'
  behind = x.logprobs_BL - x.old_logprobs_BL  # staleness
  both = x.logprobs_BL - x.sampler_logprobs_BL  # and mismatch
  # Which tokens PPO would cut: those whose gradient is 0.
  plain = family_batch.differentiated(
    lambda x: _policy(x, 'vanilla', 'token-mean')[0], x
  )
  kept = torch.from_numpy(plain['gradient_BL'] != 0)
  weights = {
    'reinforce': None,
    'unclipped': _weights(behind, x, 'token', family_batch.NEVER),
    'unclipped_product': _weights(both, x, 'token', OPTIONS['cap']),
    'minirl': kept * _weights(both, x, 'token', OPTIONS['minirl_cap']),
  }
  return {
    case: family_batch.differentiated(lambda x: _reinforce(x, weight, mode), x)
    for case, weight in weights.items()
  }


def _corrections(x):
  """Returns results of token PPO with a mismatch correction."""
  log_k_BL = x.old_logprobs_BL - x.sampler_logprobs_BL
  everything_below = f'{1 / family_batch.NEVER}_{OPTIONS["cap"]}'
  weights = {
    'tis': _weights(log_k_BL, x, 'token', OPTIONS['cap']),
    'tis_sequence': _weights(log_k_BL, x, 'sequence', OPTIONS['cap']),
    'mis': _weights(log_k_BL, x, 'token', everything_below),
    'mis_sequence': _weights(log_k_BL, x, 'sequence', everything_below),
    'icepop': _weights(
      log_k_BL, x, 'token', '{icepop_least}_{icepop_most}'.format(**OPTIONS)
    ),
  }
  policy = lambda x, **kind: _policy(x, 'vanilla', 'token-mean', **kind)[0]
  results = {
    case: family_batch.differentiated(lambda x: policy(x, weights=weight), x)
    for case, weight in weights.items()
  }
  near_BL, _ = mismatch.compute_rollout_rejection_mask(
    log_k_BL,
    x.loss_mask_BL,
    'seq_mean_k1',
    f'{np.exp(-OPTIONS["band"])}_{np.exp(OPTIONS["band"])}',
  )
  for case, weight in {'geo_rs': None, 'tis_geo_rs': weights['tis']}.items():
    results[case] = family_batch.differentiated(
      lambda x: policy(x, weights=weight, mask=near_BL), x
    )
    results[case]['kept_BL'] = near_BL.numpy() > 0
  return results


def _kl_and_entropy(x):
  """Returns results with penalties in the loss, and the KL estimates."""
  results = {}
  for name in ('k1', 'k2', 'k3'):

    def loss(x, name=name):
      kl_BL = losses.kl_penalty(x.logprobs_BL, x.ref_logprobs_BL, name)
      kl = losses.agg_loss(kl_BL, x.loss_mask_BL, 'token-mean')
      entropy = losses.agg_loss(x.entropy_BL, x.loss_mask_BL, 'token-mean')
      policy, _ = _policy(x, 'vanilla', 'token-mean')
      return (
        policy
        + OPTIONS['kl_coefficient'] * kl
        - OPTIONS['entropy_coefficient'] * entropy
      )

    results[f'kl_{name}'] = family_batch.differentiated(loss, x) | {
      'kl_BL': losses.kl_penalty(x.logprobs_BL, x.ref_logprobs_BL, name).numpy()
    }
  results['kl_reward'] = {
    'rewards_BL': losses.compute_rewards(
      x.rewards_BL,
      x.old_logprobs_BL,
      x.ref_logprobs_BL,
      OPTIONS['kl_coefficient'],
    ).numpy()
  }
  controller = losses.AdaptiveKLController(0.1, 6.0, 1000)
  coefficients = []
  for kl in (6.0, 6.6, 60.0, 5.0, 0.0):
    controller.update(kl, 512)
    coefficients.append(controller.value)
  results['adaptive_kl'] = {'coefficients': np.asarray(coefficients)}
  return results


def _values_and_advantages(x):
  def value_loss(x):
    loss, _ = losses.compute_value_loss(
      x.values_BL,
      x.returns_BL,
      x.old_values_BL,
      x.loss_mask_BL,
      OPTIONS['value_clip'],
    )
    return loss

  results = {
    'value_loss': family_batch.differentiated(value_loss, x, 'values_BL'),
    'whiten': {
      'white_BL': torch_functional.masked_whiten(
        x.values_BL, x.loss_mask_BL
      ).numpy()
    },
  }
  rewards_BL = x.rewards_BL * x.loss_mask_BL
  decayed = (OPTIONS['gamma'], OPTIONS['lambda_'])
  for case, (gamma, lambda_) in {
    'gae': (1.0, 1.0),
    'gae_decayed': decayed,
  }.items():
    advantages_BL, returns_BL = losses.compute_gae_advantage_return(
      rewards_BL, x.old_values_BL, x.loss_mask_BL, gamma, lambda_
    )
    results[case] = {
      'advantages_BL': advantages_BL.numpy(),
      'returns_BL': returns_BL.numpy(),
    }
  config = types.SimpleNamespace(gamma=OPTIONS['gamma'])
  common = {
    'token_level_rewards': rewards_BL,
    'response_mask': x.loss_mask_BL,
    'config': config,
  }
  grouped = common | {'index': x.group_ids_B.numpy()}
  grpo = losses.compute_grpo_outcome_advantage
  for case, (advantages_BL, _) in {
    'group_normalized': grpo(**grouped),
    'group_centered': grpo(**grouped, norm_adv_by_std_in_grpo=False),
    'leave_one_out': losses.compute_rloo_outcome_advantage(**grouped),
    'monte_carlo': losses.compute_reinforce_plus_plus_outcome_advantage(
      **common
    ),
  }.items():
    results[case] = {'advantages_BL': advantages_BL.numpy()}
  return results


def make(arrays):
  x = family_batch.tensors(arrays)
  return (
    _policies(x)
    | _weighted(x)
    | _corrections(x)
    | _kl_and_entropy(x)
    | _values_and_advantages(x)
  )
