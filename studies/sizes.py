"""Token and turn ratios with 170 thousand, 2 million and 10 million weights.

    python -m stppo_jax ablate --config=studies/sizes.py:pilot \
        --workdir=runs/sizes_pilot --seeds=100,
    python -m studies.sizes runs/sizes_pilot/pilot.csv
    python -m stppo_jax ablate --config=studies/sizes.py:sizes \
        --workdir=runs/sizes
    python -m studies.sizes runs/sizes/sizes.csv

The task and the updates are the same as in studies/collapse.py: 32 updates on
each collection of 32 dialogues. A run has 24 steps. The small model begins with
the quickstart's start. Each larger model begins with a start of its own, which
is trained from random weights on the same demonstrations. All models compute in
float32. Sizes also differ in their starts, in depth, and in the machine, so
they are not compared with one another. The largest model needs a GPU; if
several runs share the GPU, set the variables of studies/gpu.py. What follows
was written before the runs of the study, the pilot's figures after the pilot,
and the last paragraph after the runs.

Stress: each level of each size gets the rate whose KL divergence of the first
five steps (the mean of `actor/ppo_kl`) is nearest to 0.1 nats in its logarithm.
For the two larger sizes, token and turn PPO train for five steps with seed 100,
which is in no study, at each of `_RATES`. For the smallest size,
studies/collapse.py found .11 nats for token ratios and .12 for turn ratios at
4e-4, with the three seeds of its study of lengths. One seed for each rate is
noisy. With 2 million weights, the pilot found .053, .105, .361 and .548 for
token ratios, and .124, .088, .230 and .406 for turn ratios. With 10 million
weights, it found .067, .165, .294 and, in the three steps for which there was
time, .278 for token ratios, and .100, .254, .291 and .184 for turn ratios. So
both levels have the same rate at each size.

Hypotheses, for each of the two larger sizes, as differences of the area, the
mean success of the 24 steps, all of them above 0:

1. Turn ratios with bounds of .2, minus token ratios with .2.
2. Turn ratios with bounds of .01, minus token ratios with .2. Both arms with
   turn ratios have the same rate.

Stopping rule: the seeds 0 to 7, as far as 14 minutes of one GPU reach, in whole
seeds of all arms of both sizes. The analysis is as in studies/dead_critic.py,
with Holm's correction for the four comparisons. Nothing is claimed from fewer
than eight seeds; the smallest size is description.

What did not go as planned: an H100 spent 5 minutes on the two starts, 6 on the
pilot, whose programs were compiled for each rate, and 2.5 on twelve runs at the
same time, the seeds 0 to 3 with 2 million weights. When these runs had been
seen, the seeds 4 to 7 of this size were made on CPUs, where a run takes 8
minutes of a core. Then the 24 runs of the smallest size were made on CPUs, too.
Another H100 then made the 24 runs with 10 million weights in 9.5 minutes, up to
16 runs at the same time, after the three runs of seed 0 had compiled the
programs. The commands that `--dry_run` prints were started by a script, and
`ablate` gathered the table from their folders.
"""

import pathlib
import sys

from stppo_jax.configs import base
from stppo_jax.tools import score_report
from stppo_jax.tools.ablation import results
from studies import collapse
from studies import dead_critic

_RATE = 'policy_optimizer.learning_rate'
_LEVELS = ('token_ppo', 'turn_ppo')
_NARROW = {
  'algorithm.bounds.clip_low': 0.01,
  'algorithm.bounds.clip_high': 0.01,
}


def _size(width, inner, layers, start_rate):
  """Returns the config keys of a model size and of its supervised start.

  Args:
    width: the width of the model; a head has size 32.
    inner: the width of the MLP.
    layers: the number of layers.
    start_rate: the learning rate of the supervised start.
  """
  return {
    'model.hidden_size': width,
    'model.intermediate_size': inner,
    'model.num_layers': layers,
    'model.num_heads': width // 32,
    'model.num_kv_heads': width // 32,
    'model.scan_unroll': layers,
    'sft.optimizer.learning_rate': start_rate,
    'sft.optimizer.warmup_updates': 100,
  }


_SIZES = {'2M': _size(192, 512, 4, 1e-3), '10M': _size(320, 896, 8, 5e-4)}
_RATES = {
  '2M': (1e-4, 1.6e-4, 2.5e-4, 4e-4),
  '10M': (6.3e-5, 1e-4, 1.6e-4, 2.5e-4),
}
# Size -> algorithm -> its learning rate, which the pilot gives.
_MATCHED = {
  '170K': {'token_ppo': 4e-4, 'turn_ppo': 4e-4},
  '2M': {'token_ppo': 1.6e-4, 'turn_ppo': 1.6e-4},
  '10M': {'token_ppo': 6.3e-5, 'turn_ppo': 6.3e-5},
}
COMPARISONS = {
  f'{size}: {name} - token': [f'{size} {arm}', f'{size} token_ppo']
  for size in _SIZES
  for name, arm in {'turn': 'turn_ppo', 'turn .01': 'turn 0.01'}.items()
}


def get_config(algorithm: str = 'turn_ppo') -> base.Config:
  config = collapse.get_config(algorithm)
  config.num_steps = 24
  dead_critic.only_curves(config)
  return config


def _arms(size, rates):
  """Returns the three arms of a size, by name.

  Args:
    size: the name of the size.
    rates: the learning rates of token PPO and turn PPO. The third arm, turn PPO
      with narrow bounds, has the rate of turn PPO.
  """
  start = {**_SIZES[size], 'start': size} if size in _SIZES else {}
  arms = {level: {**start, _RATE: rate} for level, rate in rates.items()}
  narrow = {**arms['turn_ppo'], 'algorithm': 'turn_ppo', **_NARROW}
  return {**arms, 'turn 0.01': narrow}


def studies():
  """Returns the studies by name; docs/your_own_study.md has their form."""
  # The path '' is the default. The starts set it nevertheless, because the
  # digests of the runs in the table contain it.
  starts = {
    size: {**changes, 'model.path': ''} for size, changes in _SIZES.items()
  }
  return {
    'sizes': {
      'title': 'Token and turn ratios with up to ten million weights',
      'seeds': 8,
      'arms': {size: _arms(size, rates) for size, rates in _MATCHED.items()},
      'starts': starts,
    },
    'pilot': {
      'title': 'How far each rate moves the policy',
      'seeds': 1,
      'arms': {
        size: {
          f'{level} {rate:g}': {
            'algorithm': level,
            **changes,
            'start': size,
            _RATE: rate,
            'num_steps': 5,
          }
          for level in _LEVELS
          for rate in _RATES[size]
        }
        for size, changes in _SIZES.items()
      },
      'starts': starts,
    },
  }


if __name__ == '__main__':
  found = results.read(pathlib.Path(sys.argv[1]))
  print(score_report.as_markdown(dead_critic.stress(found)))
  print(score_report.as_markdown(dead_critic.analysis(found, COMPARISONS)))
