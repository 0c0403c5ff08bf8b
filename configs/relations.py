"""Rules that concern several keys of a config.

A relation is a pair of keys and a function of their values that yields the
errors, one line each. `configs/schema.py` calls the function if the values of
all its keys keep their own rules.
"""

from collections.abc import Callable
from collections.abc import Iterator

from stppo_jax.configs import external
from stppo_jax.models.hf import families
from stppo_jax.rl import estimator_needs
from stppo_jax.sampling import lane_rules

Relation = tuple[tuple[str, ...], Callable[..., Iterator[str]]]


def _is_multiple(key: str, of: str) -> Relation:
  """Returns the rule that `key` is a multiple of `of`, unless that is 0."""

  def relation(number, divisor) -> Iterator[str]:
    if divisor and number % divisor:
      yield f'{key}={number}: must be a multiple of {of}={divisor}'

  return (key, of), relation


def _one_axis_takes_the_rest(data, fsdp, tensor) -> Iterator[str]:
  sizes = {'data': data, 'fsdp': fsdp, 'tensor': tensor}
  rest = [f'mesh.{axis}' for axis, size in sizes.items() if size == -1]
  if len(rest) > 1:
    yield f'{rest[1]}=-1: at most one axis may be -1, and {rest[0]} is -1 too'


def _devices_collect_ahead(fraction, steps_ahead, engine) -> Iterator[str]:
  must = f'mesh.collect_fraction={fraction}: must be 0 when'
  if fraction and not steps_ahead:
    yield (
      f'{must} rollout.steps_ahead=0: the devices that collect and those that '
      'learn would wait for each other; set rollout.steps_ahead=1'
    )
  if fraction and engine != 'local':
    yield f'{must} rollout.engine={engine}: a server of its own decodes'


def _turn_fits(max_turn_tokens, max_length) -> Iterator[str]:
  if max_turn_tokens >= max_length:
    yield (
      f'env.max_turn_tokens={max_turn_tokens}: must be smaller than '
      f'env.max_length={max_length}'
    )


def _groups_vary(rounds, group_size) -> Iterator[str]:
  if rounds > 0 and group_size < 2:
    yield (
      f'rollout.resample_rounds={rounds}: must be 0 when '
      f'rollout.group_size={group_size}: groups of one have no variance'
    )


def _lanes_divide_slots(
  lanes, slots, trajectories, group_size, engine
) -> Iterator[str]:
  if engine != 'local' or lanes == 1:
    return
  key = 'slots' if slots else 'trajectories_per_step'
  problem = lane_rules.slots_problem(
    slots or trajectories, lanes=lanes, group_size=group_size, prefix='rollout.'
  )
  if problem:
    yield f'rollout.{key}={slots or trajectories}: {problem}'


def _no_warmup_of_shared_values(warmup, backbone) -> Iterator[str]:
  if warmup > 0 and backbone == 'shared':
    yield (
      f'loss.value_warmup_steps={warmup}: must be 0 when '
      'model.value_backbone=shared: values and policy are trained together'
    )


def _routing_replay_fits(replay, path, experts, engine) -> Iterator[str]:
  key = f'updates.routing_replay={replay}'
  if replay != 'nowhere' and not (path or experts):
    yield f'{key}: must be nowhere when model.num_experts=0'
  if replay == 'sampler' and engine != 'local':
    yield (
      f'{key}: must be nowhere or trainer when rollout.engine={engine}, which '
      'does not report its experts'
    )


def _reference_memory_fits(rank, path, memory) -> Iterator[str]:
  if rank > 0 and not path and memory == 'host':
    yield (
      'model.reference_memory=host: must be device when '
      f'model.lora.rank={rank} and model.reference_path is empty: the base is '
      'the reference'
    )


def _remote_engine_is_named(engine, url, model) -> Iterator[str]:
  if engine == 'remote' and not (url and model):
    yield (
      'rollout.engine=remote: rollout.remote.url and rollout.remote.model must '
      'be set'
    )


def _family_exists(qkv_bias, qk_norm, experts, visited, width) -> Iterator[str]:
  try:
    families.of(qkv_bias=qkv_bias, qk_norm=qk_norm, num_experts=experts)
  except ValueError as error:
    yield f'model.{error}'
  if not experts:
    return
  if not 0 < visited <= experts:
    yield (
      f'model.num_experts_per_tok={visited}: must be 1 to '
      f'model.num_experts={experts}'
    )
  if not width:
    yield (
      'model.moe_intermediate_size=0: must be greater than 0 when '
      f'model.num_experts={experts}'
    )


def _groups_are_compared(advantage, group_size) -> Iterator[str]:
  if advantage in estimator_needs.GROUPS and group_size == 1:
    yield (
      'rollout.group_size=1: must be 2 or greater when '
      f'algorithm.advantage.name={advantage}, which compares trajectories'
    )


def _no_values_to_warm_up(advantage, warmup) -> Iterator[str]:
  if warmup and advantage not in estimator_needs.VALUES:
    yield (
      f'loss.value_warmup_steps={warmup}: must be 0 when '
      f'algorithm.advantage.name={advantage}, which has no value model'
    )


