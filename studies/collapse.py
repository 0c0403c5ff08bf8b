"""Studies of how training collapses, on the synthetic encyclopedia.

    python -m stppo_jax ablate --config=studies/collapse.py:levels \
        --workdir=runs/levels

The stress is the same in all studies: many updates on one small collection, at
a large learning rate, so that the policy moves far from the policy that
collected. docs/collapse.md has the results, and says how the settings were
chosen.
"""

from stppo_jax.configs import base
from stppo_jax.configs import quickstart

_LEVELS = ('token_ppo', 's_ppo', 'turn_ppo', 'st_ppo')
_RATE = 'policy_optimizer.learning_rate'
_STRESS_RATE = 4e-4
_BIAS = 'algorithm.correction.clipping_bias'
# The scope and the threshold of some corrections: the default, and those that
# had a larger area in study 3 than no correction, with each of three seeds.
_REPEATED = (
  ('minibatch', 'tau 1.5'),
  ('minibatch', 'tau 3'),
  ('microbatch', 'tau 1.5'),
  ('sequence', 'tau 3'),
)
_THINK_WORDS = (20, 50)  # for turns of about 30 and 60 tokens
# The number of steps of `sft` -> the number of steps of `train`.
_BUDGETS = {1000: 76, 1300: 68, 1600: 60}
_REWARDS = {
  'sparse rewards': {},
  'rewards of turns': {
    'env.rewards.turn_search': 0.1,
    'env.rewards.turn_answer_found': 0.1,
  },
}
# The task of configs/calculator.py, under the same stress.
_CALCULATOR = {
  'data.name': 'arithmetic',
  'data.arithmetic.max_number': 12,
  'env.name': 'tools',
  'env.max_turns': 1,
  'env.max_length': 96,
  'env.max_observation_tokens': 32,
  'sft.num_steps': 500,
  'sft.clean_one_hop_steps': 0,
  'sft.clean_steps': 250,
  'sft.error_rate': 0.55,
}


def get_config(algorithm: str = 'st_ppo') -> base.Config:
  config = quickstart.get_config(algorithm)
  config.num_steps = 60
  if config.algorithm.advantage.name == 'gae':
    config.algorithm.advantage.lambda_ = 1.0
  # 4 minibatches x 8 epochs = 32 updates on one collection.
  config.rollout.trajectories_per_step = 32
  config.updates.minibatch_size = 8
  config.updates.num_epochs = 8
  config.updates.core_rows = 4
  config.rollout.length_bucket = 64  # fewer programs to compile
  config.policy_optimizer.learning_rate = _STRESS_RATE
  config.value_optimizer.learning_rate = 5e-4
  # Without a warm-up, the first updates of Adam look like a collapse.
  config.policy_optimizer.warmup_updates = 80
  config.value_optimizer.warmup_updates = 80
  config.evaluate.every = 20
  config.evaluate.num_questions = 128
  config.checkpoint.every = 10
  config.checkpoint.keep = 1
  # The studies read only metrics. Other records would take time.
  config.writer.tensorboard = False
  config.writer.samples = 0
  config.writer.token_details = 0
  # The studies are about runs that collapse. Such a run must not end early,
  # because the study would then lack it.
  config.alarms.stop = ()
  config.updates.max_skipped = 0
  return config


def long_turns(words):
  """Returns config keys for turns whose <think> begins with filler words.

  Args:
    words: the number of filler words.
  """
  return {
    'data.synthetic_wiki.think_words': words,
    'env.max_turn_tokens': 16 + words,
    'env.max_length': 192 + 4 * words,  # four turns: three searches, an answer
  }


def long_starts(words):
  """Returns a start for each number of filler words of a turn, by name.

  The starts go on from the quickstart's start. From random weights, it would
  take much longer to learn to search among so many filler words.
  """
  return {
    f'{count} words': {
      **long_turns(count),
      'model.path': quickstart.get_config().model.path,
      'sft.num_steps': 300,
      'sft.clean_one_hop_steps': 0,
      'sft.clean_steps': 0,
    }
    for count in words
  }


