"""Times collection: against `generate`, under latency, with refilled slots.

    python -m benchmarks.collect
    python -m benchmarks.collect --only latency refill

Dialogues are scripted (see `dialogues`): they are random, of known lengths, and
written by a model that takes as long as any model of its shape. All cases of a
table collect the same dialogues greedily and write the same tokens. This is
asserted before anything is timed and checked again in every timed collection;
log-probabilities agree to 1e-4. Each time is that of a whole collection, in
which texts are encoded and decoded, queries are answered on the event loop's
thread, and dialogues start and end.

`generate`: 512 dialogues, as many as a step of the paper collects; prompts of
40 to 100 tokens, 1 to 3 searches, observations of 60 to 125 tokens, turns
log-normal around 20 tokens, at most 125. These are a quarter of the lengths and
limits of the paper's setting (at most 500 tokens in a turn and in an
observation, 3 searches). Each dialogue has a slot. The peer calls
`transformers` `generate` once a turn on all unfinished dialogues, from their
first token on, and waits for the last one of a batch; it stops by the ids of
the closing tokens. It runs with the fastest threads and batch size; a batch has
dialogues of about the same length.

Ours has settings for a CPU, not the defaults of `configs/base.py`: as many
`rollout.lanes` as there are cores, `batch_rows` 16, `early_exit` 0.5,
`lookahead` 0, ten `cache_blocks`, and `deterministic=False`. Waves
(`deterministic=True`) have only the lanes and the blocks: each program works on
all slots of a lane, and no chunk ends early.

`original`, with a quarter of the dialogues, has no stops. In every turn it
writes 500 tokens, the limit of the loops that the paper builds on, or to the
end of sequence, and cuts the rest afterwards. It is slower because of these
wasted tokens. The goal is for 500 tokens; `--cut_at=125` is a quarter of that
limit, as these dialogues are a quarter of the paper's. No peer waits for a
retriever.

`latency`: the same dialogues, where each search is answered after 0, 0.2 or
1 s, or log-normal around 0.2 s (sigma 1; the mean is 0.33 s). Each dialogue has
a slot, but few of them decode at a time; those that wait are left out of the
batches. `sharing` predicts the times from the time without latency. Nothing can
hide the waits of the last dialogues, which matter less if the dialogues take
longer: see larger `--widths`.

`refill`: half of the dialogues, with turns log-normal around 16 (sigma 1), and
a quarter as many slots as dialogues. Slots that are given to the next dialogue
at once are compared with waves of dialogues, each as long as its longest
dialogue. The two modes also differ in their batches of 16 rows of similar
length and in chunks that end early, see above.
"""

import argparse
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import pathlib
import tempfile
from typing import Any
from typing import NamedTuple

import numpy as np

from benchmarks import collectors
from benchmarks import dialogues
from benchmarks import measure
from benchmarks import sharing
from stppo_jax import types
from stppo_jax.models.hf import export
from stppo_jax.rollout import event_loop

_ORIGINAL_TURN = 500  # tokens that the original loop writes in every turn
# The work of an input token, as a share of the work of a decoded token.
_INPUT_COST = 0.4
_GOALS = {
  'generate': 3.0,
  'original': 8.0,
  'latency': 0.85,
  'refill': 1.4,
}
_SIZES = {
  'prompt': dialogues.between(40, 100),
  'observation': dialogues.between(60, 125),
  'max_searches': 3,
}
TURNS = dialogues.Shape(turn=dialogues.log_normal(20, 0.6), **_SIZES)
UNEVEN = dialogues.Shape(turn=dialogues.log_normal(16, 1.0), **_SIZES)
LATENCIES: Mapping[str, Callable[[np.random.Generator], float]] = {
  '0 s': lambda rng: 0.0,
  '0.2 s': lambda rng: 0.2,
  '1 s': lambda rng: 1.0,
  'log-normal': lambda rng: float(rng.lognormal(np.log(0.2), 1.0)),
}


