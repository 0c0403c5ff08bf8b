"""Compares hosts that collect beside others with hosts that do both in turn.

    python -m benchmarks.side_by_side
    python -m benchmarks.side_by_side --scale=0.1 --steps=12

Two processes are the two parts of a run with a tiny model: hosts that learn,
and hosts that collect. Queue, publishing and votes work as in any run.
Each phase lasts as long as the same phase of a large model would, times
`--scale`: the process does the work of the tiny model and sleeps for the rest.
The large run is a 7B model on 16 hosts of v5e:8x8, of which each has four
chips. Its times are from `plan` and `benchmarks.schedule`:

- in turn, 16 hosts collect in 35 s, of which they wait 7 s for the last
  dialogues, and learn in 39 s;
- side by side, 12 hosts learn in 52 s, 16 / 12 as long. Four hosts decode four
  times as many dialogues each, for which `plan` expects 1.75 times as long,
  since every token reads all weights anyway: 49 s, and the wait. With
  `rollout.turn_swaps` the next step begins in the slots that wait (not
  simulated: the sleep is shorter by the wait).
- A host that collects fetches 15.2 GB at 100 Gb/s, in 1.2 s.

The columns are the planned seconds of a step, the measured seconds divided by
`--scale`, the throughput divided by the throughput of the run in turn, and the
share of a step in which the hosts that learn wait. The exit code is 1 if this
share is above 10 %, or if the throughput is below 1.3 times the throughput of
the run in turn.
"""

import argparse
from collections.abc import Sequence
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_FETCH = 15.2e9 / 12.5e9  # the seconds of fetching new weights
_IDLE, _GAIN = 0.1, 1.3
_SKIPPED = 3  # the first steps, which wait until programs are compiled
_SMALL = {
  'model.path': "''",
  'model.hidden_size': 16,
  'model.intermediate_size': 24,
  'model.num_layers': 1,
  'model.num_heads': 2,
  'model.num_kv_heads': 1,
  'model.head_dim': 8,
  'env.max_turns': 1,
  'env.max_turn_tokens': 8,
  'env.max_observation_tokens': 32,
  'env.max_length': 128,
  'rollout.trajectories_per_step': 8,
  'rollout.length_bucket': 128,
  'updates.minibatch_size': 8,
  'updates.num_epochs': 1,
  'evaluate.every': 0,
  'checkpoint.every': 99,
  'writer.token_details': 0,
}


class Case(NamedTuple):
  """A way to divide the hosts.

  Attributes:
    name: the name of this way in the table.
    learn: the seconds in which a large run learns from a step.
    collect: the seconds in which a large run collects a step.
    collectors: the number of processes that only collect.
  """

  name: str
  learn: float
  collect: float
  collectors: int


CASES = (
  Case('in turn', 39.0, 35.0, 0),
  Case('side by side', 52.0, 56.0, 1),
  Case('side by side, turn swaps', 52.0, 49.0, 1),
)


class Measured(NamedTuple):
  """The means over the steps of a run.

  Attributes:
    seconds: the seconds of a step, divided by `--scale`.
    idle: the share of a step in which the hosts that learn wait; 0 if all hosts
      collect and learn in turn.
  """

  seconds: float
  idle: float


def measure(case: Case, folder: pathlib.Path, *, scale: float, steps: int):
  """Makes a run; returns its `Measured`.

  Raises:
    RuntimeError: if the run fails; the message is its output.
  """
  changes = _SMALL | {
    'num_steps': steps,
    'rollout.steps_ahead': case.collectors,
    'mesh.collectors': case.collectors,
  }
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{probe.getsockname()[1]}'
  count = 1 + case.collectors
  paces = [str(scale * x) for x in (case.learn, case.collect, _FETCH)]
  processes = []
  for index in range(count):
    command = [sys.executable, '-m', 'benchmarks.side_by_side', 'host', *paces]
    command += ['train', '--config=configs/quickstart.py:grpo']
    command += [f'--config.{key}={x}' for key, x in changes.items()]
    command += [f'--workdir={folder}']
    if count > 1:
      command += [f'--coordinator={address}', f'--num_processes={count}']
      command += [f'--process_id={index}']
    processes.append(
      subprocess.Popen(
        command,
        cwd=_ROOT,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
      )
    )
  texts = [process.communicate()[0] for process in processes]
  if any(process.returncode for process in processes):
    raise RuntimeError('\n'.join(texts))
  lines = (folder / 'metrics.jsonl').read_text('utf-8').splitlines()
  found = [json.loads(line) for line in lines][-(steps - _SKIPPED) :]
  seconds = statistics.mean(line['timing_s/step'] for line in found)
  waited = statistics.mean(line['timing_s/wait'] for line in found)
  return Measured(seconds / scale, waited / seconds if case.collectors else 0.0)


def main(argv: Sequence[str]) -> int:
  """Prints the table; returns the exit code."""
  parser = argparse.ArgumentParser()
  parser.add_argument('--scale', type=float, default=0.1)
  parser.add_argument('--steps', type=int, default=12)
  flags = parser.parse_args(argv)
  in_turn, is_good = None, True
  print(f'{"":26} planned  measured  throughput  idle')
  for case in CASES:
    with tempfile.TemporaryDirectory() as folder:
      found = measure(
        case, pathlib.Path(folder), scale=flags.scale, steps=flags.steps
      )
    planned = max(case[1:3]) if case.collectors else sum(case[1:3])
    in_turn = in_turn or found.seconds
    gain = in_turn / found.seconds
    print(
      f'{case.name:26} {planned:5.0f} s  {found.seconds:6.1f} s  {gain:9.2f}x'
      f'  {found.idle:4.0%}'
    )
    is_good &= not case.collectors or (gain >= _GAIN and found.idle <= _IDLE)
  return 0 if is_good else 1


def _host(learn: str, collect: str, fetch: str, *argv: str) -> int:
  """Runs one process of a run; returns its exit code.

  Args:
    learn, collect, fetch: the seconds that the phases last at least.
    *argv: the arguments of `stppo_jax`.
  """
  import jax

  from stppo_jax import __main__
  from stppo_jax.learner import learner as learner_lib
  from stppo_jax.parallel import transfer
  from stppo_jax.rollout import steps

  def paced(owner, name, seconds):
    function = getattr(owner, name)

    def slower(*args, **options):
      end = time.monotonic() + seconds
      result = jax.block_until_ready(function(*args, **options))
      time.sleep(max(end - time.monotonic(), 0.0))
      return result

    setattr(owner, name, slower)

  paced(steps.StepCollector, 'collect_groups', float(collect))
  paced(transfer, 'whole', float(fetch))
  # `plan` expects that annotate takes a quarter of the time of learning.
  paced(learner_lib.Learner, 'annotate', 0.25 * float(learn))
  paced(learner_lib.Learner, 'update', 0.75 * float(learn))
  return __main__.main(argv)


if __name__ == '__main__':
  arguments = sys.argv[1:]
  if arguments[:1] == ['host']:
    sys.exit(_host(*arguments[1:]))
  sys.exit(main(arguments))
