"""The results of trl for the batch; see make_family.py.

Its losses are methods of trainers that ask a model for log-probabilities:
they get an object that returns ours.
"""

import collections
import types

import family_batch
import torch
from trl.trainer import grpo_trainer
from trl.trainer import rloo_trainer

OPTIONS = family_batch.OPTIONS


def _trainer(x, **attributes):
  """Returns what a loss asks of its trainer, with more attributes."""
  same = lambda tensor, **_: tensor
  logprobs_and_entropy = x.logprobs_BL, x.entropy_BL, None
  return types.SimpleNamespace(
    _get_per_token_logps_and_entropies=lambda *_, **__: logprobs_and_entropy,
    _metrics={'eval': collections.defaultdict(list)},
    accelerator=types.SimpleNamespace(
      num_processes=1, sync_gradients=False, gather=same, reduce=same
    ),
    aux_loss_enabled=False,
    model=types.SimpleNamespace(training=False),
    **{
      'epsilon_low': OPTIONS['low'],
      'epsilon_high': OPTIONS['high'],
      **attributes,
    },
  )


def _inputs(x, advantages, **more):
  ids_BL = torch.zeros(x.loss_mask_BL.shape, dtype=torch.int64)
  return {
    'prompt_ids': ids_BL[:, :1],
    'prompt_mask': ids_BL[:, :1],
    'completion_ids': ids_BL,
    'completion_mask': x.loss_mask_BL,
    'advantages': advantages,
    **more,
  }


def _loss(x, **options):
  """Returns `GRPOTrainer._compute_loss` without gradient accumulation."""
  k_positive, lambda_positive = OPTIONS['gamma_positive']
  k_negative, lambda_negative = OPTIONS['gamma_negative']
  arguments = types.SimpleNamespace(
    use_bias_correction_kl=False,
    delta=options.pop('delta', None),
    sapo_temperature_pos=OPTIONS['tau_positive'],
    sapo_temperature_neg=OPTIONS['tau_negative'],
    vespo_k_pos=k_positive,
    vespo_lambda_pos=lambda_positive,
    vespo_k_neg=k_negative,
    vespo_lambda_neg=lambda_negative,
  )
  trainer = _trainer(
    x,
    _entropy_bonus_enabled='entropy_coef' in options,
    args=arguments,
    max_completion_length=OPTIONS['max_response_tokens'],
    off_policy_mask_threshold=None,
    top_entropy_quantile=1.0,
    use_adaptive_entropy=False,
    use_vllm=False,
    get_gamma_weights=grpo_trainer.GRPOTrainer.get_gamma_weights,
    **{'beta': 0.0, 'importance_sampling_level': 'token', **options},
  )
  inputs = _inputs(
    x,
    x.advantages_BL,
    old_per_token_logps=x.old_logprobs_BL,
    ref_per_token_logps=x.ref_logprobs_BL,
    num_items_in_batch=x.loss_mask_BL.sum(),
  )
  return grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)


def _rloo_loss(x):
  advantages_B = torch.where(x.loss_mask_BL.any(1), x.advantages_B, 0)
  old_B = (x.old_logprobs_BL * x.loss_mask_BL).sum(1)
  inputs = _inputs(x, advantages_B, old_logps=old_B)
  return rloo_trainer.RLOOTrainer._compute_loss(_trainer(x), None, inputs)


def make(arrays):
  sequence = {'importance_sampling_level': 'sequence'}
  near = {
    'epsilon_low': OPTIONS['sequence_low'],
    'epsilon_high': OPTIONS['sequence_high'],
  }
  calls = {
    'grpo': {'loss_type': 'grpo', 'beta': OPTIONS['kl_coefficient']},
    'bnpo': {
      'loss_type': 'bnpo',
      'entropy_coef': OPTIONS['entropy_coefficient'],
    },
    'dr_grpo': {'loss_type': 'dr_grpo'},
    'dapo': {'loss_type': 'dapo'},
    'cispo': {'loss_type': 'cispo', 'epsilon_high': 1 + OPTIONS['high']},
    'two_sided': {'loss_type': 'bnpo', 'delta': OPTIONS['dual_clip']},
    'gspo': {'loss_type': 'grpo', **sequence, **near},
    'luspo': {'loss_type': 'luspo', **sequence, **near},
    'sapo': {'loss_type': 'sapo'},
    'vespo': {'loss_type': 'vespo'},
    'turn': {'loss_type': 'bnpo', **sequence},
    'turn_mean': {'loss_type': 'grpo', **sequence},
  }
  x = family_batch.tensors(arrays)
  results = {}
  for case, options in calls.items():
    cut = family_batch.by_turn if case.startswith('turn') else lambda x: x
    results[case] = family_batch.differentiated(
      lambda x: _loss(cut(x), **options), x
    )
  results['rloo'] = family_batch.differentiated(_rloo_loss, x)
  return results
