"""Describes each config key, and checks the values of a config.

A key has one entry in `KEYS`: the rule for its value, whether a run may be
resumed with another value, and how runs behaved before the key existed. The
default of a key is in `configs/base.py`. Rules that concern several keys are in
`configs/relations.py`. Nothing here touches a device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import json
from typing import Any, NamedTuple

from stppo_jax import settings
from stppo_jax.configs import alarms
from stppo_jax.configs import algorithms
from stppo_jax.configs import base
from stppo_jax.configs import defaults
from stppo_jax.configs import external
from stppo_jax.configs import relations
from stppo_jax.configs import rules
from stppo_jax.data import kinds
from stppo_jax.envs import environments
from stppo_jax.envs import rewards
from stppo_jax.envs import tools
from stppo_jax.retrieval import dialects

# Whether a run may be resumed with another value of a key. A free key does not
# change the results of a step. A fixed key decides the shapes of the state, so
# no checkpoint fits another value. All other keys are guarded: they may change
# only if resume.allow_change names them.
FREE, GUARDED, FIXED = 'free', 'guarded', 'fixed'


class Key(NamedTuple):
  """One entry of `KEYS`: everything about a config key except its default.

  Attributes:
    rule: the rule for the key's value. None: any value of its type is valid.
    check: yields errors, one line each, about the file, function, package or
      server that the value names.
    resume: FREE, GUARDED or FIXED.
    before: the value with which runs behave as they did before the key existed.
      None: all recorded configs have the key, or the key is free.
    asked: whether the dialogues of an evaluation depend on the key.
    formerly: the former name of the key; '' if its name has never changed.
  """

  rule: settings.Rule | None = None
  check: Callable[[str, Any], Iterator[str]] | None = None
  resume: str = GUARDED
  before: Any = None
  asked: bool = False
  formerly: str = ''


_free = functools.partial(Key, resume=FREE)
_fixed = functools.partial(Key, resume=FIXED)
_asked = functools.partial(Key, asked=True)


def _are_keys(names: Sequence[str]) -> bool:
  """Returns whether all names are keys or sections of the config."""
  keys = [f'{key}.' for key in base.values()]
  return all(
    isinstance(name, str)
    # Every name below `algorithm` counts as a key, because another choice has
    # other options.
    and (
      name.startswith('algorithm.')
      or any(key.startswith(f'{name}.') for key in keys)
    )
    for name in names
  )


_SOME_KEYS = settings.Rule(
  _are_keys, "keys or sections of the config, such as ('seed',)"
)

_OPTIMIZER = {
  # Adam moves a weight by about the rate in each update, so a rate above 1
  # would destroy a model.
  'learning_rate': Key(rules.FRACTION),
  'name': _fixed(rules.OPTIMIZER, before='adamw'),
  'warmup_updates': Key(rules.NOT_NEGATIVE),
  'b1': Key(rules.BELOW_1),
  'b2': Key(rules.BELOW_1),
  'eps': Key(rules.POSITIVE),
  'weight_decay': Key(rules.FRACTION),
  'max_grad_norm': Key(rules.POSITIVE),
  'skip_grad_norm': Key(rules.NOT_NEGATIVE, before=0.0),
}

KEYS: Mapping[str, Key] = {
  **{f'alarms.{x}': _free(rules.NUMBER) for x in alarms.THRESHOLDS},
  **{f'policy_optimizer.{name}': key for name, key in _OPTIMIZER.items()},
  **{f'value_optimizer.{name}': key for name, key in _OPTIMIZER.items()},
  **{f'sft.optimizer.{name}': key for name, key in _OPTIMIZER.items()},
  # The rules for the options of algorithms are in `rl`.
  **{f'algorithm.{k}': Key(before=x) for k, x in defaults.BEFORE.items()},
  'alarms.stop': _free(rules.some_of(*alarms.THRESHOLDS)),
  'alarms.stop_after': _free(rules.POSITIVE),
  'checkpoint.every': _free(rules.POSITIVE),
  'checkpoint.keep': _free(rules.POSITIVE),
  'checkpoint.keep_every': _free(rules.NOT_NEGATIVE),
  'checkpoint.retry': _free(rules.NOT_NEGATIVE),
  'data.arithmetic.max_number': Key(rules.AT_LEAST_2, asked=True, before=20),
  'data.corpus': _asked(),
  'data.evaluation': _asked(),
  'data.games.count': _asked(rules.NOT_NEGATIVE, before=0),
  'data.name': _asked(rules.one_of(*kinds.KINDS)),
  'data.root': _asked(),
  'data.synthetic_wiki.distractors': _asked(rules.NOT_NEGATIVE),
  'data.synthetic_wiki.entities_per_type': _asked(rules.AT_LEAST_2),
  'data.synthetic_wiki.hops': _asked(rules.HOPS),
  'data.synthetic_wiki.name_pieces': _asked(rules.AT_LEAST_2),
  'data.synthetic_wiki.seed': _asked(rules.SEED),
  'data.synthetic_wiki.think_words': _asked(rules.NOT_NEGATIVE),
  'data.synthetic_wiki.error_turns': _asked(rules.NOT_NEGATIVE, before=0),
  'data.synthetic_wiki.repair_rate': _asked(rules.FRACTION, before=0.0),
  'data.tokenizer_vocab_size': _asked(rules.ABOVE_256),
  'data.train': _asked(),
  'env.gymnasium.make': _asked(before=''),
  'env.gymnasium.timeout': _asked(rules.POSITIVE, before=60.0),
  'env.max_length': _asked(rules.POSITIVE),
  'env.max_observation_tokens': _asked(rules.POSITIVE),
  'env.max_turn_tokens': _asked(rules.POSITIVE),
  'env.max_turns': _asked(rules.NOT_NEGATIVE),
  'env.name': _asked(rules.one_of(*environments.ENVIRONMENTS), before='search'),
  'env.overlong_fraction': _asked(rules.POSITIVE_FRACTION, before=0.2),
  'env.prompt_template': _asked(check=external.template_is_readable),
  'env.reward_function': _asked(check=external.function_exists, before=''),
  'env.reward_scope': _asked(rules.one_of(*rewards.SCOPES)),
  'env.rewards.exact_match': _asked(rules.FINITE),
  'env.rewards.f1': _asked(rules.FINITE),
  'env.rewards.format': _asked(rules.FINITE),
  'env.rewards.information_gain': _asked(rules.FINITE, before=0.0),
  'env.rewards.overlong': _asked(rules.NOT_NEGATIVE, before=0.0),
  'env.rewards.search_penalty': _asked(rules.NOT_NEGATIVE),
  'env.rewards.solved': _asked(rules.FINITE, before=1.0),
  'env.rewards.substring_match': _asked(rules.FINITE),
  'env.rewards.turn_answer_found': _asked(rules.FINITE),
  'env.rewards.turn_first_found': _asked(rules.FINITE, before=0.0),
  'env.rewards.turn_progress': _asked(rules.FINITE, before=0.0),
  'env.rewards.turn_search': _asked(rules.FINITE),
  'env.textworld.list_commands': _asked(before=True),
  'env.textworld.objects': _asked(rules.NOT_NEGATIVE, before=4),
  'env.textworld.quest_length': _asked(rules.POSITIVE, before=2),
  'env.textworld.rooms': _asked(rules.POSITIVE, before=2),
  'env.tools.mcp_servers': _asked(rules.SERVERS, before=()),
  'env.tools.names': _asked(
    rules.some_of(*tools.TOOLS), before=('calculator',)
  ),
  'env.tools.timeout': _asked(rules.POSITIVE, before=10.0),
  'evaluate.every': _free(rules.NOT_NEGATIVE),
  'evaluate.num_questions': _free(rules.POSITIVE, asked=True),
  'init_from': Key(rules.LINE, before=''),
  'loss.entropy_coefficient': Key(rules.NOT_NEGATIVE),
  'loss.load_balance_coefficient': Key(rules.NOT_NEGATIVE),
  'loss.value_clip': Key(rules.POSITIVE),
  'loss.value_coefficient': Key(rules.POSITIVE),
  'loss.value_bins': _fixed(rules.AT_LEAST_2, before=2),
  'loss.value_range': Key(rules.RANGE, before=()),
  'loss.value_warmup_patience': Key(rules.NOT_NEGATIVE, before=0),
  'loss.value_warmup_steps': Key(rules.NOT_NEGATIVE),
  'mesh.collect_fraction': _free(rules.BELOW_1),
  'mesh.collectors': _free(rules.NOT_NEGATIVE),
  'mesh.data': _free(rules.AXIS),
  'mesh.expert': _free(rules.AXIS),
  'mesh.fsdp': _free(rules.AXIS),
  'mesh.tensor': _free(rules.AXIS),
  'model.allow_beyond_max_position_embeddings': _free(),
  'model.attention': Key(rules.one_of('auto', 'xla', 'cudnn', 'splash')),
  'model.dtype': _asked(rules.one_of('float32', 'bfloat16')),
  'model.eos_token_ids': Key(rules.TOKEN_IDS, before=()),
  'model.head_dim': _fixed(rules.EVEN),
  'model.hidden_size': _fixed(rules.POSITIVE),
  'model.intermediate_size': _fixed(rules.POSITIVE),
  'model.lora.alpha': Key(rules.POSITIVE),
  'model.lora.alpha_pattern': Key(rules.ALPHAS, before=()),
  'model.lora.path': Key(rules.LINE, before=''),
  'model.lora.rank': _fixed(rules.NOT_NEGATIVE),
  'model.lora.rank_pattern': _fixed(rules.RANKS, before=()),
  'model.lora.rslora': Key(before=False),
  'model.lora.targets': _fixed(rules.REGEX),
  'model.moe': Key(rules.one_of('auto', 'dense', 'grouped')),
  'model.moe_intermediate_size': _fixed(rules.NOT_NEGATIVE),
  'model.norm_topk_prob': Key(),
  'model.num_experts': _fixed(rules.NOT_NEGATIVE),
  'model.num_experts_per_tok': Key(rules.NOT_NEGATIVE),
  'model.num_heads': _fixed(rules.POSITIVE),
  'model.num_kv_heads': _fixed(rules.POSITIVE),
  'model.num_layers': _fixed(rules.POSITIVE),
  'model.path': Key(check=external.model_exists),
  'model.qk_norm': _fixed(),
  'model.qkv_bias': _fixed(),
  'model.reference_memory': _free(rules.one_of('device', 'host')),
  'model.reference_path': Key(check=external.model_exists),
  'model.value_path': Key(check=external.model_exists, before=''),
  'model.rms_norm_eps': Key(rules.POSITIVE),
  'model.rope_theta': Key(rules.POSITIVE),
  'model.router_aux_loss_coef': Key(rules.NOT_NEGATIVE),
  'model.scan_unroll': Key(rules.POSITIVE),
  'model.tie_embeddings': _fixed(),
  'model.tokenizer_path': Key(check=external.tokenizer_exists),
  'model.value_backbone': _fixed(rules.one_of('own', 'shared')),
  'num_steps': _free(rules.POSITIVE),
  'preemption.grace': _free(rules.NOT_NEGATIVE),
  'preference.alpha': Key(rules.NOT_NEGATIVE),
  'preference.batch_size': Key(rules.POSITIVE),
  'preference.beta': Key(rules.POSITIVE),
  'preference.microbatch_size': Key(rules.NOT_NEGATIVE),
  'preference.name': Key(rules.one_of('tdpo1', 'tdpo2')),
  'preference.num_epochs': Key(rules.POSITIVE),
  'profile.steps': _free(rules.STEPS),
  'prompt.bos': _asked(rules.SWITCH, before='auto'),
  'prompt.enable_thinking': _asked(rules.SWITCH, before='auto'),
  'prompt.system': _asked(rules.TEXT, before=''),
  'prompt.tools': _asked(before=True),
  'resume.allow_change': _free(_SOME_KEYS),
  'retrieval.dialect': _free(rules.one_of(*dialects.DIALECTS), asked=True),
  'retrieval.max_failure_rate': _free(rules.FRACTION),
  'retrieval.max_queries_per_request': _free(rules.POSITIVE),
  'retrieval.ready_timeout': _free(
    rules.NOT_NEGATIVE, formerly='retrieval.start_grace'
  ),
  'retrieval.retries': _free(rules.NOT_NEGATIVE),
  'retrieval.timeout': _free(rules.POSITIVE),
  'retrieval.topk': _asked(rules.POSITIVE),
  'retrieval.url': _free(check=external.url_is_valid),
  'rollout.batch_rows': Key(rules.NOT_NEGATIVE),
  'rollout.cache_dtype': _asked(rules.one_of('model', 'int8'), before='model'),
  'rollout.decode_chunk': Key(rules.POSITIVE),
  'rollout.deterministic': Key(),
  'rollout.early_exit': Key(rules.FRACTION),
  'rollout.engine': Key(rules.one_of('local', 'remote')),
  'rollout.group_size': Key(rules.POSITIVE),
  'rollout.lanes': Key(rules.POSITIVE),
  'rollout.length_bucket': Key(rules.POSITIVE),
  'rollout.lookahead': Key(rules.NOT_NEGATIVE),
  'rollout.min_p': _asked(rules.BELOW_1),
  'rollout.min_valid_fraction': Key(rules.FRACTION),
  'rollout.mismatch_limit': _free(rules.LIMIT),
  'rollout.page_size': Key(rules.NOT_NEGATIVE, before=0),
  'rollout.pages': Key(rules.NOT_NEGATIVE, before=0),
  'rollout.prefill_chunk': Key(rules.POSITIVE, formerly='rollout.extend_chunk'),
  'rollout.refill_rounds': Key(rules.NOT_NEGATIVE, before=0),
  'rollout.remote.concurrency': Key(rules.POSITIVE),
  'rollout.remote.model': Key(),
  'rollout.remote.retries': Key(rules.NOT_NEGATIVE),
  'rollout.remote.timeout': Key(rules.POSITIVE),
  'rollout.remote.url': Key(),
  'rollout.replay_order': _free(),
  'rollout.resample_rounds': Key(rules.NOT_NEGATIVE),
  'rollout.slots': Key(rules.NOT_NEGATIVE),
  'rollout.span': _free(rules.one_of('auto', 'host', 'slice')),
  'rollout.steps_ahead': _fixed(rules.NOT_NEGATIVE),
  'rollout.temperature': _asked(rules.POSITIVE),
  'rollout.tensor': Key(rules.NOT_NEGATIVE, before=0),
  'rollout.top_k': _asked(rules.NOT_NEGATIVE),
  'rollout.top_p': _asked(rules.POSITIVE_FRACTION),
  'rollout.trajectories_per_step': Key(rules.POSITIVE),
  'rollout.turn_swaps': Key(rules.TURN_SWAPS, before='never'),
  'seed': _asked(rules.SEED),
  'sft.batch_size': Key(rules.POSITIVE),
  'sft.before_training': Key(),
  'sft.clean_one_hop_steps': Key(rules.NOT_NEGATIVE),
  'sft.clean_steps': Key(rules.NOT_NEGATIVE),
  'sft.demonstrations': Key(check=external.file_exists, before=''),
  'sft.error_rate': Key(rules.FRACTION),
  'sft.num_steps': Key(rules.POSITIVE),
  'sft.quote_words': Key(rules.NOT_NEGATIVE, before=0),
  'title': _free(rules.LINE),
  'updates.core_rows': Key(rules.NOT_NEGATIVE),
  'updates.head_chunk': Key(rules.NOT_NEGATIVE),
  'updates.kl_stop': Key(rules.NOT_NEGATIVE, before=0.0),
  'updates.max_skipped': _free(rules.NOT_NEGATIVE),
  'updates.microbatch_size': Key(rules.NOT_NEGATIVE),
  'updates.minibatch_size': Key(rules.POSITIVE),
  'updates.num_epochs': Key(rules.POSITIVE),
  'updates.value_epochs': Key(rules.NOT_NEGATIVE, before=0),
  'updates.value_replay': _fixed(rules.NOT_NEGATIVE, before=0),
  'updates.old_policy': Key(rules.one_of('sampled', 'current')),
  'updates.remat': Key(rules.one_of('none', 'all_dots', 'dots', 'full')),
  'updates.row_length': Key(rules.NOT_NEGATIVE, before=0),
  'updates.routing_replay': Key(rules.one_of('nowhere', 'trainer', 'sampler')),
  'updates.shuffle': Key(before=True),
  'writer.evaluation': _free(rules.NOT_NEGATIVE),
  'writer.keep_files': _free(rules.NOT_NEGATIVE),
  'writer.keep_lines': _free(rules.NOT_NEGATIVE),
  'writer.samples': _free(rules.NOT_NEGATIVE),
  'writer.tensorboard': _free(),
  'writer.token_details': _free(rules.NOT_NEGATIVE),
  'writer.trackers': _free(rules.TRACKERS, external.trackers_are_installed),
  'writer.trajectories': _free(rules.NOT_NEGATIVE),
}
# Maps a removed key to a hint about its replacement. No removed key changed the
# results of runs.
GONE = {
  'evaluate.batch_size': 'rollout.slots is also for evaluations',
  'rollout.cache_blocks': 'set the tokens of a page with rollout.page_size',
  'updates.core_lengths': 'set the tokens of a row with updates.row_length',
  'writer.copy_to': 'write the run to a bucket: --workdir=gs://BUCKET/RUN',
}


def earlier() -> dict[str, Any]:
  """Returns a dict from key to `Key.before`, in JSON types, without None."""
  values = {
    name: key.before for name, key in KEYS.items() if key.before is not None
  }
  return json.loads(json.dumps(values))


def present(recorded: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a recorded config with present key names, without removed keys."""
  names = {key.formerly: name for name, key in KEYS.items()}
  return {
    names.get(name, name): value
    for name, value in recorded.items()
    if name not in GONE
  }


