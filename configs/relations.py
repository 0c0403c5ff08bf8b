"""Rules that concern several keys of a config.

`configs/schema.py` calls the function of a relation, see `refusals`, only if
every value is valid by the rule of its own key.
"""

from collections.abc import Iterator

from stppo_jax.configs import external
from stppo_jax.configs import refusals
from stppo_jax.configs import saving
from stppo_jax.models.hf import families
from stppo_jax.retrieval import dialects
from stppo_jax.rl import estimator_needs
from stppo_jax.sampling import engine_rules


def _one_axis_takes_the_rest(data, fsdp, expert, tensor) -> Iterator[str]:
  sizes = {'data': data, 'fsdp': fsdp, 'expert': expert, 'tensor': tensor}
  rest = [f'mesh.{axis}' for axis, size in sizes.items() if size == -1]
  if len(rest) > 1:
    yield f'{rest[1]}=-1: at most one axis may be -1, and {rest[0]} is -1 too'


def _lanes_divide_slots(
  lanes, slots, trajectories, group_size, engine
) -> Iterator[str]:
  if engine != 'local' or lanes == 1:
    return
  key = 'slots' if slots else 'trajectories_per_step'
  problem = engine_rules.slots_problem(
    slots or trajectories, lanes=lanes, group_size=group_size
  )
  if problem:
    yield f'rollout.{key}={slots or trajectories}: {problem}'


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


def _kl_coefficient_stays_positive(
  controller, horizon, trajectories
) -> Iterator[str]:
  """Checks that no step can make an adaptive KL coefficient 0 or negative.

  A step multiplies the coefficient by at least 1 - 0.2 trajectories / horizon.
  """
  if controller == 'adaptive' and horizon <= trajectories / 5:
    yield (
      f'algorithm.kl.horizon={horizon}: must be greater than '
      f'{trajectories / 5:g}, a fifth of '
      f'rollout.trajectories_per_step={trajectories}, when '
      'algorithm.kl.controller=adaptive: otherwise one step could make the '
      'coefficient 0 or negative'
    )


# The corrections whose factors depend on k, the ratio of trainer to sampler.
# With updates.old_policy=current, k contains the staleness.
STALENESS_CORRECTIONS = ('tis', 'mis', 'icepop', 'geo_rs')


# Keys that count the steps or passes in which only the value model learns.
_OF_VALUES_ALONE = ('loss.value_warmup_steps', 'updates.value_epochs')

