"""Turns of some 10, 30 and 100 tokens, under a stress matched by KL.

    python -m stppo_jax ablate --config=studies/long_turns.py:pilot \
        --workdir=runs/long_pilot --seeds=100,
    python -m studies.long_turns runs/long_pilot/pilot.csv
    python -m stppo_jax ablate --config=studies/long_turns.py:long_turns \
        --workdir=runs/long_turns
    python -m studies.long_turns runs/long_turns/long_turns.csv

In study 2 of docs/collapse.md all runs with turns of 60 tokens collapse, at one
learning rate for all lengths. Is the cause the length, or how far the policy
moves? The task and the updates are the same as in studies/collapse.py, and a
run has 24 steps. The starts go on from the quickstart's start, as in study 2.
What follows was written before the runs.

Stress: the KL divergence of the first five steps is matched in two ways.

- `per token`: the mean KL divergence of a token (`actor/ppo_kl`) is nearest to
  0.1 nats, as with turns of 10 tokens at the rate of studies/collapse.py. A
  turn of 100 tokens then moves ten times as far as a turn of 10 tokens.
- `per turn`: this mean times the number of tokens of a turn is the same for all
  lengths, some 1 nat, so that turns move equally far. For turns of 30 and 100
  tokens, these are 0.033 and 0.01 nats per token.

With turns of 10 tokens both ways are the same, and studies/collapse.py has
found .11 nats for token ratios and .12 for turn ratios at 4e-4. For the other
lengths, token and turn PPO train for five steps with seed 100, which is in no
study, at each of `_RATES`. Each level gets the rate whose KL divergence is
nearest to the wanted one, in its logarithm.

With turns of 100 tokens the pilot found .009, .015, .078, .099 and .272 nats
per token for token ratios, from the smallest rate to the largest, and .012,
.021, .048, .064, .072 and .131 for turn ratios. At 1.6e-4, turn ratios had
already moved the policy too far. So four smaller rates were then added for turn
ratios. Three larger rates, of which one had made a step, were left out. One
seed for each rate is noisy. The pilot of 30 tokens came after the runs of the
other lengths. It found .011, .025, .042, .116 and .150 nats per token for token
ratios, and .005, .008, .014, .029, .073 and .077 for turn ratios.

Hypotheses:

1. If the stress is matched per turn, fewer than half of the runs with turns of
   100 tokens collapse; if it is matched per token, more than half collapse.
   That is, what destroys runs is how far a turn moves.
2. If the stress is matched per turn, the area of turn ratios minus the area of
   token ratios is above 0 at each length.

Stopping rule: the seeds 0 to 3 of all arms, and no more. With four seeds, p is
never below .125, so nothing is claimed from them.
"""

import pathlib
import sys

from stppo_jax.configs import base
from stppo_jax.tools import score_report
from stppo_jax.tools.ablation import results
from studies import collapse
from studies import dead_critic

_RATE = 'policy_optimizer.learning_rate'
_RATES = {
  'token_ppo': (1.6e-4, 2.5e-4, 4e-4, 6.3e-4, 1e-3),
  'turn_ppo': (2.5e-5, 4e-5, 6.3e-5, 1e-4, 1.6e-4, 2.5e-4),
}
# The number of tokens of a turn -> the number of filler words in its <think>.
_WORDS = {30: 20, 100: 90}
# Group of arms -> algorithm -> its learning rate, which the pilot gives.
_MATCHED = {
  '10 tokens': {'token_ppo': 4e-4, 'turn_ppo': 4e-4},
  '30 tokens per turn': {'token_ppo': 4e-4, 'turn_ppo': 1e-4},
  '30 tokens per token': {'token_ppo': 6.3e-4, 'turn_ppo': 2.5e-4},
  '100 tokens per turn': {'token_ppo': 1.6e-4, 'turn_ppo': 2.5e-5},
  '100 tokens per token': {'token_ppo': 6.3e-4, 'turn_ppo': 2.5e-4},
}
COMPARISONS = {
  f'{group}: turn - token': [f'{group} turn_ppo', f'{group} token_ppo']
  for group in _MATCHED
}


def get_config(algorithm: str = 'turn_ppo') -> base.Config:
  config = collapse.get_config(algorithm)
  config.num_steps = 24
  dead_critic.only_curves(config)
  return config


def studies():
  """Returns the studies by name; docs/your_own_study.md has their form."""
  lengths = {
    '10 tokens': {},
    **{
      f'{tokens} tokens': {
        **collapse.long_turns(words),
        'start': f'{words} words',
      }
      for tokens, words in _WORDS.items()
    },
  }
  starts = collapse.long_starts(_WORDS.values())
  return {
    'long_turns': {
      'title': 'Turns of some 10, 30 and 100 tokens, matched by KL',
      'seeds': 4,
      'arms': {
        group: {
          level: {**lengths[group.partition(' per')[0]], _RATE: rate}
          for level, rate in rates.items()
        }
        for group, rates in _MATCHED.items()
      },
      'starts': starts,
    },
    'pilot': {
      'title': 'How far each rate moves the policy',
      'seeds': 1,
      'arms': {
        f'{tokens} tokens': {
          f'{level} {rate:g}': {
            'algorithm': level,
            **lengths[f'{tokens} tokens'],
            _RATE: rate,
            'num_steps': 5,
          }
          for level, rates in _RATES.items()
          for rate in rates
        }
        for tokens in _WORDS
      },
      'starts': starts,
    },
  }


if __name__ == '__main__':
  found = results.read(pathlib.Path(sys.argv[1]))
  print(score_report.as_markdown(dead_critic.stress(found)))
  print(score_report.as_markdown(dead_critic.analysis(found, COMPARISONS)))
