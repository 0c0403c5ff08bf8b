"""Checks configs: `check` lists everything that is wrong at once.

`RULES` holds a rule for each key on its own, `configs/relations.py` the rules
that concern several keys. Nothing here touches a device.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import math
import re
from typing import Any

from stppo_jax import buckets
from stppo_jax import settings
from stppo_jax.configs import alarms
from stppo_jax.configs import algorithms
from stppo_jax.configs import base
from stppo_jax.configs import relations
from stppo_jax.data import kinds
from stppo_jax.envs import environments
from stppo_jax.envs import rewards
from stppo_jax.envs import tools
from stppo_jax.retrieval import dialects


def _one_of(*choices: str) -> settings.Rule:
  return settings.Rule(
    lambda value: value in choices, 'one of ' + ', '.join(choices)
  )


def _compiles(pattern: str) -> bool:
  try:
    re.compile(pattern)
  except re.error:
    return False
  return True


def _are_keys(names: Sequence[str]) -> bool:
  """Returns whether all names are keys or sections of the config."""
  keys = [f'{key}.' for key in settings.flatten(base.get_config())]
  return all(
    isinstance(name, str)
    # The options of an algorithm depend on its choices.
    and (
      name.startswith('algorithm.')
      or any(key.startswith(f'{name}.') for key in keys)
    )
    for name in names
  )


_POSITIVE = settings.Rule(lambda x: 0 < x < math.inf, 'greater than 0')
_AT_LEAST_2 = settings.Rule(lambda x: x >= 2, '2 or greater')
_NOT_NEGATIVE = settings.Rule(lambda x: 0 <= x < math.inf, '0 or greater')
_STEPS = settings.Rule(
  lambda x: (
    len(x) == 2 and all(type(n) is int for n in x) and 0 <= x[0] <= x[1]
  ),
  'two whole numbers that do not decrease: the first step to trace, and the '
  'first one that is not traced any more',
)
_FRACTION = settings.Rule(lambda x: 0 <= x <= 1, 'in [0, 1]')
_POSITIVE_FRACTION = settings.Rule(lambda x: 0 < x <= 1, 'in (0, 1]')
_BELOW_1 = settings.Rule(lambda x: 0 <= x < 1, 'in [0, 1)')
_FINITE = settings.Rule(math.isfinite, 'a finite number')
_AXIS = settings.Rule(
  lambda x: x == -1 or x > 0, 'greater than 0, or -1 for all remaining devices'
)
_EVEN = settings.Rule(lambda x: x > 0 and x % 2 == 0, 'even and greater than 0')
_HOPS = settings.Rule(
  lambda x: len(x) > 0 and all(h in (1, 2) for h in x),
  'some of 1 and 2, such as (1, 2)',
)
_TOKEN_IDS = settings.Rule(
  lambda ids: all(type(i) is int and i >= 0 for i in ids),
  'token ids, such as (2, 7)',
)
_NUMBER = settings.Rule(lambda x: not math.isnan(x), 'a number, inf or -inf')
_REGEX = settings.Rule(_compiles, 'a regular expression')

_OPTIMIZER = {
  # Adam moves a weight by about the rate in each update, so a larger rate
  # leaves nothing of a model.
  'learning_rate': _FRACTION,
  'warmup_updates': _NOT_NEGATIVE,
  'b1': _BELOW_1,
  'b2': _BELOW_1,
  'eps': _POSITIVE,
  'weight_decay': _FRACTION,
  'max_grad_norm': _POSITIVE,
  'skip_grad_norm': _NOT_NEGATIVE,
}
_SIZES = ('hidden_size', 'intermediate_size', 'num_layers', 'num_heads')

RULES: Mapping[str, settings.Rule] = {
  'seed': _NOT_NEGATIVE,
  'num_steps': _POSITIVE,
  'title': settings.Rule(str.isprintable, 'one printable line'),
  'init_from': settings.Rule(str.isprintable, 'one printable line'),
  'model.reference_memory': _one_of('device', 'host'),
  'model.eos_token_ids': _TOKEN_IDS,
  'model.dtype': _one_of('float32', 'bfloat16'),
  **{f'model.{size}': _POSITIVE for size in _SIZES},
  'model.num_kv_heads': _POSITIVE,
  'model.head_dim': _EVEN,  # rotary pairs
  'model.rope_theta': _POSITIVE,
  'model.rms_norm_eps': _POSITIVE,
  'model.num_experts': _NOT_NEGATIVE,
  'model.num_experts_per_tok': _NOT_NEGATIVE,
  'model.moe_intermediate_size': _NOT_NEGATIVE,
  'model.router_aux_loss_coef': _NOT_NEGATIVE,
  'model.moe': _one_of('auto', 'dense', 'grouped'),
  'model.attention': _one_of('auto', 'xla', 'cudnn', 'splash'),
  'model.lora.rank': _NOT_NEGATIVE,
  'model.lora.alpha': _POSITIVE,
  'model.lora.targets': _REGEX,
  'model.value_backbone': _one_of('own', 'shared'),
  'model.scan_unroll': _POSITIVE,
  'mesh.data': _AXIS,
  'mesh.fsdp': _AXIS,
  'mesh.tensor': _AXIS,
  'mesh.collect_fraction': _BELOW_1,
  'data.name': _one_of(*kinds.KINDS),
  'data.tokenizer_vocab_size': settings.Rule(
    lambda x: x > 256, 'greater than 256, the number of bytes'
  ),
  'data.synthetic_wiki.seed': _NOT_NEGATIVE,
  'data.synthetic_wiki.hops': _HOPS,
  'data.synthetic_wiki.entities_per_type': _AT_LEAST_2,
  'data.synthetic_wiki.name_pieces': _AT_LEAST_2,
  'data.synthetic_wiki.distractors': _NOT_NEGATIVE,
  'data.synthetic_wiki.think_words': _NOT_NEGATIVE,
  'data.arithmetic.max_number': _AT_LEAST_2,
  'data.games.count': _NOT_NEGATIVE,
  'env.name': _one_of(*environments.ENVIRONMENTS),
  'env.max_turns': _NOT_NEGATIVE,
  'env.max_turn_tokens': _POSITIVE,
  'env.max_observation_tokens': _POSITIVE,
  'env.max_length': _POSITIVE,
  'env.rewards.exact_match': _FINITE,
  'env.rewards.substring_match': _FINITE,
  'env.rewards.f1': _FINITE,
  'env.rewards.format': _FINITE,
  'env.rewards.search_penalty': _NOT_NEGATIVE,
  'env.rewards.overlong': _NOT_NEGATIVE,
  'env.overlong_fraction': _POSITIVE_FRACTION,
  'env.rewards.turn_search': _FINITE,
  'env.rewards.turn_answer_found': _FINITE,
  'env.rewards.solved': _FINITE,
  'env.rewards.turn_progress': _FINITE,
  'env.reward_scope': _one_of(*rewards.SCOPES),
  'env.tools.names': settings.Rule(
    lambda names: set(names) <= set(tools.TOOLS),
    'some of ' + ', '.join(tools.TOOLS),
  ),
  'env.tools.mcp_servers': settings.Rule(
    lambda servers: all(isinstance(x, str) and x.strip() for x in servers),
    "addresses or commands, such as ('http://localhost:8000/mcp',)",
  ),
  'env.tools.timeout': _POSITIVE,
  'env.textworld.rooms': _POSITIVE,
  'env.textworld.objects': _NOT_NEGATIVE,
  'env.textworld.quest_length': _POSITIVE,
  'env.gymnasium.timeout': _POSITIVE,
  'retrieval.dialect': _one_of(*dialects.DIALECTS),
  'retrieval.topk': _POSITIVE,
  'retrieval.timeout': _POSITIVE,
  'retrieval.retries': _NOT_NEGATIVE,
  'retrieval.start_grace': _NOT_NEGATIVE,
  'retrieval.max_failure_rate': _FRACTION,
  'retrieval.max_queries_per_request': _POSITIVE,
  'retrieval.faults.rate': _FRACTION,
  'retrieval.faults.seed': _NOT_NEGATIVE,
  'rollout.trajectories_per_step': _POSITIVE,
  'rollout.group_size': _POSITIVE,
  'rollout.resample_rounds': _NOT_NEGATIVE,
  'rollout.temperature': _POSITIVE,
  'rollout.top_k': _NOT_NEGATIVE,
  'rollout.top_p': _POSITIVE_FRACTION,
  'rollout.min_p': settings.Rule(lambda x: 0 <= x < 1, 'in [0, 1)'),
  'rollout.slots': _NOT_NEGATIVE,
  'rollout.engine': _one_of('local', 'remote'),
  'rollout.remote.timeout': _POSITIVE,
  'rollout.remote.retries': _NOT_NEGATIVE,
  'rollout.remote.concurrency': _POSITIVE,
  'rollout.batch_rows': _NOT_NEGATIVE,
  'rollout.lanes': _POSITIVE,
  'rollout.tensor': _NOT_NEGATIVE,
  'rollout.decode_chunk': _POSITIVE,
  'rollout.lookahead': _NOT_NEGATIVE,
  'rollout.cache_blocks': _POSITIVE,
  'rollout.cache_dtype': _one_of('model', 'int8'),
  'rollout.early_exit': _FRACTION,
  'rollout.extend_chunk': _POSITIVE,
  'rollout.length_bucket': _POSITIVE,
  'rollout.min_valid_fraction': _FRACTION,
  'rollout.refill_rounds': _NOT_NEGATIVE,
  'rollout.steps_ahead': _NOT_NEGATIVE,
  'rollout.mismatch_limit': settings.Rule(
    lambda x: x == -1 or 0 <= x < math.inf, '0 or greater, or -1'
  ),
  'updates.minibatch_size': _POSITIVE,
  'updates.num_epochs': _POSITIVE,
  'updates.kl_stop': _NOT_NEGATIVE,
  'updates.microbatch_size': _NOT_NEGATIVE,
  'updates.core_rows': _NOT_NEGATIVE,
  'updates.core_lengths': _POSITIVE,
  'updates.max_skipped': _NOT_NEGATIVE,
  'updates.head_chunk': _NOT_NEGATIVE,
  'updates.remat': _one_of('none', 'all_dots', 'dots', 'full'),
  'updates.old_policy': _one_of('sampled', 'current'),
  'updates.routing_replay': _one_of('nowhere', 'trainer', 'sampler'),
  **{f'policy_optimizer.{key}': rule for key, rule in _OPTIMIZER.items()},
  **{f'value_optimizer.{key}': rule for key, rule in _OPTIMIZER.items()},
  'loss.entropy_coefficient': _NOT_NEGATIVE,
  'loss.load_balance_coefficient': _NOT_NEGATIVE,
  'loss.value_clip': _POSITIVE,
  'loss.value_coefficient': _POSITIVE,
  'loss.value_warmup_steps': _NOT_NEGATIVE,
  'sft.num_steps': _POSITIVE,
  'sft.batch_size': _POSITIVE,
  'sft.error_rate': _FRACTION,
  'sft.clean_one_hop_steps': _NOT_NEGATIVE,
  'sft.clean_steps': _NOT_NEGATIVE,
  **{f'sft.optimizer.{key}': rule for key, rule in _OPTIMIZER.items()},
  'preference.name': _one_of('tdpo1', 'tdpo2'),
  'preference.beta': _POSITIVE,
  'preference.alpha': _NOT_NEGATIVE,
  'preference.batch_size': _POSITIVE,
  'preference.microbatch_size': _NOT_NEGATIVE,
  'preference.num_epochs': _POSITIVE,
  'evaluate.every': _NOT_NEGATIVE,
  'evaluate.num_questions': _POSITIVE,
  'checkpoint.every': _POSITIVE,
  'checkpoint.keep': _POSITIVE,
  'checkpoint.keep_every': _NOT_NEGATIVE,
  'preemption.grace': _NOT_NEGATIVE,
  'resume.allow_change': settings.Rule(
    _are_keys, "keys or sections of the config, such as ('seed',)"
  ),
  'writer.trackers': settings.Rule(
    lambda names: set(names) <= {'wandb', 'trackio'}, 'some of wandb, trackio'
  ),
  'writer.trajectories': _NOT_NEGATIVE,
  'writer.token_details': _NOT_NEGATIVE,
  'writer.evaluation': _NOT_NEGATIVE,
  'writer.samples': _NOT_NEGATIVE,
  'writer.keep_files': _NOT_NEGATIVE,
  'writer.keep_lines': _NOT_NEGATIVE,
  'writer.copy_to': settings.Rule(
    lambda place: not place or buckets.is_address(place),
    "an address such as gs://bucket/run, or ''",
  ),
  **{f'alarms.{name}': _NUMBER for name in alarms.THRESHOLDS},
  'alarms.stop': settings.Rule(
    lambda names: set(names) <= set(alarms.THRESHOLDS),
    'some of ' + ', '.join(alarms.THRESHOLDS),
  ),
  'alarms.stop_after': _POSITIVE,
  'profile.steps': _STEPS,
}


def check(config: base.Config) -> list[str]:
  """Returns all errors of a config, one line each: `key=value: must be ...`.

  The keys and their types must be those of `configs/base.py`. Rules and
  relations are then checked on the values that have the right type.
  """
  values = settings.flatten(config)
  expected = settings.flatten(base.get_config())
  options = _pop_algorithm(values)
  _pop_algorithm(expected)
  errors = []
  for key in sorted(values.keys() - expected.keys()):
    errors.append(f'{key}={values.pop(key)!r}: no such key in configs/base.py')
  for key in sorted(expected.keys() - values.keys()):
    errors.append(f'{key}: missing')
  for key, value in list(values.items()):
    if not _same_type(value, expected[key]):
      kind = type(expected[key]).__name__
      errors.append(f'{key}={value!r}: must be of type {kind}')
      del values[key]
  for key, rule in RULES.items():
    if key in values and not rule.holds(values[key]):
      errors.append(f'{key}={values[key]!r}: must be {rule.allowed}')
      del values[key]
  problems = _check_algorithm(config)
  if not problems:
    values |= options
  for keys, relation in relations.RELATIONS:
    if all(key in values for key in keys):
      errors += relation(*(values[key] for key in keys))
  return errors + problems


def _pop_algorithm(values: dict[str, Any]) -> dict[str, Any]:
  """Removes and returns the options of the algorithm.

  Which options there are depends on its names: `rl/algorithm.py` checks them.
  """
  keys = [key for key in values if key.startswith('algorithm.')]
  return {key: values.pop(key) for key in keys}


def _same_type(value: Any, like: Any) -> bool:
  if isinstance(like, bool) or isinstance(value, bool):
    return isinstance(like, bool) and isinstance(value, bool)
  if isinstance(like, float):
    return isinstance(value, int | float)
  if isinstance(like, tuple | list):
    return isinstance(value, tuple | list)
  return isinstance(value, type(like))


def _check_algorithm(config: base.Config) -> list[str]:
  if 'algorithm' not in config:
    return ['algorithm: missing']
  if config.algorithm.to_dict() in algorithms.ALGORITHMS.values():
    return []  # a test has checked the table
  # Imported late: this check needs `rl` and therefore jax (its code, not its
  # devices), while all other errors are found in a tenth of a second.
  from stppo_jax.rl import algorithm

  return algorithm.check_algorithm(config.algorithm)
