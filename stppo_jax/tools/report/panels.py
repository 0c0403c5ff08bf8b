"""Lists the figures of a report: their metrics, and what these mean."""

from collections.abc import Sequence
import fnmatch
from typing import Any

from stppo_jax.tools.report import summary


def _of_levels(name: str) -> str:
  """Returns the metrics of all levels, in place of the braces in a name."""
  return ' '.join(map(name.format, summary.LEVELS))


# Section -> title of a figure -> its metrics, which are names or patterns, and
# a sentence for a reader who does not know them.
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
  'Learning': {
    'Evaluation': ('val/*', 'The greedy policy on fixed questions.'),
    'Reward': (
      'critic/score/mean',
      'Outcome reward of the trajectories that were trained on.',
    ),
    'Score of training questions': (
      'train/*',
      'The sampled policy on the questions of each step.',
    ),
    'Entropy': (
      'actor/entropy',
      'Nats per policy token. A fall to 0 ends exploration.',
    ),
    'KL divergence': (
      'critic/kl actor/ppo_kl',
      'To the reference, and from the old to the new policy in a step.',
    ),
    'Groups without variance': (
      'rollout/zero_variance_groups',
      'Share of groups whose rewards are equal: they teach nothing.',
    ),
  },
  'Ratios and clipping': {
    'Tokens outside the bounds': (
      _of_levels('outside/{}'),
      'Share of policy tokens whose ratio, at each level, leaves the bounds.',
    ),
    'Outside by turn, turn level': (
      'outside/turn/turn_*',
      'The same within the first, second, ... turn of a dialogue.',
    ),
    'Outside by turn, token level': (
      'outside/token/turn_*',
      'The same with ratios of tokens.',
    ),
    'Clipped tokens': (
      'actor/pg_clipfrac',
      'Share of policy tokens whose gradient the objective cuts.',
    ),
    'Largest ratio': (
      _of_levels('ratio/{}/max'),
      'The largest ratio of any token in a step, by level.',
    ),
    'Smallest ratio': (
      _of_levels('ratio/{}/min'),
      'The smallest ratio of any token in a step, by level.',
    ),
    'Spread of the ratio': (
      _of_levels('ratio/{}/std'),
      'Standard deviation over policy tokens, by level.',
    ),
    'Spread by turn, turn level': (
      'ratio/turn/std/turn_*',
      'The same within the first, second, ... turn of a dialogue.',
    ),
    'Spread by turn, token level': (
      'ratio/token/std/turn_*',
      'The same with ratios of tokens.',
    ),
    'Effective sample size': (
      _of_levels('ratio/{}/ess'),
      'As a share of the policy tokens: 1 if all ratios are equal.',
    ),
  },
  'Correction': {
    'Trigger of the correction': (
      'stab/rho',
      'rho = N_U / N_V. Above tau, the line, the correction scales the loss.',
    ),
    'Factor of the correction': (
      'stab/scale',
      'Mean multiplier of the policy terms; 1 where nothing is corrected.',
    ),
    'Advantage spread': (
      'stab/norm_clipped stab/norm_unclipped',
      'N_U and N_V: root mean square of ratio times advantage over the '
      'tokens outside and inside the bounds.',
    ),
    'Rejected tokens': (
      'stab/rejected',
      'Share of policy tokens that the corrections give the weight 0.',
    ),
  },
  'Critic and optimiser': {
    'Explained variance': (
      'critic/vf_explained_var',
      'Of the returns by the values. Near 0 the values say nothing.',
    ),
    'Value loss': ('critic/vf_loss', 'What the value model minimises.'),
    'Values and returns': (
      'critic/values/mean critic/returns/mean',
      'Their means; they should stay close.',
    ),
    'Gradient norm': (
      'actor/grad_norm critic/grad_norm',
      'Before it is clipped, of policy and value model.',
    ),
    'Skipped updates': (
      'update/skipped',
      'Share of updates that were not finite or above skip_grad_norm.',
    ),
    'Sampler and trainer': (
      'mismatch/k3 mismatch/logprob_abs_diff_mean',
      'How far their log-probabilities of the same tokens are apart.',
    ),
  },
  'Dialogues and retrieval': {
    'Searches of a trajectory': (
      'env/number_of_*',
      'Valid searches, tool calls or commands.',
    ),
    'Turns': ('num_turns/mean num_turns/max', 'Turns of a dialogue.'),
    'Length': (
      'response_length/mean response_length/max',
      'Policy tokens of a dialogue.',
    ),
    'Endings': (
      'env/finish_ratio env/ratio_of_valid_action',
      'Share of dialogues that end with an answer, and of valid turns.',
    ),
    'Searches that found nothing': (
      'retrieval/empty retrieval/failures retrieval/retries',
      'Empty answers, queries given up, and queries sent again.',
    ),
    'Latency of the retriever': (
      'retrieval/latency_p50 retrieval/latency_p99',
      'Seconds from question to answer: median and 99th percentile.',
    ),
  },
  'Goodput': {
    'Seconds of a step by phase': (
      ' '.join(f'timing_s/{phase}' for phase in summary.PHASES),
      'Where the time of each step goes; "other" lies between the steps.',
    ),
    'Goodput': (
      'goodput/fraction',
      'Share of the time since the first start in which the run made '
      'steps that were not lost.',
    ),
    'Restarts and lost steps': (
      'goodput/restarts goodput/lost_steps',
      'How often the run was started again, and steps it had to make again.',
    ),
    'Tokens per second': (
      'perf/throughput',
      'Of all trajectories, over waiting, annotating and updating.',
    ),
    'Share of the peak': (
      'perf/mfu perf/hfu',
      'Operations of the updates over the peak of the devices; hfu counts '
      'those that are done again.',
    ),
    'Memory': (
      'perf/max_memory_allocated_gb perf/max_memory_host_gb',
      'Largest use so far in GiB, on the fullest device and on the host.',
    ),
    'Staleness': (
      'rollout/staleness*',
      'Steps between the policy that wrote a turn and the one that is trained.',
    ),
  },
  'Alarms': {'Alarms': ('alarm/*', 'See the table of alarms at the top.')},
}
# The first metric of a figure -> the config key whose value is drawn as a line.
LINES = {'stab/rho': 'algorithm.correction.clipping_bias.tau'}


def layout(names: Sequence[str]) -> list[dict[str, Any]]:
  """Returns sections with the figures that have some of the metrics."""
  sections = []
  for heading, figures in SECTIONS.items():
    shown = []
    for title, (patterns, note) in figures.items():
      # In the order of the patterns, which a legend then has, and once each:
      # two patterns may fit the same name.
      metrics = dict.fromkeys(
        name
        for pattern in patterns.split()
        for name in names
        if fnmatch.fnmatchcase(name, pattern)
      )
      # A run without a critic, say, has no figures about one.
      if metrics:
        line = LINES.get(patterns, '')
        figure = {'title': title, 'metrics': list(metrics), 'note': note}
        shown.append({**figure, 'line': line})
    if shown:
      sections.append({'title': heading, 'panels': shown})
  return sections
