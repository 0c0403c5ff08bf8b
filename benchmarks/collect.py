"""Collecting: against `generate`, under latency, with refilled slots.

    python -m benchmarks.collect
    python -m benchmarks.collect --only latency refill

Dialogues are scripted (see `dialogues`): random, of known lengths, from a model
that costs what any of its shape costs. All cases of a table play the same
dialogues greedily and write the same tokens, which is asserted before anything
is timed and checked again in what is timed; log-probabilities agree to 1e-4.
Each time is of a whole collection: texts encoded and decoded, queries answered
on the event loop's thread, rows begun and ended.

`generate`: 512 dialogues, as many as a step of the paper collects; prompts of
40 to 100 tokens, 1 to 3 searches, observations of 60 to 125, turns log-normal
around 20, at most 125: searching as in the paper's setting (500 tokens a turn
and an observation at most, 3 searches), at a quarter of its lengths, the limits
too. Each row has a slot. The peer calls `transformers` `generate` a turn at a
time on all rows that still play, from the whole dialogues, and waits for the
last one of a batch; it stops by the ids of the closing tokens. It has the
threads and the batches that it is the fastest with, rows of about the same
length in each.

Ours has what a CPU wants, not the defaults of `configs/base.py`: as many
`rollout.lanes` as there are cores, `batch_rows` 16, `early_exit` 0.5,
`lookahead` 0, ten `cache_blocks`, and `deterministic=False`. Waves
(`deterministic=True`) have the lanes and the blocks only: each program works on
all slots of a lane, and no chunk ends early.

`original`, with a quarter of the rows, knows no stops: it writes 500 tokens,
the limit of the loops that the paper builds on, or to the end of sequence, and
cuts; what it is slower by is removed waste, not speed. The goal is of these
500; `--cut_at=125` is the same quarter of that limit as these dialogues are of
the paper's. No peer waits for a retriever.

`latency`: the same dialogues, and each search answered after 0, 0.2 or 1 s, or
log-normal around 0.2 s (sigma 1; the mean is 0.33 s). Slots are oversubscribed:
each row has one, and few of them write at a time; those that wait are left out
of the batches. `sharing` tells what is predicted from the time without latency.
A wait at the end is hidden by nobody's work, and weighs the less the longer the
dialogues take: see larger `--widths`.

`refill`: turns log-normal around 16 (sigma 1), half of the rows, which are four
times the slots: a slot is given to the next row at once, against waves of as
many slots, which end with their longest dialogue. It is of both modes as they
are: batches of 16 rows of like length and chunks that end early are in it, see
above.
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
# Work of a token that is told, of that of a token that is written.
_TOLD_COST = 0.4
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
_TURNS = dialogues.Shape(turn=dialogues.log_normal(20, 0.6), **_SIZES)
_UNEVEN = dialogues.Shape(turn=dialogues.log_normal(16, 1.0), **_SIZES)
_LATENCIES: Mapping[str, Callable[[np.random.Generator], float]] = {
  '0 s': lambda rng: 0.0,
  '0.2 s': lambda rng: 0.2,
  '1 s': lambda rng: 1.0,
  'log-normal': lambda rng: float(rng.lognormal(np.log(0.2), 1.0)),
}


def against(
  peer: str,
  played: collectors.Policy,
  loop: event_loop.EventLoop,
  *,
  rows: int,
  repeats: int,
  cut_at: int = collectors.MAX_TURN_TOKENS,
) -> str:
  """Ours beside a loop on `generate`: with stops, or the 'original' without.

  Args:
    peer: 'generate' or 'original'.
    played, loop, rows, repeats: see `main`.
    cut_at: most tokens of a turn; 'original' writes as many in every one.

  Raises:
    AssertionError: they write other tokens, or score them differently.
  """
  from benchmarks import generate_reference  # torch is needed here only

  environment = dialogues.Scripted(
    dialogues.scripts(rows, _TURNS, filler=played.filler)
  )
  players: dict[str, Any] = {
    'ours': collectors.Player(played, loop, slots=rows, deterministic=False),
    'waves': collectors.Player(played, loop, slots=rows, deterministic=True),
  }
  ours = players['ours'].collect(environment)
  collectors.assert_parity(ours, players['waves'].collect(environment))
  with tempfile.TemporaryDirectory() as directory:
    export.export(directory, played.model.config, played.params)
    players[peer] = generate_reference.GenerateLoop(
      pathlib.Path(directory),
      played.words,
      loop,
      stops=peer == 'generate',
      max_turn_tokens=cut_at,
    )
  chosen = generate_reference.use_fastest(players[peer], environment, rows=rows)
  theirs = players[peer].collect(environment)
  collectors.assert_parity(ours, players[peer].scored(theirs))
  seconds = measure.interleave(
    {
      name: collectors.case(player, environment)
      for name, player in players.items()
    },
    repeats=repeats,
  )
  goals = [(peer, 'ours', _GOALS[peer]), (peer, 'waves', None)]
  return f'{chosen}\n\n{_told(seconds, rows, goals)}'


def latency(
  played: collectors.Policy,
  loop: event_loop.EventLoop,
  *,
  rows: int,
  repeats: int,
) -> str:
  """Answers that take time beside answers at once, and the prediction.

  Raises:
    AssertionError: other tokens or log-probabilities with latency.
  """
  player = collectors.Player(played, loop, slots=rows, deterministic=False)
  played_by = {
    name: dialogues.scripts(rows, _TURNS, filler=played.filler, latency=draw)
    for name, draw in _LATENCIES.items()
  }
  environments = {
    name: dialogues.Scripted(scripts) for name, scripts in played_by.items()
  }
  expected = player.collect(environments['0 s'])
  collectors.assert_parity(expected, player.collect(environments['log-normal']))
  seconds = measure.interleave(
    {name: collectors.case(player, x) for name, x in environments.items()},
    repeats=repeats,
  )
  at_once = float(np.median(seconds['0 s']))
  goals = [
    ('0 s', name, _GOALS['latency'] if name == '0.2 s' else None)
    for name in _LATENCIES
    if name != '0 s'
  ]
  predicted = ', '.join(
    f'{name} {at_once / _predicted(expected, scripts, at_once):.3f}'
    for name, scripts in played_by.items()
  )
  return '\n'.join(
    (_told(seconds, rows, goals), f'predicted, of 0 s: {predicted}')
  )


def _predicted(
  trajectories: Sequence[types.Trajectory],
  scripts: Sequence[dialogues.Script],
  at_once: float,
) -> float:
  """Seconds, from those without latency, each in a slot; see `sharing`."""
  work = []
  for trajectory in trajectories:
    told = [len(trajectory.prompt_ids)]
    told += [len(turn.observation_ids) for turn in trajectory.turns]
    work.append(
      [
        len(turn.token_ids) + _TOLD_COST * length
        for turn, length in zip(trajectory.turns, told)
      ]
    )
  scale = at_once / sum(map(sum, work))
  rows = [
    sharing.Row([scale * x for x in turns], script.latencies)
    for turns, script in zip(work, scripts, strict=True)
  ]
  return sharing.makespan(rows, slots=len(rows))


def refill(
  played: collectors.Policy,
  loop: event_loop.EventLoop,
  *,
  rows: int,
  repeats: int,
) -> str:
  """Slots that are refilled beside waves.

  Raises:
    AssertionError: other tokens or log-probabilities.
  """
  environment = dialogues.Scripted(
    dialogues.scripts(rows, _UNEVEN, filler=played.filler)
  )
  players = {
    'refilled': collectors.Player(
      played, loop, slots=rows // 4, deterministic=False
    ),
    'waves': collectors.Player(
      played, loop, slots=rows // 4, deterministic=True
    ),
  }
  collectors.assert_parity(
    *(player.collect(environment) for player in players.values())
  )
  seconds = measure.interleave(
    {
      name: collectors.case(player, environment)
      for name, player in players.items()
    },
    repeats=repeats,
  )
  return _told(seconds, rows, [('waves', 'refilled', _GOALS['refill'])])


def _told(
  seconds: Mapping[str, np.ndarray],
  rows: int,
  quotients: Sequence[tuple[str, str, float | None]],
) -> str:
  """A table, and quotients of cases with their goals."""
  table = measure.table(
    ('case', 'collection, ms', 'trajectories/s'),
    [
      (name, measure.milliseconds(x), f'{rows / np.median(x):.1f}')
      for name, x in seconds.items()
    ],
  )
  lines = []
  for above, below, goal in quotients:
    found = measure.quotient(seconds[above], seconds[below])
    line = f'{above} / {below}: {found}; of the least {found.least:.3f}'
    lines.append(line if goal is None else f'{line}; goal: at least {goal}')
  return '\n'.join((table, '', *lines, measure.verdict(seconds)))


class _Table(NamedTuple):
  """What plays it, which part of the rows it has, whether torch plays too."""

  play: Callable[..., str]
  share: int
  torch: bool = False


_TABLES: Mapping[str, _Table] = {
  'generate': _Table(functools.partial(against, 'generate'), 1, torch=True),
  'original': _Table(functools.partial(against, 'original'), 4, torch=True),
  'latency': _Table(latency, 1),
  'refill': _Table(refill, 2),
}


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and where."""
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
    help='of `generate` and `latency`; others have fewer',
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
  if flags.cut_at < longest:  # it would cut turns that are asked for
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
    played = collectors.policy(width)
    with event_loop.EventLoop() as loop:
      for name in flags.only:
        print(f'\n{name}, {width}\n', flush=True)
        table = _TABLES[name]
        rows = flags.rows // table.share
        own = {'cut_at': flags.cut_at} if name == 'original' else {}
        print(table.play(played, loop, rows=rows, **sizes, **own), flush=True)


def _peer_versions(cores: int) -> dict[str, str]:
  """Of torch, which gets as many threads as there are cores."""
  import torch
  import transformers

  torch.set_num_threads(cores)
  return {'torch': torch.__version__, 'transformers': transformers.__version__}


if __name__ == '__main__':
  main()