def _no_values_to_share(advantage, backbone) -> Iterator[str]:
  if backbone == 'shared' and advantage not in estimator_needs.VALUES:
    yield (
      'model.value_backbone=shared: must be own when '
      f'algorithm.advantage.name={advantage}, which has no value model'
    )


def _kl_coefficient_stays_positive(
  controller, horizon, trajectories
) -> Iterator[str]:
  """A step multiplies it by 1 - 0.2 trajectories / horizon at least."""
  if controller == 'adaptive' and horizon <= trajectories / 5:
    yield (
      f'algorithm.kl.horizon={horizon}: must be greater than '
      f'{trajectories / 5:g}, a fifth of '
      f'rollout.trajectories_per_step={trajectories}, when '
      'algorithm.kl.controller=adaptive: otherwise one step could make the '
      'coefficient 0 or negative'
    )


# The corrections by the ratio to the sampler. It contains the staleness where
# the old policy is the current one.
STALENESS_CORRECTIONS = ('tis', 'mis', 'icepop', 'geo_rs')


def _staleness_is_corrected(old_policy, steps_ahead, names) -> Iterator[str]:
  corrected = not set(names).isdisjoint(STALENESS_CORRECTIONS)
  if old_policy == 'current' and steps_ahead and not corrected:
    choices = ', '.join(STALENESS_CORRECTIONS)
    yield (
      'updates.old_policy=current: must be sampled when '
      f'rollout.steps_ahead={steps_ahead}, unless algorithm.correction.names '
      f'has one of {choices}: nothing would correct for the staleness'
    )


def _steps_are_not_enlarged(names, norm, tau) -> Iterator[str]:
  if 'clipping_bias' in names and norm == 'coefficient' and tau < 1:
    yield (
      f'algorithm.correction.clipping_bias.tau={tau}: must be 1 or greater; '
      'between tau and 1, the factor 1 / rho would enlarge steps'
    )


RELATIONS: tuple[Relation, ...] = (
  _is_multiple('rollout.trajectories_per_step', 'updates.minibatch_size'),
  _is_multiple('rollout.trajectories_per_step', 'rollout.group_size'),
  _is_multiple('rollout.slots', 'rollout.group_size'),
  _is_multiple('updates.minibatch_size', 'updates.microbatch_size'),
  _is_multiple('updates.minibatch_size', 'updates.core_rows'),
  _is_multiple('model.num_heads', 'model.num_kv_heads'),
  (
    ('loss.value_warmup_steps', 'model.value_backbone'),
    _no_warmup_of_shared_values,
  ),
  (
    ('model.lora.rank', 'model.reference_path', 'model.reference_memory'),
    _reference_memory_fits,
  ),
  (
    (
      'model.qkv_bias',
      'model.qk_norm',
      'model.num_experts',
      'model.num_experts_per_tok',
      'model.moe_intermediate_size',
    ),
    _family_exists,
  ),
  _is_multiple('preference.batch_size', 'preference.microbatch_size'),
  (('mesh.data', 'mesh.fsdp', 'mesh.tensor'), _one_axis_takes_the_rest),
  (
    ('mesh.collect_fraction', 'rollout.steps_ahead', 'rollout.engine'),
    _devices_collect_ahead,
  ),
  (('env.max_turn_tokens', 'env.max_length'), _turn_fits),
  (('rollout.resample_rounds', 'rollout.group_size'), _groups_vary),
  (
    (
      'rollout.lanes',
      'rollout.slots',
      'rollout.trajectories_per_step',
      'rollout.group_size',
      'rollout.engine',
    ),
    _lanes_divide_slots,
  ),
  (('env.gymnasium.make', 'env.name'), external.gymnasium_is_made),
  (
    (
      'updates.routing_replay',
      'model.path',
      'model.num_experts',
      'rollout.engine',
    ),
    _routing_replay_fits,
  ),
  (
    ('rollout.engine', 'rollout.remote.url', 'rollout.remote.model'),
    _remote_engine_is_named,
  ),
  (
    (
      'data.name',
      'data.root',
      'data.train',
      'data.evaluation',
      'data.corpus',
      'retrieval.url',
      'env.name',
    ),
    external.data_exist,
  ),
  (('retrieval.dialect', 'retrieval.url'), external.embedded_server_speaks),
  (
    ('retrieval.replay', 'retrieval.record', 'retrieval.url'),
    external.answers_come_from_one_place,
  ),
  (('algorithm.advantage.name', 'rollout.group_size'), _groups_are_compared),
  (
    ('algorithm.advantage.name', 'loss.value_warmup_steps'),
    _no_values_to_warm_up,
  ),
  (('algorithm.advantage.name', 'model.value_backbone'), _no_values_to_share),
  (
    (
      'algorithm.kl.controller',
      'algorithm.kl.horizon',
      'rollout.trajectories_per_step',
    ),
    _kl_coefficient_stays_positive,
  ),
  (
    (
      'updates.old_policy',
      'rollout.steps_ahead',
      'algorithm.correction.names',
    ),
    _staleness_is_corrected,
  ),
  (
    (
      'algorithm.correction.names',
      'algorithm.correction.clipping_bias.norm',
      'algorithm.correction.clipping_bias.tau',
    ),
    _steps_are_not_enlarged,
  ),
)
