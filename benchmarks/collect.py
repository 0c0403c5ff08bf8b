"""Times collection: against `generate`, under latency, with refilled slots.

    python -m benchmarks.collect
    python -m benchmarks.collect --only latency refill

Dialogues are scripted (see `dialogues`): they are random, of known lengths, and
written by a model that takes as long as any model of its shape. All cases of a
table collect the same dialogues greedily and write the same tokens. This is
asserted before anything is timed and checked again in every timed collection;
log-probabilities agree to 1e-4. Each time is the time of a whole collection, in
which texts are encoded and decoded, queries are answered on the event loop's
thread, and dialogues start and end.

`generate`: 512 dialogues, as many as a step of the paper collects; prompts of
40 to 100 tokens, 1 to 3 searches, observations of 60 to 125 tokens, turns
log-normal around 20 tokens, at most 125. These are a quarter of the lengths and
limits of the paper's setting (at most 500 tokens in a turn and in an
observation, 3 searches). Each dialogue has a slot. The peer, a loop over
`generate` of `transformers`, calls `generate` once a turn on all unfinished
dialogues, from their first token on, and waits for the last dialogue of a
batch. `generate` stops by the ids of the closing tokens. The peer runs with the
fastest number of threads and batch size. A batch has dialogues of about the
same length. The peer does not wait for a retriever.

Our side has settings for a CPU, not the defaults of `configs/base.py`: as many
`rollout.lanes` as there are cores, `batch_rows` 16, `decode_chunk` 24,
`early_exit` 0.5, `lookahead` 0, ten pages a slot, and `deterministic=False`.
Waves (`deterministic=True`) have only the lanes, the chunks and the pages: each
program works on all slots of a lane, and no chunk ends early.

`latency`: the same dialogues, where each search is answered after 0, 0.2 or
1 s, or log-normal around 0.2 s (sigma 1; the mean is 0.33 s). Each dialogue has
a slot, but few of them decode at a time; those that wait are left out of the
batches. Nothing can hide the waits of the last dialogues, which matter less if
the dialogues take longer: see larger `--widths`.

`refill`: half of the dialogues, with turns log-normal around 16 (sigma 1), and
a quarter as many slots as dialogues. Slots that are given to the next dialogue
at once are compared with waves of dialogues, each as long as its longest
dialogue. The two modes also differ in their batches of 16 rows of similar
length and in chunks that end early, see above.
"""

from collections.abc import Callable, Mapping, Sequence
import pathlib
import tempfile
from typing import Any

import numpy as np

from benchmarks import collectors
from benchmarks import dialogues
from benchmarks import measure
from stppo_jax.models.hf import export
from stppo_jax.rollout import event_loop

_GOALS = {'generate': 5.0, 'latency': 0.85, 'refill': 1.4}
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


def generate(
  policy: collectors.Policy,
  loop: event_loop.EventLoop,
  *,
  rows: int,
  repeats: int,
) -> str:
  """Returns a table that compares our collection with a loop over `generate`.

  Args:
    policy: the policy that samples. It is exported to a directory, from which
      `transformers` loads it.
    loop: the event loop that runs the environment's coroutines.
    rows: the number of dialogues.
    repeats: the number of samples of each case.

  Raises:
    AssertionError: if the tokens or log-probabilities of two cases differ.
  """
  from benchmarks import generate_reference  # torch is needed here only

  environment = dialogues.Scripted(
    dialogues.scripts(rows, TURNS, filler=policy.filler)
  )
  sides: dict[str, Any] = _modes(policy, loop, 'ours', slots=rows)
  ours = sides['ours'].collect(environment)
  collectors.assert_parity(ours, sides['waves'].collect(environment))
  with tempfile.TemporaryDirectory() as directory:
    export.export(directory, policy.model.config, policy.params)
    peer = generate_reference.GenerateLoop(
      pathlib.Path(directory), policy.tokenizer, loop
    )
  chosen = generate_reference.use_fastest(peer, environment, rows=rows)
  theirs = peer.collect(environment)
  collectors.assert_parity(ours, peer.with_logprobs(theirs))
  cases = {
    name: collectors.case(side, environment)
    for name, side in (sides | {'generate': peer}).items()
  }
  goals = [
    ('generate', 'ours', _GOALS['generate']),
    ('generate', 'waves', None),
  ]
  return f'{chosen}\n\n{_report(cases, goals, rows=rows, repeats=repeats)}'