def against(
  peer: str,
  policy: collectors.Policy,
  loop: event_loop.EventLoop,
  *,
  rows: int,
  repeats: int,
  cut_at: int = collectors.MAX_TURN_TOKENS,
) -> str:
  """Returns the table of our collection against a loop on `generate`.

  Args:
    peer: 'generate', which stops at closing tokens, or 'original', which does
      not.
    policy: the policy that samples; it is exported to a directory for the peer.
    loop: runs the environment's coroutines.
    rows: the number of dialogues.
    repeats: the number of samples of each case.
    cut_at: the most tokens of a turn; 'original' writes as many in every turn.

  Raises:
    AssertionError: if the tokens or log-probabilities of two cases differ.
  """
  from benchmarks import generate_reference  # torch is needed here only

  environment = dialogues.Scripted(
    dialogues.scripts(rows, TURNS, filler=policy.filler)
  )
  sides: dict[str, Any] = {
    'ours': collectors.SlotCollector(
      policy, loop, slots=rows, deterministic=False
    ),
    'waves': collectors.SlotCollector(
      policy, loop, slots=rows, deterministic=True
    ),
  }
  ours = sides['ours'].collect(environment)
  collectors.assert_parity(ours, sides['waves'].collect(environment))
  with tempfile.TemporaryDirectory() as directory:
    export.export(directory, policy.model.config, policy.params)
    sides[peer] = generate_reference.GenerateLoop(
      pathlib.Path(directory),
      policy.tokenizer,
      loop,
      stops=peer == 'generate',
      max_turn_tokens=cut_at,
    )
  chosen = generate_reference.use_fastest(sides[peer], environment, rows=rows)
  theirs = sides[peer].collect(environment)
  collectors.assert_parity(ours, sides[peer].with_logprobs(theirs))
  seconds = measure.interleave(
    {name: collectors.case(side, environment) for name, side in sides.items()},
    repeats=repeats,
  )
  goals = [(peer, 'ours', _GOALS[peer]), (peer, 'waves', None)]
  return f'{chosen}\n\n{_report(seconds, rows, goals)}'


def latency(
  policy: collectors.Policy,
  loop: event_loop.EventLoop,
  *,
  rows: int,
  repeats: int,
) -> str:
  """Returns the table of delayed against immediate observations.

  Raises:
    AssertionError: if latency changes tokens or log-probabilities.
  """
  collector = collectors.SlotCollector(
    policy, loop, slots=rows, deterministic=False
  )
  scripts_by = {
    name: dialogues.scripts(rows, TURNS, filler=policy.filler, latency=draw)
    for name, draw in LATENCIES.items()
  }
  environments = {
    name: dialogues.Scripted(scripts) for name, scripts in scripts_by.items()
  }
  expected = collector.collect(environments['0 s'])
  collectors.assert_parity(
    expected, collector.collect(environments['log-normal'])
  )
  seconds = measure.interleave(
    {name: collectors.case(collector, x) for name, x in environments.items()},
    repeats=repeats,
  )
  at_once = float(np.median(seconds['0 s']))
  goals = [
    ('0 s', name, _GOALS['latency'] if name == '0.2 s' else None)
    for name in LATENCIES
    if name != '0 s'
  ]
  predicted = ', '.join(
    f'{name} {at_once / _predicted(expected, scripts, at_once):.3f}'
    for name, scripts in scripts_by.items()
  )
  return '\n'.join(
    (_report(seconds, rows, goals), f'predicted, of 0 s: {predicted}')
  )


def _predicted(
  trajectories: Sequence[types.Trajectory],
  scripts: Sequence[dialogues.Script],
  at_once: float,
) -> float:
  """Returns the predicted seconds; see `sharing`.

  Args:
    trajectories: the trajectories of the scripts, each in a slot of its own.
    scripts: the scripts, with latencies.
    at_once: the measured seconds without latency.
  """
  work = []
  for trajectory in trajectories:
    inputs = [len(trajectory.prompt_ids)]
    inputs += [len(turn.observation_ids) for turn in trajectory.turns]
    work.append(
      [
        len(turn.token_ids) + _INPUT_COST * length
        for turn, length in zip(trajectory.turns, inputs)
      ]
    )
  scale = at_once / sum(map(sum, work))
  rows = [
    sharing.Row([scale * x for x in turns], script.latencies)
    for turns, script in zip(work, scripts, strict=True)
  ]
  return sharing.makespan(rows, slots=len(rows))