def successor(name: str) -> str:
  """Returns the present name of a key; '' if `name` is no former name."""
  names = {key.formerly: name for name, key in KEYS.items() if key.formerly}
  return names.get(name, '')


def check(config: base.Config, ignored: Sequence[Any] = ()) -> list[str]:
  """Returns all errors of a config, one line each: `key=value: must be ...`.

  The keys and the types of values must be as in `configs/base.py`. Rules and
  relations are then checked on the values that have the right type.

  Args:
    config: the config.
    ignored: the checks to leave out, functions such as `check_algorithm`.
  """
  values = settings.flatten(config)
  expected = dict(base.values())
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
  for name, key in KEYS.items():
    if name not in values:
      continue
    if key.rule is not None and not key.rule.holds(values[name]):
      errors.append(f'{name}={values[name]!r}: must be {key.rule.allowed}')
      del values[name]
    elif key.check is not None and key.check not in ignored:
      errors += key.check(name, values[name])
  problems = [] if check_algorithm in ignored else check_algorithm(config)
  if not problems:
    values |= options
  for keys, relation in relations.RELATIONS:
    if relation not in ignored and all(key in values for key in keys):
      errors += relation(*(values[key] for key in keys))
  return errors + problems


def _pop_algorithm(values: dict[str, Any]) -> dict[str, Any]:
  """Removes the options of the algorithm from `values`; returns the options."""
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


def check_algorithm(config: base.Config) -> list[str]:
  """Returns an error line for each wrong option of the algorithm."""
  if 'algorithm' not in config:
    return ['algorithm: missing']
  if config.algorithm.to_dict() in algorithms.ALGORITHMS.values():
    return []  # a test checks the entries of the table
  # Imported late, because `rl` imports jax, which takes time. All other errors
  # are found in a tenth of a second.
  from stppo_jax.rl import algorithm

  return algorithm.check_algorithm(config.algorithm)
