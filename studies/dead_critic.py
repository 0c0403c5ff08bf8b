"""Compares the four algorithms beside a dead critic and a trained critic.

    python -m stppo_jax train --config=studies/critic.py:st_ppo \
        --workdir=runs/critic --config.num_steps=10 \
        --config.rollout.trajectories_per_step=256 \
        --config.rollout.temperature=1 --config.updates.minibatch_size=64 \
        --config.loss.value_warmup_patience=4 \
        --config.value_optimizer.learning_rate=1e-3
    python -m stppo_jax ablate --config=studies/dead_critic.py:dead_critic \
        --workdir=runs/dead_critic --table=docs/collapse/dead_critic.csv.gz
    python -m studies.dead_critic docs/collapse/dead_critic.csv.gz

The studies of studies/collapse.py have a critic that explains almost nothing.
The first command here trains a critic for 10 steps beside a frozen policy. Then
this critic explains .54 of the variance, and .56 can be explained
(docs/critic.md). Half of the arms go on from this run. The other arms have the
same policy and a dead critic, whose values are always .5: REINFORCE with a
constant baseline.

All that follows was written before the runs, except what the pilot found, which
was written as the first runs began. The critic in docs/collapse.md is from an
earlier run with the settings of the first command, and was not made again. Two
runs of token PPO with seed 100 and twice as many updates had been looked at,
one for each critic: both collapsed within 10 steps, so the study has half as
many updates.

Stress: 16 updates on each collection of 32 dialogues. The stress beside the two
critics is matched by the KL divergence of the first five steps, and not by the
learning rate: in the study `pilot`, token PPO trains for 5 steps with seeds 100
and 101, which are in no study. Each critic gets the rate of the pilot whose
mean KL divergence (`actor/ppo_kl`) is nearest, in its logarithm, to 0.1 nats,
which studies/collapse.py has at 4e-4. The four algorithms beside a critic share
its rate. The pilot found .017, .028 and .053 beside the dead critic, and .050,
.077 and .183 beside the trained critic. So the dead critic gets 6.3e-4 and the
trained critic 4e-4, and the match is not exact.

Hypotheses, as differences of the area: the mean success of the 24 steps.

1. Beside the trained critic, turn ratios are better than token ratios.
2. Beside the trained critic, the correction makes no difference with turn
   ratios.
3. Beside the trained critic, the correction makes no difference with token
   ratios.
4. Beside the dead critic, turn ratios are better, as docs/collapse.md found on
   another task.
5. With token ratios, the trained critic is better than the dead critic.
6. The turn ratio helps less beside the trained critic than beside the dead
   critic.

Stopping rule: the seeds 0 to 7 of all arms, and no more, whatever they show.
The six arms that the hypotheses need come first, seed by seed, and the
correction beside the dead critic last. If the time does not suffice, the seeds
that these six arms have are reported, and nothing is claimed from fewer than
eight seeds.

Analysis: the paired difference of the area over seeds with its bootstrap
interval, and the p-value of its sign-flip test, with Holm's correction for the
six comparisons. A hypothesis of a difference holds if its corrected p is below
.05 and the sign is right. Hypotheses 2 and 3 cannot be proved: they fail if
there is a difference. Everything else in the tables is description.

Added after the runs: hypothesis 5 holds, but the dead critic has the larger
rate. So token PPO was trained beside the dead critic at the rate of the trained
critic, too, with the same seeds. This comparison is separate, and proves
nothing that was planned.

An oracle critic is left out. To estimate the values of each turn's three
prefixes from 8 continuations would take as many tokens per step as some 1,000
dialogues, 30 times the collection, and so 7 core-minutes per run in place of
one. Values at every token, which GAE reads, would take more.
"""

from collections.abc import Mapping, Sequence
import pathlib
import sys

from stppo_jax.configs import base
from stppo_jax.tools import score_report
from stppo_jax.tools.ablation import results
from stppo_jax.tools.ablation import statistics
from studies import critic

_LEVELS = ('token_ppo', 's_ppo', 'turn_ppo', 'st_ppo')
WARM = 'runs/critic'
_RATE = 'policy_optimizer.learning_rate'
_RATES = (2.5e-4, 4e-4, 6.3e-4)
# Both critics get the same policy: the warm-up of the trained critic started
# from this policy and has not changed it. The dead critic is a new value model,
# whose values are .5, the middle of loss.value_range. With a learning rate of
# 0, it stays as it is.
_CRITICS = {
  'dead': {
    'init_from': '',
    'model.path': f'{WARM}/start/policy',
    'value_optimizer.learning_rate': 0.0,
  },
  'trained': {'init_from': WARM},
}
# Critic -> the policy's learning rate beside this critic, from the pilot.
MATCHED = {'dead': 6.3e-4, 'trained': 4e-4}


def get_config(algorithm: str = 'st_ppo') -> base.Config:
  config = critic.get_config(algorithm)
  config.num_steps = 24
  config.sft.before_training = False
  config.loss.value_warmup_steps = 0
  config.loss.value_warmup_patience = 0
  # 4 minibatches x 4 epochs = 16 updates on one collection.
  config.rollout.trajectories_per_step = 32
  config.rollout.temperature = 1.0
  # One length of batches needs only one set of compiled programs.
  config.rollout.length_bucket = config.env.max_length
  config.updates.minibatch_size = 8
  config.updates.num_epochs = 4
  config.updates.value_epochs = 0
  config.updates.core_rows = 4
  config.policy_optimizer.warmup_updates = 40
  config.value_optimizer.learning_rate = 3e-4
  only_curves(config)
  return config


