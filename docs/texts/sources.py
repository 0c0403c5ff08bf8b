"""The defaults of the sources of the algorithms, and why ours differ.

An entry of `SOURCES` has what a paper or its code uses where `ALGORITHMS` and
`base.py` have a default. `differences` compares the two. Every difference has a
reason and is a line of `docs/algorithms.md`. An algorithm that is not in the
table is our version of its method, and has no source to compare with.
"""

from typing import Any

from docs.texts import newer_sources
from docs.texts import source as source_lib
from stppo_jax import settings
from stppo_jax.configs import base

_CODE, _PAPER = source_lib.CODE, source_lib.PAPER
_Source = source_lib.Source


def differences(name: str) -> dict[str, tuple[Any, Any]]:
  """Returns the keys of an algorithm that differ from its source.

  Each has the value that is ours and that of the source.
  """
  ours = settings.flatten(base.get_config(name))
  return {
    key: (ours.get(key), theirs)
    for key, theirs in SOURCES[name].values().items()
    if ours.get(key) != theirs
  }


def lines(name: str) -> list[str]:
  """Returns a sentence or two about each of these differences.

  Raises:
    KeyError: a difference has no reason.
  """
  source = SOURCES[name]
  compared = [
    f'`{key}` is {_text(ours)} here and {_text(theirs)} there. '
    f'{source.why[key]}'
    for key, (ours, theirs) in differences(name).items()
  ]
  silent = ', '.join(source.silent())
  unknown = [f'The source does not give: {silent}.'] if silent else []
  return [*compared, *source.notes, *unknown]


def _text(value: Any) -> str:
  return f'{value:.3g}' if isinstance(value, float) else str(value)


_FORK = 'the fork of Search-R1 by the authors of arXiv 2511.20718'
_ALONE = (
  'Ours is that of `token_ppo`, so that a comparison shows the effect of the '
  'estimator alone.'
)
_OBSERVATIONS = 'The policy did not write the observations.'

_CLIP = {
  'bounds.clip_low': 0.2,
  'bounds.clip_high': 0.2,
  'objective.name': 'pessimistic',
}
_GSPO_CLIP = {**_CLIP, 'bounds.clip_low': 3e-4, 'bounds.clip_high': 4e-4}
_UNCLIPPED = {'objective.name': 'unclipped'}
_NO_KL = {'kl.where': 'nowhere'}
_KL_IN_REWARD = {
  'kl.where': 'reward',
  'kl.estimator': 'k1',
  'kl.coefficient': 0.001,
}
_KL_IN_LOSS = {
  'kl.where': 'loss',
  'kl.estimator': 'k3_clamped',
  'kl.coefficient': 0.001,
}
_GROUP_STD = {'advantage.name': 'group_normalized', 'advantage.epsilon': 1e-6}
_SHARED_WHY = source_lib.SHARED_WHY

_PPO = _Source(
  where=_FORK,
  sure=_CODE,
  clip=_CLIP,
  aggregate='token_mean',
  std={'advantage.whiten': 'all'},
  group=1,
  kl=_KL_IN_REWARD,
  entropy=0.001,
  others={
    'algorithm.advantage.observation_tokens': 'included',
    'algorithm.advantage.critic_tokens': 'response',
  },
  why={
    'algorithm.advantage.whiten': _OBSERVATIONS,
    'algorithm.advantage.observation_tokens': _OBSERVATIONS,
    'algorithm.advantage.critic_tokens': _OBSERVATIONS,
  },
)
_SCOPE = 'algorithm.correction.clipping_bias.scope'
_CORRECTED_PPO = _PPO._replace(
  others={**_PPO.others, _SCOPE: 'microbatch'},
  why={
    **_PPO.why,
    _SCOPE: 'Cutting a minibatch into microbatches should change nothing.',
  },
)