def latency(
  policy: collectors.Policy,
  loop: event_loop.EventLoop,
  *,
  rows: int,
  repeats: int,
) -> str:
  """Returns a table that compares delayed and immediate observations.

  Raises:
    AssertionError: if latency changes tokens or log-probabilities.
  """
  collector = collectors.SlotCollector(
    policy, loop, slots=rows, deterministic=False
  )
  environments = {
    name: dialogues.Scripted(
      dialogues.scripts(rows, TURNS, filler=policy.filler, latency=draw)
    )
    for name, draw in LATENCIES.items()
  }
  collectors.assert_parity(
    *(collector.collect(environments[name]) for name in ('0 s', 'log-normal'))
  )
  cases = {
    name: collectors.case(collector, x) for name, x in environments.items()
  }
  goals = [
    ('0 s', name, _GOALS['latency'] if name == '0.2 s' else None)
    for name in LATENCIES
    if name != '0 s'
  ]
  return _report(cases, goals, rows=rows, repeats=repeats)


def refill(
  policy: collectors.Policy,
  loop: event_loop.EventLoop,
  *,
  rows: int,
  repeats: int,
) -> str:
  """Returns a table that compares refilled slots with waves.

  Raises:
    AssertionError: if the tokens or log-probabilities of the modes differ.
  """
  environment = dialogues.Scripted(
    dialogues.scripts(rows, UNEVEN, filler=policy.filler)
  )
  sides = _modes(policy, loop, 'refilled', slots=rows // 4)
  collectors.assert_parity(
    *(side.collect(environment) for side in sides.values())
  )
  cases = {
    name: collectors.case(side, environment) for name, side in sides.items()
  }
  goals = [('waves', 'refilled', _GOALS['refill'])]
  return _report(cases, goals, rows=rows, repeats=repeats)


def _modes(
  policy: collectors.Policy,
  loop: event_loop.EventLoop,
  name: str,
  *,
  slots: int,
) -> dict[str, collectors.SlotCollector]:
  """Returns two collectors by name: `name` refills slots, 'waves' does not."""
  return {
    mode: collectors.SlotCollector(
      policy, loop, slots=slots, deterministic=mode == 'waves'
    )
    for mode in (name, 'waves')
  }


def _report(
  cases: Mapping[str, measure.Case],
  quotients: Sequence[tuple[str, str, float | None]],
  *,
  rows: int,
  repeats: int,
) -> str:
  """Times cases; returns a table, and lines with the quotients of cases.

  Args:
    cases: the cases by name.
    quotients: the names of the two cases of each quotient, numerator first, and
      the least value that is the goal; None without a goal.
    rows: the number of trajectories of a case.
    repeats: the number of samples of each case.
  """
  seconds = measure.interleave(cases, repeats=repeats)
  table = measure.table(
    ('case', 'collection, ms', 'trajectories/s'),
    [
      (name, measure.milliseconds(x), f'{rows / np.median(x):.1f}')
      for name, x in seconds.items()
    ],
  )
  lines = [
    measure.comparison(
      seconds, above, below, f'at least {goal}' if goal else ''
    )
    for above, below, goal in quotients
  ]
  return '\n'.join((table, '', *lines, measure.verdict(seconds)))


# The function that makes each table, and the number by which `--rows` is
# divided for this table.
_TABLES: Mapping[str, tuple[Callable[..., str], int]] = {
  'generate': (generate, 1),
  'latency': (latency, 1),
  'refill': (refill, 2),
}


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and on which machine."""
  parser = measure.parser(
    'collect',
    rows=512,  # for `generate` and `latency`; `refill` has half as many
    repeats=measure.MIN_REPEATS,
  )
  parser.add_argument(
    '--only', nargs='+', choices=_TABLES, default=[*_TABLES], help='some tables'
  )
  parser.add_argument(
    '--widths', nargs='+', choices=collectors.WIDTHS, default=['tiny']
  )
  flags = measure.start(parser, arguments)
  print(
    'whole collections; ms: median (least-greatest), quotients: median (middle '
    f'half) of {flags.repeats}'
  )
  for width in flags.widths:
    policy = collectors.policy(width)
    with event_loop.EventLoop() as loop:
      for name in flags.only:
        print(f'\n{name}, {width}\n', flush=True)
        make, divisor = _TABLES[name]
        table = make(
          policy, loop, rows=flags.rows // divisor, repeats=flags.repeats
        )
        print(table, flush=True)


if __name__ == '__main__':
  main()
