"""The results of tunix for the batch; see make_family.py.

Its losses ask a model for log-probabilities and values: they get ours. They
cast to float32, which is lifted.
"""

import importlib.util
import sys
import types

import family_batch
import jax
import jax.numpy as jnp
import numpy as np

B, L, OPTIONS = family_batch.B, family_batch.L, family_batch.OPTIONS


class _Double:
  """`jax.numpy` with float64 as its float32, so that a cast does not round."""

  def __getattr__(self, name):
    return getattr(jnp, 'float64' if name == 'float32' else name)


def _import_tunix():
  """Returns its `algo_core` and `common` without the package's own imports."""
  package = types.ModuleType('tunix')
  spec = importlib.util.find_spec('tunix')
  package.__path__ = list(spec.submodule_search_locations)
  sys.modules['tunix'] = package
  from tunix.rl import algo_core
  from tunix.rl import common

  algo_core.jnp = common.jnp = _Double()
  algo_core.nnx = types.SimpleNamespace(split=lambda model: (None, None))
  return algo_core, common


def _policies(algo_core, common, x):
  example = types.SimpleNamespace(
    prompt_ids=None,
    completion_ids=None,
    completion_mask=x.loss_mask_BL.astype(jnp.float64),
    advantages=x.advantages_BL,
    old_per_token_logps=x.old_logprobs_BL,
    ref_per_token_logps=x.ref_logprobs_BL,
  )
  grpo = {
    'loss_algo': 'grpo',
    'beta': OPTIONS['kl_coefficient'],
    'epsilon': OPTIONS['low'],
    'epsilon_high': OPTIONS['high'],
    'temperature': 1.0,
    'kl_loss_mode': 'low_var_kl',
    'kl_clamp_value': None,
  }
  near = {
    'epsilon': OPTIONS['sequence_low'],
    'epsilon_high': OPTIONS['sequence_high'],
  }
  sequence_mean = {'loss_agg_mode': 'sequence-mean-token-mean'}
  calls = {
    'ppo': (
      algo_core.ppo_policy_loss_fn,
      {
        'epsilon_low': OPTIONS['low'],
        'epsilon_high': OPTIONS['high'],
        'epsilon_c': OPTIONS['dual_clip'],
        'entropy_coef': None,
        'kl_coef': OPTIONS['kl_coefficient'],
      },
    ),
    'token_mean': (
      algo_core.grpo_loss_fn,
      grpo | {'loss_agg_mode': 'token-mean', 'kl_loss_mode': 'mse_kl'},
    ),
    'grpo': (algo_core.grpo_loss_fn, grpo | sequence_mean),
    'constant_length': (
      algo_core.grpo_loss_fn,
      grpo | {'loss_agg_mode': 'sequence-mean-token-scale'},
    ),
    'sequence_sum': (
      algo_core.grpo_loss_fn,
      grpo | {'loss_agg_mode': 'seq-mean-token-sum'},
    ),
    'gspo_token': (
      algo_core.grpo_loss_fn,
      grpo | sequence_mean | near | {'loss_algo': 'gspo-token', 'beta': 0.0},
    ),
  }
  results = {}
  for case, (function, options) in calls.items():

    def loss(logprobs_BL):
      common.compute_per_token_logps = lambda *_, **__: (
        logprobs_BL,
        jnp.zeros((B, L, 2)),
      )
      config = types.SimpleNamespace(**options)
      return function(None, example, config, 0, 0)[0]

    value, gradient_BL = jax.value_and_grad(loss)(x.logprobs_BL)
    results[case] = {'loss': value, 'gradient_BL': gradient_BL}
  return results


def _values_and_advantages(algo_core, common, x):
  example = types.SimpleNamespace(
    prompt_ids=None,
    completion_ids=jnp.zeros((B, L)),
    completion_mask=x.loss_mask_BL,
    old_values=x.old_values_BL,
    returns=x.returns_BL,
  )

  def value_loss(values_BL):
    # Its V before token l stands at index l - 1.
    common.compute_score = lambda *_, **__: jnp.pad(values_BL, ((0, 0), (0, 1)))
    return algo_core.ppo_value_loss_fn(
      None, example, OPTIONS['value_clip'], 0, 0
    )[0]

  value, gradient_BL = jax.value_and_grad(value_loss)(x.values_BL)
  rewards_BL = jnp.where(x.loss_mask_BL, x.rewards_BL, 0)
  advantages_BL, returns_BL = algo_core.compute_gae_advantages(
    rewards_BL,
    x.old_values_BL,
    x.loss_mask_BL,
    OPTIONS['gamma'],
    OPTIONS['lambda_'],
  )
  results = {
    'value_loss': {'loss': value, 'gradient_BL': gradient_BL},
    'gae_decayed': {'advantages_BL': advantages_BL, 'returns_BL': returns_BL},
  }
  outcomes_B = np.asarray(rewards_BL.sum(1)[:6])  # the groups of three
  for case, function in {
    'group_normalized': algo_core.compute_advantages,
    'group_centered': algo_core.compute_drgrpo_advantages,
    'leave_one_out': algo_core.compute_rloo_advantages,
  }.items():
    results[case] = {'advantages_B': np.asarray(function(outcomes_B, 3))}
  return results


def make(arrays):
  algo_core, common = _import_tunix()
  x = types.SimpleNamespace(
    **{name: jnp.asarray(array) for name, array in arrays.items()}
  )
  return _policies(algo_core, common, x) | _values_and_advantages(
    algo_core, common, x
  )