def only_curves(config: base.Config) -> None:
  """Turns off all that the studies do not read, and lets no run end early."""
  config.evaluate.every = 0  # the success of the sampled dialogues is enough
  config.checkpoint.every = 8
  config.checkpoint.keep = 1
  config.writer.tensorboard = False
  config.writer.samples = 0
  config.writer.trajectories = 0
  config.writer.token_details = 0
  # The studies are about runs that collapse, so no run may end early.
  config.alarms.stop = ()
  config.updates.max_skipped = 0


def studies():
  """Returns the studies by name; docs/your_own_study.md has their form."""
  pilot = {'algorithm': 'token_ppo', 'num_steps': 5}
  return {
    'dead_critic': {
      'title': 'A critic that knows nothing, and one that knows much',
      'seeds': 8,
      'arms': {
        **{
          name: {level: {**changes, _RATE: MATCHED[name]} for level in _LEVELS}
          for name, changes in _CRITICS.items()
        },
        # This arm was added when the runs of the other arms had ended.
        'dead-same-rate': {
          'token_ppo': {**_CRITICS['dead'], _RATE: MATCHED['trained']},
        },
      },
    },
    'pilot': {
      'title': 'The rates that stress beside both critics alike',
      'seeds': 2,
      'arms': {
        name: {
          f'rate {rate:g}': {**pilot, **changes, _RATE: rate} for rate in _RATES
        }
        for name, changes in _CRITICS.items()
      },
    },
  }


# Comparison -> its arms, of which every second arm is subtracted from the sum
# of the others.
COMPARISONS = {
  '1 trained: turn - token': ['trained turn_ppo', 'trained token_ppo'],
  '2 trained: ST - turn': ['trained st_ppo', 'trained turn_ppo'],
  '3 trained: S - token': ['trained s_ppo', 'trained token_ppo'],
  '4 dead: turn - token': ['dead turn_ppo', 'dead token_ppo'],
  '5 token: trained - dead': ['trained token_ppo', 'dead token_ppo'],
  '6 (1) - (4)': [
    *('trained turn_ppo', 'trained token_ppo'),
    *('dead token_ppo', 'dead turn_ppo'),
  ],
}


# This comparison was added when the results of the others had been seen.
ADDED = {
  'token: trained - dead, same rate': [
    'trained token_ppo',
    'dead-same-rate token_ppo',
  ],
}


def holm(ps: Sequence[float]) -> list[float]:
  """Returns p-values with Holm's correction for the number of p-values."""
  corrected, largest = [0.0] * len(ps), 0.0
  for rank, place in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
    largest = max(largest, min(1.0, ps[place] * (len(ps) - rank)))
    corrected[place] = largest
  return corrected


def analysis(
  runs: Sequence[results.Run],
  comparisons: Mapping[str, Sequence[str]] = COMPARISONS,
) -> list[list[str]]:
  """Returns the table of the comparisons.

  A comparison uses the seeds that all its arms have. A comparison without such
  a seed is not in the table, but Holm's correction counts it.

  Args:
    runs: the runs of the study.
    comparisons: the arms of each comparison, in the form of `COMPARISONS`.
  """
  areas: dict[str, dict[int, float]] = {}
  for run in runs:
    areas.setdefault(' '.join(run.key).strip(), {})[run.seed] = run.curve.area
  found = {}
  for name, arms in comparisons.items():
    seeds = sorted(set.intersection(*(set(areas.get(x, {})) for x in arms)))
    if not seeds:
      continue
    columns = [[areas[arm][seed] for seed in seeds] for arm in arms]
    added, taken = (
      [sum(x) for x in zip(*columns[side::2])] for side in range(2)
    )
    found[name] = statistics.difference(added, taken)
  missing = [1.0] * (len(comparisons) - len(found))
  corrected = holm([x.p for x in found.values()] + missing)
  head = [
    'difference of the area',
    'seeds',
    'mean',
    '95 %',
    'larger',
    'p',
    'Holm',
  ]
  return [head] + [
    [
      name,
      str(x.seeds),
      f'{x.estimate.mean:+.3f}',
      f'{x.estimate.low:+.3f}..{x.estimate.high:+.3f}',
      f'{x.larger}/{x.seeds}',
      f'{x.p:.3f}',
      f'{p:.3f}',
    ]
    for (name, x), p in zip(found.items(), corrected)
  ]


def stress(runs: Sequence[results.Run]) -> list[list[str]]:
  """Returns the table of each run's mean KL divergence in its first steps.

  The mean is over the first five steps.
  """
  table = [['arm', 'seed', 'KL']]
  for run in runs:
    kl = run.per_step('kl_old')[:5].mean()
    table.append([' '.join(run.key).strip(), str(run.seed), f'{kl:.4f}'])
  return table


if __name__ == '__main__':
  found = results.read(pathlib.Path(sys.argv[1]))
  print(score_report.as_markdown(stress(found)))
  if 'dead turn_ppo' in {' '.join(run.key).strip() for run in found}:
    print(score_report.as_markdown(analysis(found)))
    print(score_report.as_markdown(analysis(found, ADDED)))