RELATIONS: tuple[refusals.Relation, ...] = (
  refusals.is_multiple(
    'rollout.trajectories_per_step', 'updates.minibatch_size'
  ),
  refusals.is_multiple('rollout.trajectories_per_step', 'rollout.group_size'),
  refusals.is_multiple('rollout.slots', 'rollout.group_size'),
  refusals.is_multiple('model.num_heads', 'model.num_kv_heads'),
  *(
    refusals.refuse(
      key,
      'model.value_backbone',
      when=lambda number, backbone: number > 0 and backbone == 'shared',
      because='must be 0 when model.value_backbone=shared: values and policy '
      'are trained together',
    )
    for key in _OF_VALUES_ALONE
  ),
  refusals.refuse(
    'model.reference_memory',
    'model.lora.rank',
    'model.reference_path',
    when=lambda memory, rank, path: memory == 'host' and rank > 0 and not path,
    because="must be 'device' when model.lora.rank={1} and "
    "model.reference_path='': reference and policy then share the base weights",
  ),
  *(
    refusals.refuse(
      'model.value_path',
      key,
      when=lambda path, other, allowed=allowed: path and other != allowed,
      because="must be '' when " + key + '={1}: ' + reason,
    )
    for key, allowed, reason in (
      ('model.value_backbone', 'own', 'the policy computes the values'),
      ('model.lora.rank', 0, 'the value model adapts the base of the policy'),
      ('init_from', '', 'the value model comes from that run'),
    )
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
  (
    ('mesh.data', 'mesh.fsdp', 'mesh.expert', 'mesh.tensor'),
    _one_axis_takes_the_rest,
  ),
  *(
    refusals.refuse(
      key,
      other,
      when=lambda apart, value, wrong=wrong: apart and wrong(value),
      because='must be 0 when ' + other + '={1}: ' + reason,
    )
    for key in ('mesh.collect_fraction', 'mesh.collectors')
    for other, wrong, reason in (
      (
        'rollout.steps_ahead',
        lambda steps_ahead: not steps_ahead,
        'devices that collect and devices that learn would wait for each '
        'other; set rollout.steps_ahead=1',
      ),
      (
        'rollout.engine',
        lambda engine: engine != 'local',
        'a server then decodes, and the devices of the run only learn',
      ),
      ('mesh.collect_fraction', bool, 'set either of these keys, not both'),
    )
    if key != other
  ),
  *(
    refusals.refuse(
      'rollout.turn_swaps',
      key,
      when=lambda swaps, value, allows=allows: (
        swaps != 'never' and not allows(swaps, value)
      ),
      because='must be ' + choices + ' when ' + key + '={1}: ' + reason,
    )
    for key, allows, choices, reason in engine_rules.SWAPS_TURNS
  ),
  *(
    refusals.refuse(
      'rollout.replay_order',
      key,
      when=lambda order, value, wrong=wrong: order and wrong(value),
      because="must be '' when " + key + '={1}: ' + reason,
    )
    for key, wrong, reason in (
      (
        'rollout.turn_swaps',
        lambda swaps: swaps == 'never',
        'only a run with turn_swaps can repeat another run',
      ),
      (
        'rollout.deterministic',
        lambda deterministic: not deterministic,
        'rounding then depends on timing, so the two runs would differ',
      ),
      (
        'rollout.resample_rounds',
        lambda rounds: rounds > 0,
        'timing then decides which dialogues get slots first',
      ),
    )
  ),
  refusals.refuse(
    'env.max_turn_tokens',
    'env.max_length',
    when=lambda turn, length: turn >= length,
    because='must be smaller than env.max_length={1}',
  ),
  refusals.refuse(
    'updates.row_length',
    'env.max_length',
    when=lambda row, length: 0 < row < length,
    because='must be 0, or at least env.max_length={1}: a row holds a whole '
    'trajectory',
  ),
  refusals.refuse(
    'rollout.resample_rounds',
    'rollout.group_size',
    when=lambda rounds, size: rounds > 0 and size < 2,
    because='must be 0 when rollout.group_size={1}: the rewards of a group of '
    'one cannot differ',
  ),
  refusals.refuse(
    'rollout.pages',
    'rollout.deterministic',
    when=lambda pages, deterministic: pages > 0 and deterministic,
    because='must be 0 when rollout.deterministic=True: which trajectories '
    'wait for pages depends on when observations arrive',
  ),
  refusals.refuse(
    'rollout.pages',
    'rollout.slots',
    when=lambda pages, slots: pages > 0 and not slots,
    because='must be 0 when rollout.slots=0: the number of slots is then such '
    'that full trajectories fit in memory',
  ),
  refusals.refuse(
    'rollout.page_size',
    'env.max_length',
    when=lambda size, length: size > length,
    because='must not be greater than env.max_length={1}; 0 chooses a quarter '
    'of it, but at most 128',
  ),
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
  *(
    refusals.refuse(
      'rollout.span',
      key,
      when=lambda span, value, forbids=forbids: (
        span == 'slice' and forbids(value)
      ),
      because=f"must be 'auto' or 'host' when {key}={{1}}: {reason}",
    )
    for key, (forbids, reason) in engine_rules.DECODES_ALONE.items()
  ),
  (('env.gymnasium.make', 'env.name'), external.gymnasium_is_made),
  (('resume.allow_change', 'updates.value_replay'), saving.keeps_shapes),
  refusals.refuse(
    'env.rewards.information_gain',
    'env.name',
    when=lambda weight, name: weight and name != 'search',
    because='must be 0 when env.name={1}: only env.name=search has dialogues '
    'that end in <answer>',
  ),
  refusals.refuse(
    'updates.routing_replay',
    'model.path',
    'model.num_experts',
    when=lambda replay, path, experts: (
      replay != 'nowhere' and not path and not experts
    ),
    because="must be 'nowhere' when model.num_experts=0",
  ),
  refusals.refuse(
    'updates.routing_replay',
    'rollout.engine',
    when=lambda replay, engine: replay == 'sampler' and engine != 'local',
    because="must be 'nowhere' or 'trainer' when rollout.engine={1}, which "
    'does not report its experts',
  ),
  refusals.refuse(
    'rollout.engine',
    'rollout.remote.url',
    'rollout.remote.model',
    when=lambda engine, url, model: engine == 'remote' and not (url and model),
    because='rollout.remote.url and rollout.remote.model must be set',
  ),
  (
    (
      'data.name',
      'data.root',
      'data.train',
      'data.evaluation',
      'data.corpus',
    ),
    external.data_exist,
  ),
  (
    ('data.name', 'data.root', 'data.corpus', 'retrieval.url', 'env.name'),
    external.passages_are_named,
  ),
  refusals.refuse(
    'retrieval.dialect',
    'retrieval.url',
    when=lambda dialect, url: not url and dialect != dialects.SERVED,
    because=f'must be {dialects.SERVED} when retrieval.url is empty, because '
    'the run then starts its own server',
  ),
  refusals.refuse(
    'rollout.group_size',
    'algorithm.advantage.name',
    when=lambda size, name: size == 1 and name in estimator_needs.GROUPS,
    because='must be 2 or greater when algorithm.advantage.name={1}, which '
    'compares trajectories',
  ),
  *(
    refusals.refuse(
      key,
      'algorithm.advantage.name',
      when=lambda value, name: value and name not in estimator_needs.VALUES,
      because=f'must be {unset} when algorithm.advantage.name={{1}}, which has '
      'no value model',
    )
    for key, unset in (
      *((key, 0) for key in _OF_VALUES_ALONE),
      ('loss.value_range', ()),
      ('model.value_path', "''"),
    )
  ),
  *(
    refusals.refuse(
      key,
      other,
      when=lambda value, needed, unset=unset: value != unset and not needed,
      because=f'must be {unset} when {other}={{1}}: {reason}',
    )
    for key, other, unset, reason in (
      (
        'loss.value_warmup_patience',
        'loss.value_warmup_steps',
        0,
        'there is no warm-up',
      ),
      (
        'loss.value_bins',
        'loss.value_range',
        2,
        'the bins are numbers from one end of the range to the other',
      ),
      (
        'updates.value_replay',
        'updates.value_epochs',
        0,
        'only the passes of value_epochs repeat collections',
      ),
    )
  ),
  refusals.refuse(
    'model.value_backbone',
    'algorithm.advantage.name',
    when=lambda backbone, name: (
      backbone == 'shared' and name not in estimator_needs.VALUES
    ),
    because="must be 'own' when algorithm.advantage.name={1}, which has no "
    'value model',
  ),
  (
    (
      'algorithm.kl.controller',
      'algorithm.kl.horizon',
      'rollout.trajectories_per_step',
    ),
    _kl_coefficient_stays_positive,
  ),
  refusals.refuse(
    'updates.old_policy',
    'rollout.steps_ahead',
    'algorithm.correction.names',
    when=lambda old_policy, steps_ahead, names: (
      old_policy == 'current'
      and steps_ahead
      and not set(names) & set(STALENESS_CORRECTIONS)
    ),
    because="must be 'sampled' when rollout.steps_ahead={1}, because nothing "
    'would correct for the staleness; or algorithm.correction.names must have '
    f'one of {", ".join(STALENESS_CORRECTIONS)}',
  ),
  refusals.refuse(
    'algorithm.correction.clipping_bias.tau',
    'algorithm.correction.names',
    'algorithm.correction.clipping_bias.norm',
    when=lambda tau, names, norm: (
      'clipping_bias' in names and norm == 'coefficient' and tau < 1
    ),
    because='must be 1 or greater when norm=coefficient: where rho is between '
    'tau and 1, the factor 1 / rho would enlarge the step',
  ),
)