def _corrections(algorithm, scope):
  """Returns an arm for each threshold of the correction, by name.

  Args:
    algorithm: the algorithm of the arms.
    scope: the scope of the correction in these arms.
  """
  arms = {
    f'tau {tau:g}': {
      'algorithm': algorithm,
      f'{_BIAS}.tau': tau,
      f'{_BIAS}.scope': scope,
    }
    for tau in (1.5, 3.0, 5.0)
  }
  if scope == 'microbatch':
    for changes in arms.values():
      # `core_rows` has no effect with this scope.
      changes |= {'updates.core_rows': 0, 'updates.microbatch_size': 4}
  return arms


def _gradient(algorithm):
  """Returns an arm whose correction uses the norm of the gradient, by name."""
  changes = {'algorithm': algorithm, f'{_BIAS}.norm': 'gradient'}
  return {'norm of the gradient': changes}


def studies():
  """Returns the studies by name; docs/your_own_study.md has their form."""
  return {
    'levels': {
      'title': 'Level of the ratio, and correction',
      'seeds': 8,
      'arms': {
        f'rate {rate:g}': {name: {_RATE: rate} for name in _LEVELS}
        for rate in (2.5e-4, 3.2e-4, _STRESS_RATE)
      },
    },
    'turn_length': {
      'title': 'Turns of some 10, 30 and 60 tokens',
      'seeds': 3,
      'arms': {
        '10 tokens': {name: {} for name in _LEVELS},
        **{
          f'{words + 10} tokens': {
            name: {**long_turns(words), 'start': f'{words} words'}
            for name in _LEVELS
          }
          for words in _THINK_WORDS
        },
      },
      'starts': long_starts(_THINK_WORDS),
    },
    'correction': {
      'title': 'Definition, threshold and scope of the correction',
      'seeds': 3,
      'arms': {
        'scope minibatch': {
          'turn_ppo': {},
          **_corrections('st_ppo', 'minibatch'),
          **_gradient('st_ppo'),
        },
        **{
          f'scope {scope}': {'turn_ppo': {}, **_corrections('st_ppo', scope)}
          for scope in ('microbatch', 'sequence', 'turn')
        },
        'token ratio': {
          'token_ppo': {},
          **_corrections('s_ppo', 'minibatch'),
          **_gradient('s_ppo'),
        },
      },
    },
    'correction_seeds': {
      'title': 'Four corrections, with more seeds',
      'seeds': 8,
      'arms': {
        '': {
          'turn_ppo': {},
          **{
            f'{scope}, {arm}': _corrections('st_ppo', scope)[arm]
            for scope, arm in _REPEATED
          },
        },
      },
    },
    'controls': {
      'title': 'Plain controls beside the turn ratio and the correction',
      'seeds': 3,
      'arms': {
        '': {
          'token_ppo': {},
          'KL stop': {'algorithm': 'token_ppo', 'updates.kl_stop': 0.03},
          'dual clip': {
            'algorithm': 'token_ppo',
            'algorithm.objective.name': 'dual_clip',
          },
          'a third of the rate': {
            'algorithm': 'token_ppo',
            _RATE: _STRESS_RATE / 3,
          },
          '2 epochs': {'algorithm': 'token_ppo', 'updates.num_epochs': 2},
          'turn_ppo': {},
          'st_ppo': {},
        },
      },
    },
    'staleness': {
      'title': 'Steps between the policy that collects and the one that trains',
      'seeds': 3,
      'arms': {
        f'staleness {steps}': {
          name: {'rollout.steps_ahead': steps} for name in _LEVELS
        }
        for steps in range(5)
      },
    },
    'groups': {
      'title': 'Methods that compare the trajectories of a group',
      'seeds': 3,
      'arms': {'': {'grpo': {}, 'gspo': {}, 'so_grpo': {}}},
    },
    'start': {
      'title': 'The supervised start that a fixed budget buys, and its rewards',
      'seeds': 3,
      'arms': {
        rewards: {
          f'{steps} steps of sft': {
            'algorithm': 'st_ppo',
            'start': f'{steps}',
            'num_steps': num_steps,
            **changes,
          }
          for steps, num_steps in _BUDGETS.items()
        }
        for rewards, changes in _REWARDS.items()
      },
      'starts': {f'{n}': {'sft.num_steps': n} for n in _BUDGETS},
    },
    'calculator': {
      'title': 'Level of the ratio, and correction, with a calculator',
      'seeds': 3,
      'arms': {
        '': {name: {**_CALCULATOR, 'start': 'calculator'} for name in _LEVELS},
      },
      'starts': {'calculator': _CALCULATOR},
    },
  }
