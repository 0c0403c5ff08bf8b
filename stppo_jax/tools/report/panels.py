"""Lists the figures of a report, with their metrics and explanations."""

from collections.abc import Sequence
import fnmatch
from typing import Any

from stppo_jax.tools.report import summary


def _of_levels(name: str) -> str:
  """Returns the names of a metric at all levels, with spaces between them.

  Args:
    name: the name of the metric, with {} in place of the level.
  """
  return ' '.join(map(name.format, summary.LEVELS))


# Maps a section, and then the title of a figure, to the names or patterns of
# its metrics, and to a sentence for a reader who does not know these metrics.
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
      'From the policy to the reference, and from the old to the new policy in '
      'a step.',
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
      'Share of the tokens of the first, second, ... turn of a dialogue whose '
      'turn ratio leaves the bounds.',
    ),
    'Outside by turn, token level': (
      'outside/token/turn_*',
      'Share of the tokens of the first, second, ... turn of a dialogue whose '
      'token ratio leaves the bounds.',
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
      'Standard deviation of the ratio over policy tokens, by level.',
    ),
    'Spread by turn, turn level': (
      'ratio/turn/std/turn_*',
      'Standard deviation of the turn ratio over the tokens of the first, '
      'second, ... turn of a dialogue.',
    ),
    'Spread by turn, token level': (
      'ratio/token/std/turn_*',
      'Standard deviation of the token ratio over the tokens of the first, '
      'second, ... turn of a dialogue.',
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
      'Share of the variance of the returns that the values explain. Near 0 '
      'the values say nothing.',
    ),
    'Value loss': ('critic/vf_loss', 'The loss that trains the value model.'),
    'Values and returns': (
      'critic/values/mean critic/returns/mean',
      'Means of the values and of the returns; the two should stay close.',
    ),
    'Gradient norm': (
      'actor/grad_norm critic/grad_norm',
      'Norm of the gradients of policy and value model, before clipping.',
    ),
    'Skipped updates': (
      'update/skipped',
      'Share of updates that were not finite or above skip_grad_norm.',
    ),
    'Sampler and trainer': (
      'mismatch/k3 mismatch/logprob_abs_diff_mean',
      'Difference of the log-probabilities that sampler and trainer give to '
      'the same tokens.',
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
      'Tokens of all trajectories per second of waiting, annotating and '
      'updating.',
    ),
    'Share of the peak': (
      'perf/mfu perf/hfu',
      'Operations of the updates over the peak of the devices; hfu also counts '
      'repeated operations.',
    ),
    'Memory': (
      'perf/max_memory_allocated_gb perf/max_memory_host_gb',
      'Largest use so far in GiB, on the fullest device and on the host.',
    ),
    'Staleness': (
      'rollout/staleness*',
      'Steps between the policy that wrote a turn and the policy that learns.',
    ),
  },
  'Alarms': {'Alarms': ('alarm/*', 'See the table of alarms at the top.')},
}
# Maps the metric of a figure to the config key whose value the figure shows as
# a horizontal line.
LINES = {'stab/rho': 'algorithm.correction.clipping_bias.tau'}


def layout(names: Sequence[str]) -> list[dict[str, Any]]:
  """Returns a report's sections, with the figures for which there are metrics.

  Args:
    names: the names of the metrics of all runs.
  """
  sections = []
  for heading, figures in SECTIONS.items():
    shown = []
    for title, (patterns, note) in figures.items():
      # The names are in the order of the patterns, which is also the order of
      # the legend. A name that fits two patterns is kept once.
      metrics = dict.fromkeys(
        name
        for pattern in patterns.split()
        for name in names
        if fnmatch.fnmatchcase(name, pattern)
      )
      # A figure without metrics is left out: runs without a value model, for
      # example, have no figures about a value model.
      if metrics:
        line = LINES.get(patterns, '')
        figure = {'title': title, 'metrics': list(metrics), 'note': note}
        shown.append({**figure, 'line': line})
    if shown:
      sections.append({'title': heading, 'panels': shown})
  return sections