def refill(
  policy: collectors.Policy,
  loop: event_loop.EventLoop,
  *,
  rows: int,
  repeats: int,
) -> str:
  """Returns the table of refilled slots against waves.

  Raises:
    AssertionError: if the tokens or log-probabilities of the modes differ.
  """
  environment = dialogues.Scripted(
    dialogues.scripts(rows, UNEVEN, filler=policy.filler)
  )
  sides = {
    'refilled': collectors.SlotCollector(
      policy, loop, slots=rows // 4, deterministic=False
    ),
    'waves': collectors.SlotCollector(
      policy, loop, slots=rows // 4, deterministic=True
    ),
  }
  collectors.assert_parity(
    *(side.collect(environment) for side in sides.values())
  )
  seconds = measure.interleave(
    {name: collectors.case(side, environment) for name, side in sides.items()},
    repeats=repeats,
  )
  return _report(seconds, rows, [('waves', 'refilled', _GOALS['refill'])])


def _report(
  seconds: Mapping[str, np.ndarray],
  rows: int,
  quotients: Sequence[tuple[str, str, float | None]],
) -> str:
  """Returns a table, and quotients of cases with their goals."""
  table = measure.table(
    ('case', 'collection, ms', 'trajectories/s'),
    [
      (name, measure.milliseconds(x), f'{rows / np.median(x):.1f}')
      for name, x in seconds.items()
    ],
  )
  lines = []
  for above, below, goal in quotients:
    ratio = measure.quotient(seconds[above], seconds[below])
    line = f'{above} / {below}: {ratio}; of the least {ratio.least:.3f}'
    lines.append(line if goal is None else f'{line}; goal: at least {goal}')
  return '\n'.join((table, '', *lines, measure.verdict(seconds)))


class _Table(NamedTuple):
  """A table that the benchmark can make.

  Attributes:
    make: the function that makes it.
    divisor: the number by which `--rows` is divided for it.
    torch: whether it needs torch.
  """

  make: Callable[..., str]
  divisor: int
  torch: bool = False


_TABLES: Mapping[str, _Table] = {
  'generate': _Table(functools.partial(against, 'generate'), 1, torch=True),
  'original': _Table(functools.partial(against, 'original'), 4, torch=True),
  'latency': _Table(latency, 1),
  'refill': _Table(refill, 2),
}


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and on which machine."""
  parser = argparse.ArgumentParser(prog='python -m benchmarks.collect')
  parser.add_argument(
    '--only', nargs='+', choices=_TABLES, default=[*_TABLES], help='some tables'
  )
  parser.add_argument(
    '--widths', nargs='+', choices=collectors.WIDTHS, default=['tiny']
  )
  parser.add_argument(
    '--rows',
    type=int,
    default=512,
    help='dialogues of `generate` and `latency`; others have fewer',
  )
  parser.add_argument(
    '--cut_at',
    type=int,
    default=_ORIGINAL_TURN,
    help='tokens that `original` writes in every turn',
  )
  parser.add_argument('--repeats', type=int, default=measure.MIN_REPEATS)
  measure.add_cores(parser)
  flags = parser.parse_args(arguments)
  longest = collectors.MAX_TURN_TOKENS
  if flags.cut_at < longest:  # it would cut turns of the scripts
    parser.error(f'--cut_at={flags.cut_at}: must be {longest} or greater')
  cores = measure.use_cores(flags.cores)
  versions = {}
  if any(_TABLES[name].torch for name in flags.only):
    versions = _peer_versions(cores)
  print(
    'whole collections; ms: median (least-greatest), quotients: median (middle '
    f'half) of {flags.repeats}\n'
  )
  print(measure.environment(**versions))
  sizes = {'repeats': flags.repeats}
  for width in flags.widths:
    policy = collectors.policy(width)
    with event_loop.EventLoop() as loop:
      for name in flags.only:
        print(f'\n{name}, {width}\n', flush=True)
        table = _TABLES[name]
        rows = flags.rows // table.divisor
        own = {'cut_at': flags.cut_at} if name == 'original' else {}
        print(table.make(policy, loop, rows=rows, **sizes, **own), flush=True)


def _peer_versions(cores: int) -> dict[str, str]:
  """Returns the versions of torch, which gets a thread for each core."""
  import torch
  import transformers

  torch.set_num_threads(cores)
  return {'torch': torch.__version__, 'transformers': transformers.__version__}


if __name__ == '__main__':
  main()
