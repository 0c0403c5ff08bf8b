"""The defaults of the sources of algorithms of `newer_algorithms.py`."""

from docs.texts import source as source_lib

_CODE = source_lib.CODE
_Source = source_lib.Source
_SHARED_WHY = source_lib.SHARED_WHY
_NO_KL = {'kl.where': 'nowhere'}
_GROUP_STD = {'advantage.name': 'group_normalized', 'advantage.epsilon': 1e-6}
_NARROW_CLIP = {
  'bounds.clip_low': 3e-3,
  'bounds.clip_high': 4e-3,
  'objective.name': 'pessimistic',
}
_DPPO = _Source(
  where='verl, examples/dppo_trainer/run_qwen3_30b_a3b_megatron.sh',
  sure=_CODE,
  aggregate='constant_length',
  std={'advantage.name': 'group_centered'},
  group=16,
  kl=_NO_KL,
  entropy=0.0,
  why={
    **_SHARED_WHY,
    'algorithm.objective.cap': "Ours is the default of verl's function.",
  },
)
_ENTROPY_MECHANISM = _Source(
  where='Entropy-Mechanism-of-RL, recipe/dapo',
  sure=_CODE,
  aggregate='token_mean',
  std=_GROUP_STD,
  group=8,
  kl=_NO_KL,
  notes=(
    'There, groups of equal accuracy are replaced (`rollout.resample_rounds`).',
  ),
)