SOURCES = {
  'token_ppo': _PPO,
  'turn_ppo': _PPO,
  's_ppo': _CORRECTED_PPO,
  'st_ppo': _CORRECTED_PPO,
  'so_ppo': _CORRECTED_PPO,
  'so_grpo': _Source(
    where=_FORK,
    sure=_CODE,
    clip=_CLIP,
    aggregate='token_mean',
    std=_GROUP_STD,
    group=5,
    kl=_KL_IN_LOSS,
    entropy=0.001,
    others={_SCOPE: 'sequence'},
  ),
  'bilevel_ppo': _Source(
    where='RAGEN, config/base.yaml',
    sure=_CODE,
    clip={**_CLIP, 'bounds.clip_high': 0.28},
    aggregate='token_mean',
    std={'advantage.whiten': 'policy'},
    group=16,
    kl=_NO_KL,
    entropy=0.001,
    others={'algorithm.advantage.gamma_turn': 0.95},
    why={
      'algorithm.bounds.clip_high': _ALONE,
      'algorithm.kl.where': _ALONE,
      'rollout.group_size': 'GAE compares no trajectories.',
    },
    notes=(
      'There, a step trains on the quarter of the groups that vary most.',
    ),
  ),
  'grpo': _Source(
    where='arXiv 2402.03300',
    sure=_PAPER,
    aggregate='sequence_mean',
    std={'advantage.name': 'group_normalized'},
    group=64,
    kl={'kl.where': 'loss', 'kl.estimator': 'k3', 'kl.coefficient': 0.04},
    why={
      **_SHARED_WHY,
      'algorithm.kl.coefficient': 'Ours is that of Search-R1, for search.',
    },
    notes=(
      'Search-R1 has `aggregate.name=token_mean` and '
      '`kl.estimator=k3_clamped`.',
    ),
  ),
  'dr_grpo': _Source(
    where='understand-r1-zero, train_zero_math.py',
    sure=_CODE,
    clip=_CLIP,
    aggregate='constant_length',
    std={'advantage.name': 'group_centered'},
    group=8,
    kl=_NO_KL,
    others={'algorithm.aggregate.max_response_tokens': 3000.0},
    why={
      'algorithm.aggregate.max_response_tokens': (
        'Ours is the default of `env.max_length`.'
      )
    },
  ),
  'dapo': _Source(
    where='verl, recipe/dapo/run_dapo_qwen2.5_32b.sh',
    sure=_CODE,
    clip={**_CLIP, 'bounds.clip_high': 0.28},
    aggregate='token_mean',
    std=_GROUP_STD,
    group=16,
    kl=_NO_KL,
    entropy=0.0,
    others={
      'env.rewards.overlong': 1.0,
      'env.overlong_fraction': 0.2,
      'rollout.resample_rounds': 9,
    },
    why={
      **_SHARED_WHY,
      'rollout.resample_rounds': (
        'Once most groups are solved, each round costs a whole collection.'
      ),
    },
    notes=(
      'There, the length of the answer is punished, and groups of equal '
      'accuracy are replaced; here, the length of the trajectory, and groups '
      'of equal reward.',
      'verl has a dual clip as well, and some scripts of the recipe set its c '
      'to 10.',
    ),
  ),
  'gspo': _Source(
    where='arXiv 2507.18071',
    sure=_PAPER,
    clip=_GSPO_CLIP,
    aggregate='sequence_mean',
    std={'advantage.name': 'group_normalized'},
    kl=_NO_KL,
  ),
  'gspo_token': _Source(
    where='verl, examples/gspo_trainer/test_gspo_3b_math.sh',
    sure=_CODE,
    clip=_GSPO_CLIP,
    aggregate='sequence_mean',
    std=_GROUP_STD,
    group=16,
    kl=_NO_KL,
    entropy=0.0,
    why=_SHARED_WHY,
  ),
  'bapo': _Source(
    where='BAPO, recipe/bapo/run_bapo_example.sh',
    sure=_CODE,
    clip={
      'bounds.low': 0.8,
      'bounds.high': 1.2,
      'bounds.low_step': 0.05,
      'bounds.high_step': 0.1,
      'bounds.low_limit': 0.95,
      'bounds.high_limit': 2.0,
      'bounds.positive_share': 1 / 3,
      'objective.name': 'dual_clip',
    },
    aggregate='token_mean',
    std=_GROUP_STD,
    group=16,
    kl=_NO_KL,
    entropy=0.0,
    why={
      **_SHARED_WHY,
      **{
        f'algorithm.bounds.{key}': 'Ours is that of the paper.'
        for key in (
          *('low', 'low_step', 'high_step'),
          *('low_limit', 'high_limit', 'positive_share'),
        )
      },
      'algorithm.objective.name': 'The paper has no dual clip.',
    },
    notes=(
      'The script raises low before high; the paper and we raise high first.',
      'The script weighs no term by pi_old, and compares the positive sum with '
      '0.5 times the negative one, which is a share of 1/3.',
      'Eq. 8 of the paper takes the absolute value of the whole sum, we that '
      'of each term.',
    ),
  ),
  'cispo': _Source(
    where='verl, examples/cispo_trainer/run_cispo_qwen2_5_0_5b_gsm8k.sh',
    sure=_CODE,
    clip={
      'bounds.clip_low': 10.0,
      'bounds.clip_high': 0.2,
      'objective.name': 'detached',
    },
    aggregate='token_mean',
    std=_GROUP_STD,
    group=5,
    kl=_KL_IN_LOSS,
    entropy=0.0,
    why={
      **_SHARED_WHY,
      'algorithm.kl.where': 'MiniMax-M1 has no KL term.',
      'algorithm.kl.estimator': 'There is no KL term.',
    },
    notes=(
      'The paper says that only the upper bound was tuned, but not to what.',
    ),
  ),
  'reinforce': _Source(
    where='Williams, 1992',
    sure=source_lib.DEFINITION,
    clip=_UNCLIPPED,
    aggregate='sequence_sum',
    std={'advantage.whiten': 'none'},
    group=1,
    kl=_NO_KL,
    entropy=0.0,
    why={
      **_SHARED_WHY,
      'algorithm.advantage.whiten': (
        'The mean of the batch is the baseline of REINFORCE++.'
      ),
    },
  ),
  'rloo': _Source(
    where='arXiv 2402.14740',
    sure=_PAPER,
    clip=_UNCLIPPED,
    aggregate='sequence_sum',
    std={'advantage.name': 'leave_one_out'},
    kl={'kl.where': 'reward', 'kl.estimator': 'k1'},
    notes=(
      'TRL clips the ratio of the sequence, and has `kl.coefficient=0.05` and '
      'groups of 2.',
    ),
  ),
  'minirl': _Source(
    where='arXiv 2512.01374',
    sure=_PAPER,
    clip={
      'bounds.clip_low': 0.2,
      'bounds.clip_high': 0.27,
      'objective.name': 'masked',
    },
    aggregate='sequence_sum',
    std={'advantage.name': 'group_centered'},
    kl=_NO_KL,
    others={'algorithm.correction.tis.cap': 5.0},
  ),
  'mt_grpo': _Source(
    where='Multi-Turn-RL-Agent, mt_grpo_env_trainer.py and run_mt_grpo.sh',
    sure=_CODE,
    clip=_CLIP,
    aggregate='token_mean',
    std={'advantage.name': 'turn_group', 'advantage.epsilon': 1e-4},
    group=21,
    kl=_NO_KL,
    entropy=0.0,
    others={'algorithm.advantage.turn_weight': 1.0},
    why=_SHARED_WHY,
    notes=(
      'There, the mean is over the tokens of one microbatch of one GPU.',
      'There, a trajectory without a tool call has z(sum of both rewards).',
    ),
  ),
  'gigpo': _Source(
    where='verl-agent, examples/gigpo_trainer/run_search.sh',
    sure=_CODE,
    clip={**_CLIP, 'objective.name': 'dual_clip'},
    aggregate='token_mean',
    std={
      'advantage.normalize': 'std',
      'advantage.outcome_counts': 'per_turn',
      'advantage.epsilon': 1e-6,
    },
    group=5,
    kl=_KL_IN_LOSS,
    entropy=0.0,
    others={
      'algorithm.advantage.omega': 1.0,
      'algorithm.advantage.gamma': 0.95,
    },
    why={
      **_SHARED_WHY,
      'algorithm.objective.name': ('It comes with verl, not with the method.'),
    },
    notes=(
      'There, states count as equal if the similarity of their texts is 0.9; '
      'here, only if their tokens are equal.',
      'There, every turn is a row of its own, and an invalid action costs '
      '0.01.',
    ),
  ),
  **newer_sources.SOURCES,
}
