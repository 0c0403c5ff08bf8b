"""The figures of a report: which metrics stand together, and what they mean."""

from collections.abc import Sequence
import fnmatch
from typing import Any
from typing import NamedTuple

from stppo_jax.tools.report import run_files
from stppo_jax.tools.report import summary


class Panel(NamedTuple):
  """A figure.

  Attributes:
    title: what it shows.
    metrics: names, or patterns of names.
    note: one sentence for a reader who does not know the metric.
    line: the name of a config key whose value is drawn as a line; '' for none.
  """

  title: str
  metrics: tuple[str, ...]
  note: str
  line: str = ''


SECTIONS: dict[str, tuple[Panel, ...]] = {
  'Learning': (
    Panel('Evaluation', ('val/*',), 'The greedy policy on fixed questions.'),
    Panel(
      'Reward',
      ('critic/score/mean',),
      'Outcome reward of the trajectories that were trained on.',
    ),
    Panel(
      'Score of training questions',
      ('train/*',),
      'The sampled policy on the questions of each step.',
    ),
    Panel(
      'Entropy',
      ('actor/entropy',),
      'Nats per policy token. A fall to 0 ends exploration.',
    ),
    Panel(
      'KL divergence',
      ('critic/kl', 'actor/ppo_kl'),
      'To the reference, and from the old to the new policy in a step.',
    ),
    Panel(
      'Groups without variance',
      ('rollout/zero_variance_groups',),
      'Share of groups whose rewards are equal: they teach nothing.',
    ),
  ),
  'Ratios and clipping': (
    Panel(
      'Tokens outside the bounds',
      tuple(f'{run_files.OUTSIDE}{level}' for level in summary.LEVELS),
      'Share of policy tokens whose ratio, at each level, leaves the bounds.',
    ),
    Panel(
      'Outside by turn, turn level',
      (f'{run_files.OUTSIDE}turn/turn_*',),
      'The same within the first, second, ... turn of a dialogue.',
    ),
    Panel(
      'Outside by turn, token level',
      (f'{run_files.OUTSIDE}token/turn_*',),
      'The same with ratios of tokens.',
    ),
    Panel(
      'Clipped tokens',
      ('actor/pg_clipfrac',),
      'Share of policy tokens whose gradient the objective cuts.',
    ),
    Panel(
      'Largest ratio',
      tuple(f'ratio/{level}/max' for level in summary.LEVELS),
      'The largest ratio of any token in a step, by level.',
    ),
    Panel(
      'Smallest ratio',
      tuple(f'ratio/{level}/min' for level in summary.LEVELS),
      'The smallest ratio of any token in a step, by level.',
    ),
    Panel(
      'Spread of the ratio',
      tuple(f'ratio/{level}/std' for level in summary.LEVELS),
      'Standard deviation over policy tokens, by level.',
    ),
    Panel(
      'Spread by turn, turn level',
      ('ratio/turn/std/turn_*',),
      'The same within the first, second, ... turn of a dialogue.',
    ),
    Panel(
      'Spread by turn, token level',
      ('ratio/token/std/turn_*',),
      'The same with ratios of tokens.',
    ),
    Panel(
      'Effective sample size',
      tuple(f'ratio/{level}/ess' for level in summary.LEVELS),
      'As a share of the policy tokens: 1 if all ratios are equal.',
    ),
  ),
  'Correction': (
    Panel(
      'Trigger of the correction',
      ('stab/rho',),
      'rho = N_U / N_V. Above tau, the line, the correction scales the loss.',
      'algorithm.correction.clipping_bias.tau',
    ),
    Panel(
      'Factor of the correction',
      ('stab/scale',),
      'Mean multiplier of the policy terms; 1 where nothing is corrected.',
    ),
    Panel(
      'Advantage spread',
      ('stab/norm_clipped', 'stab/norm_unclipped'),
      'N_U and N_V: root mean square of ratio times advantage over the tokens '
      'outside and inside the bounds.',
    ),
    Panel(
      'Rejected tokens',
      ('stab/rejected',),
      'Share of policy tokens that the corrections give the weight 0.',
    ),
  ),
  'Critic and optimiser': (
    Panel(
      'Explained variance',
      ('critic/vf_explained_var',),
      'Of the returns by the values. Near 0 the values say nothing.',
    ),
    Panel('Value loss', ('critic/vf_loss',), 'What the value model minimises.'),
    Panel(
      'Values and returns',
      ('critic/values/mean', 'critic/returns/mean'),
      'Their means; they should stay close.',
    ),
    Panel(
      'Gradient norm',
      ('actor/grad_norm', 'critic/grad_norm'),
      'Before it is clipped, of policy and value model.',
    ),
    Panel(
      'Skipped updates',
      ('update/skipped',),
      'Share of updates that were not finite or above skip_grad_norm.',
    ),
    Panel(
      'Sampler and trainer',
      ('mismatch/k3', 'mismatch/logprob_abs_diff_mean'),
      'How far their log-probabilities of the same tokens are apart.',
    ),
  ),
  'Dialogues and retrieval': (
    Panel(
      'Searches of a trajectory',
      ('env/number_of_*',),
      'Valid searches, tool calls or commands.',
    ),
    Panel('Turns', ('num_turns/mean', 'num_turns/max'), 'Turns of a dialogue.'),
    Panel(
      'Length',
      ('response_length/mean', 'response_length/max'),
      'Policy tokens of a dialogue.',
    ),
    Panel(
      'Endings',
      ('env/finish_ratio', 'env/ratio_of_valid_action'),
      'Share of dialogues that end with an answer, and of valid turns.',
    ),
    Panel(
      'Searches that found nothing',
      ('retrieval/empty', 'retrieval/failures', 'retrieval/retries'),
      'Empty answers, queries given up, and queries sent again.',
    ),
    Panel(
      'Latency of the retriever',
      ('retrieval/latency_p50', 'retrieval/latency_p99'),
      'Seconds from question to answer: median and 99th percentile.',
    ),
  ),
  'Goodput': (
    Panel(
      'Seconds of a step by phase',
      tuple(f'timing_s/{phase}' for phase in summary.PHASES),
      'Where the time of each step goes; "other" lies between the steps.',
    ),
    Panel(
      'Goodput',
      ('goodput/fraction',),
      'Share of the time since the first start in which the run made steps '
      'that were not lost.',
    ),
    Panel(
      'Restarts and lost steps',
      ('goodput/restarts', 'goodput/lost_steps'),
      'How often the run was started again, and steps it had to make again.',
    ),
    Panel(
      'Tokens per second',
      ('perf/throughput',),
      'Of all trajectories, over waiting, annotating and updating.',
    ),
    Panel(
      'Share of the peak',
      ('perf/mfu', 'perf/hfu'),
      'Operations of the updates over the peak of the devices; hfu counts '
      'those that are done again.',
    ),
    Panel(
      'Memory',
      ('perf/max_memory_allocated_gb', 'perf/max_memory_host_gb'),
      'Largest use so far in GiB, on the fullest device and on the host.',
    ),
    Panel(
      'Staleness',
      ('rollout/staleness',),
      'Steps between the policy that sampled and the one that is trained.',
    ),
  ),
  'Alarms': (
    Panel('Alarms', ('alarm/*',), 'See the table of alarms at the top.'),
  ),
}


def layout(names: Sequence[str]) -> list[dict[str, Any]]:
  """Returns sections with the panels that have some of the metrics."""
  sections = []
  for title, panels in SECTIONS.items():
    shown = []
    for panel in panels:
      matches = dict.fromkeys(
        name
        for pattern in panel.metrics
        for name in names
        if fnmatch.fnmatchcase(name, pattern)
      )
      if matches:
        shown.append(panel._replace(metrics=tuple(matches))._asdict())
    if shown:
      sections.append({'title': title, 'panels': shown})
  return sections