SOURCES = {
  'atpo': _Source(
    where='ATPO, ATPO/scripts/ATPO_qwen3_4B.sh',
    sure=_CODE,
    clip=_NARROW_CLIP,
    aggregate='sequence_mean',
    std={'advantage.name': 'group_normalized'},
    group=22,
    kl=_NO_KL,
    entropy=0.0,
    why=_SHARED_WHY,
    notes=(
      'There, advantages are those of the nodes of a tree of trajectories.',
      'There, the log-ratio of a turn is clamped above at 10; here, that of a '
      'token at 20.',
    ),
  ),
  'sampo': _Source(
    where='ARL-Arena, examples/shop_agent_trainer/Qwen3_4B/train_sampo.sh',
    sure=_CODE,
    clip=_NARROW_CLIP,
    aggregate='turn_mean',
    std={'advantage.normalize': 'none'},
    group=8,
    kl={
      'kl.where': 'loss',
      'kl.estimator': 'k3_clamped',
      'kl.coefficient': 0.01,
    },
    others={
      'algorithm.advantage.omega': 1.0,
      'algorithm.advantage.gamma': 0.95,
      'rollout.resample_rounds': 2,
    },
    notes=(
      'There, an invalid action costs 0.1; here nothing, unless '
      '`env.rewards.format` is set.',
      'There, groups are replaced only after the first 5 steps.',
    ),
  ),
  'gmpo': _Source(
    where='GMPO, train_zero_math_gmpo.py',
    sure=_CODE,
    clip={'objective.name': 'geometric'},
    aggregate='sequence_mean',
    std={'advantage.name': 'group_normalized'},
    group=8,
    kl=_NO_KL,
    notes=('Its bounds are exp(-0.4) and exp(0.4) in the examples of verl.',),
  ),
  'dppo_tv': _DPPO._replace(
    clip={
      'bounds.fall': 0.15,
      'bounds.rise': 0.15,
      'objective.cap': 10000.0,
    }
  ),
  'dppo_kl': _DPPO._replace(
    clip={
      'bounds.fall': 0.05,
      'bounds.rise': 0.05,
      'objective.cap': 10000.0,
    }
  ),
  'sapo_gate': _Source(
    where='TRL, GRPOConfig',
    sure=_CODE,
    clip={
      'objective.name': 'soft_gate',
      'objective.tau_positive': 1.0,
      'objective.tau_negative': 1.05,
    },
    aggregate='sequence_mean',
    std={'advantage.name': 'group_normalized'},
    group=8,
    kl=_NO_KL,
  ),
  'topr': _Source(
    where='Trinity-RFT, topr_policy_loss.py',
    sure=_CODE,
    clip={'objective.name': 'tapered'},
    aggregate='token_mean',
    std={'advantage.name': 'monte_carlo'},
    group=2,
    kl={'kl.where': 'loss', 'kl.estimator': 'k2'},
    others={'algorithm.ratio.level': 'token'},
    why={
      **_SHARED_WHY,
      'algorithm.advantage.name': (
        'Without a baseline, rewards of 0 and 1 have nothing negative.'
      ),
      'algorithm.kl.where': 'The point of TOPR is to need no KL term.',
      'algorithm.kl.estimator': 'There is no KL term.',
      'algorithm.aggregate.name': 'The gradient of a trajectory is a sum.',
      'algorithm.ratio.level': 'The weight of the paper is of a trajectory.',
    },
  ),
  'vespo': _Source(
    where='the recipe vespo of its authors',
    sure=_CODE,
    clip={
      'objective.power_positive': 2.0,
      'objective.decay_positive': 3.0,
      'objective.power_negative': 3.0,
      'objective.decay_negative': 2.0,
    },
    aggregate='token_mean',
    std={'advantage.name': 'group_normalized'},
    group=8,
    kl=_NO_KL,
    notes=(
      'There, the mismatch of a sampler, truncated for each token, is a factor '
      'of r. Here it is one of the corrections, which are factors of the term.',
    ),
  ),
  'clip_cov': _ENTROPY_MECHANISM._replace(
    clip={
      'bounds.clip_low': 1.0,
      'bounds.clip_high': 1.0,
      'objective.share': 2e-4,
      'objective.least': 1.0,
      'objective.most': 5.0,
    },
  ),
  'kl_cov': _ENTROPY_MECHANISM._replace(
    clip={'objective.share': 2e-4, 'objective.coefficient': 1.0},
  ),
  'vapo': _Source(
    where='arXiv 2504.05118',
    sure=source_lib.PAPER,
    clip={'bounds.clip_low': 0.2, 'bounds.clip_high': 0.28},
    aggregate='token_mean',
    group=16,
    others={
      'algorithm.advantage.alpha': 0.05,
      'algorithm.advantage.lambda_critic': 1.0,
      'algorithm.objective.coefficient': 0.1,
      'loss.value_warmup_steps': 50,
    },
    why={
      'rollout.group_size': 'GAE compares no trajectories.',
      'loss.value_warmup_steps': (
        'Short runs would update nothing but the values.'
      ),
    },
    notes=('There, the values start as a reward model.',),
  ),
  'a2tgpo': _Source(
    where='A-TGPO, the script of ATGPO_multihop_qwen3_4B',
    sure=_CODE,
    clip=_NARROW_CLIP,
    aggregate='sequence_mean',
    std={'advantage.name': 'turn_index'},
    group=16,
    kl=_NO_KL,
    others={
      'algorithm.advantage.turn_weight': 0.3,
      'algorithm.advantage.gamma': 1.0,
    },
    why=_SHARED_WHY,
    notes=(
      'There, turns are numbered among those whose reward is not 0, and the '
      'deviation is that of a population.',
    ),
  ),
  'hgpo': _Source(
    where='verl-agent, recipe/hgpo',
    sure=_CODE,
    clip={
      'bounds.clip_low': 0.2,
      'bounds.clip_high': 0.2,
      'objective.name': 'dual_clip',
    },
    aggregate='token_mean',
    std={'advantage.normalize': 'std', 'advantage.epsilon': 1e-6},
    group=8,
    kl={
      'kl.where': 'loss',
      'kl.estimator': 'k3_clamped',
      'kl.coefficient': 0.01,
    },
    others={
      'algorithm.advantage.outcome_weight': 0.0,
      'algorithm.advantage.history': 2,
      'algorithm.advantage.power': 1.0,
      'algorithm.advantage.gamma': 0.95,
    },
    why={
      'algorithm.objective.name': 'It comes with verl, not with the method.',
    },
    notes=(
      'There, the deviation is that of a population, and epsilon is added to '
      'the sum of the weights, too.',
      'There, every turn is a row of its own, and an invalid action costs 0.1.',
    ),
  ),
}
