"""The config keys that are younger than some runs.

Each has the value with which the runs behaved that have no such key in their
record. Whoever compares the records of runs fills it in.
"""

from typing import Any

LATER_KEYS: dict[str, Any] = {
  'init_from': '',
  'env.name': 'search',
  'env.reward_function': '',
  'model.eos_token_ids': [],
  'env.rewards.overlong': 0.0,
  'env.overlong_fraction': 0.2,  # not read if overlong is 0
  'retrieval.record': '',
  'retrieval.replay': '',
  'retrieval.faults.rate': 0.0,
  'retrieval.faults.seed': 0,
  'mesh.collect_fraction': 0.0,
  'rollout.refill_rounds': 0,
  'rollout.tensor': 0,
  'rollout.cache_dtype': 'model',
  'profile.steps': [0, 0],
  'updates.kl_stop': 0.0,
  'updates.core_lengths': 1,
  'policy_optimizer.skip_grad_norm': 0.0,
  'value_optimizer.skip_grad_norm': 0.0,
  'sft.optimizer.skip_grad_norm': 0.0,
  # Not read with the data and the environments that those runs have.
  'data.arithmetic.max_number': 20,
  'env.tools.names': ['calculator'],
  'env.tools.mcp_servers': [],
  'env.tools.timeout': 10.0,
  'data.games.count': 0,
  'env.rewards.solved': 1.0,
  'env.rewards.turn_progress': 0.0,
  'env.textworld.rooms': 2,
  'env.textworld.objects': 4,
  'env.textworld.quest_length': 2,
  'env.textworld.list_commands': True,
  'env.gymnasium.make': '',
  'env.gymnasium.timeout': 60.0,
  'algorithm.advantage.critic_tokens': 'policy',
  'algorithm.advantage.outcome_counts': 'per_trajectory',
}
