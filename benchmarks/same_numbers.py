"""Compares the numbers that two checkouts of this repository compute.

    python -m benchmarks.same_numbers OLD NEW
    python -m benchmarks.same_numbers OLD NEW --steps 2 --runs st_ppo,lora

Use it for a change that must not alter any number. Each of `RUNS`, or each
algorithm that `--runs` names, collects one batch of the quickstart with
`lab collect` and trains for some steps, in each checkout. The processes see
only the files of their checkout, under the Python of this process. These must
be equal, bit for bit:

- every number of metrics.jsonl except the times; `RENAMED` lists metrics whose
  names have changed,
- every trajectory that the run wrote, in training and evaluations: texts,
  rewards, scores, status, and numbers of tokens,
- every array of the collected batch, its token ids among them,
- every tensor of the trained policy,
- every file under tests/golden, archives and JSON by their contents.

A line is printed for each comparison; the exit code is 1 if anything differs,
2 if a run fails. Both checkouts must run on the same machine and devices.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import numpy as np
from safetensors import numpy as safetensors

# The metrics whose names begin like this depend on the clock, and so differ
# between any two runs.
TIMES = (
  *('timing_s/', 'perf/', 'goodput/', 'hosts/', 'retrieval/latency'),
  'retrieval/outage_s',
)
# The old name of a metric -> its name today.
RENAMED: Mapping[str, str] = {}
_SHOWN = 3  # the most differences that a line names
# Evaluations are at the same steps as in the quickstart, but smaller.
_SMALL = ['--config.evaluate.num_questions=64']


class Run(NamedTuple):
  """A run that both checkouts make.

  Attributes:
    algorithm: the name of the algorithm, with the options of the quickstart.
    command: the command that trains: `train`, `sft` or `prefer`.
    flags: further flags of this command.
    hosts: the number of processes that train together.
  """

  algorithm: str
  command: str = 'train'
  flags: tuple[str, ...] = ()
  hosts: int = 1


RUNS = {
  **{name: Run(name) for name in ('token_ppo', 'st_ppo', 'so_grpo')},
  'sft': Run(
    'st_ppo',
    command='sft',
    flags=(
      '--config.model.path=',
      # One step of one-hop questions and one step of questions of all hops,
      # both without errors, and then demonstrations with errors.
      '--config.sft.clean_one_hop_steps=1',
      '--config.sft.clean_steps=1',
    ),
  ),
  'tdpo2': Run(
    'so_grpo',
    command='prefer',
    flags=(
      '--config.preference.name=tdpo2',
      '--config.preference.batch_size=4',
    ),
  ),
  'lora': Run('st_ppo', flags=('--config.model.lora.rank=8',)),
  'two_hosts': Run('st_ppo', hosts=2),
}


class Comparison(NamedTuple):
  """The result of a comparison: the differences that it found.

  Attributes:
    subject: what was compared.
    count: how many values, arrays or files were compared.
    differences: a text for each difference; empty if all are equal.
  """

  subject: str
  count: int
  differences: list[str]

  def __str__(self) -> str:
    if not self.differences:
      return f'equal    {self.subject}: {self.count} compared'
    shown = '; '.join(self.differences[:_SHOWN])
    more = len(self.differences) - _SHOWN
    rest = f'; and {more} more' if more > 0 else ''
    return f'DIFFERS  {self.subject}: {shown}{rest}'


def compare_lines(
  old: Mapping[str, Sequence[Mapping[str, Any]]],
  new: Mapping[str, Sequence[Mapping[str, Any]]],
  subject: str,
) -> Comparison:
  """Compares metrics or trajectories that two runs wrote, without the times.

  Args:
    old: the values of the JSON lines of each file of one run, by file name.
    new: the same for the other run.
    subject: the name of what is compared, for the result.
  """
  differences, count = _missing(old, new), 0
  for file in old.keys() & new.keys():
    lengths = len(old[file]), len(new[file])
    if lengths[0] != lengths[1]:
      differences.append(f'{file}: {lengths[0]} lines, now {lengths[1]}')
    for number, (before, after) in enumerate(zip(old[file], new[file]), 1):
      before = {RENAMED.get(name, name): x for name, x in before.items()}
      names = [x for x in before | after if not x.startswith(TIMES)]
      count += len(names)
      for name in names:
        text = f'{file} line {number}: {name}'
        if name not in before or name not in after:
          side = 'old' if name in before else 'new'
          differences.append(f'{text} is in {side} only')
        # The texts of values are compared, because the texts of -0.0 and 0.0,
        # and of 1 and 1.0, differ, and the texts of two nan are equal.
        elif repr(before[name]) != repr(after[name]):
          is_number = isinstance(before[name], int | float)
          numbers = f' {before[name]!r}, now {after[name]!r}'
          differences.append(text + (numbers if is_number else ''))
  return Comparison(subject, count, sorted(differences))


def compare_arrays(
  old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray], subject: str
) -> Comparison:
  """Compares arrays by dtype, shape and bytes."""
  differences = _missing(old, new)
  for name in old:
    if name not in new:
      continue
    before, after = np.asarray(old[name]), np.asarray(new[name])
    kinds = [f'{x.dtype} {list(x.shape)}' for x in (before, after)]
    if kinds[0] != kinds[1]:
      differences.append(f'{name}: {kinds[0]}, now {kinds[1]}')
    elif before.tobytes() != after.tobytes():
      count = int((_entry_bytes(before) != _entry_bytes(after)).any(1).sum())
      differences.append(f'{name}: {count} of {before.size} entries')
  return Comparison(subject, len(old), differences)


def _entry_bytes(x: np.ndarray) -> np.ndarray:
  """Returns a row of bytes for each entry of an array.

  As bytes, two nans with the same bits are equal, and -0.0 differs from 0.0.
  """
  return np.frombuffer(x.tobytes(), np.uint8).reshape(x.size, x.itemsize)


def compare_golden(old: pathlib.Path, new: pathlib.Path) -> Comparison:
  """Compares the files of two folders: archives and JSON by their contents.

  Python files are not compared, because the scripts that make the other files
  may change. Files that only the second folder has are not compared either.
  """
  folders = [_data_files(folder) for folder in (old, new)]
  differences = [x for x in _missing(*folders) if x.endswith('old only')]
  for name in folders[0].keys() & folders[1].keys():
    before, after = folders[0][name], folders[1][name]
    if name.endswith('.npz'):
      arrays = compare_arrays(_npz(before), _npz(after), name)
      differences += [f'{name}: {line}' for line in arrays.differences]
    elif name.endswith('.json'):
      texts = [path.read_text('utf-8') for path in (before, after)]
      if repr(json.loads(texts[0])) != repr(json.loads(texts[1])):
        differences.append(f'{name}: other contents')
    elif before.read_bytes() != after.read_bytes():
      differences.append(f'{name}: other bytes')
  return Comparison('tests/golden', len(folders[0]), sorted(differences))


def _data_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns the files of a folder that are not Python, by relative name."""
  return {
    path.relative_to(folder).as_posix(): path
    for path in sorted(folder.rglob('*'))
    if path.is_file() and path.suffix not in ('.py', '.pyc')
  }


def _missing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """Returns a text for each name that only one side has."""
  return [f'{name} is in old only' for name in old if name not in new] + [
    f'{name} is in new only' for name in new if name not in old
  ]


def _npz(path: pathlib.Path) -> dict[str, np.ndarray]:
  with np.load(path, allow_pickle=False) as archive:
    return dict(archive)


def json_lines(path: pathlib.Path) -> list[Any]:
  """Returns the JSON values of the lines of a file."""
  return [json.loads(line) for line in path.read_text('utf-8').splitlines()]


def _lines(workdir: pathlib.Path, pattern: str) -> dict[str, list[Any]]:
  """Returns the values of the JSON lines of each file of a run, by file name.

  Args:
    workdir: the folder of the run.
    pattern: the glob pattern of the files.
  """
  return {path.name: json_lines(path) for path in workdir.glob(pattern)}


def _call(checkout: pathlib.Path, *arguments: str, hosts: int = 1) -> None:
  """Runs a command of a checkout, in one process or as several hosts.

  Raises:
    SystemExit: with code 2 if the command fails; its output is printed first.
  """
  # -P and PYTHONPATH keep an installed copy of the package from being imported.
  command = [sys.executable, '-P', '-m', 'stppo_jax', *arguments]
  with tempfile.TemporaryFile('w+') as output:
    processes = [
      subprocess.Popen(
        command + place,
        cwd=checkout,
        env=os.environ | {'PYTHONPATH': str(checkout)},
        stdout=output,
        stderr=subprocess.STDOUT,
      )
      for place in _places(hosts)
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
      output.seek(0)
      print(
        f'{checkout}: exit code {max(codes, key=abs)} of '
        f'{" ".join(arguments)}\n{output.read()}',
        file=sys.stderr,
      )
      raise SystemExit(2)


def _places(hosts: int) -> list[list[str]]:
  """Returns, for each host, the flags with which it finds the other hosts."""
  if hosts == 1:
    return [[]]
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    address = f'--coordinator=127.0.0.1:{probe.getsockname()[1]}'
  return [
    [address, f'--num_processes={hosts}', f'--process_id={index}']
    for index in range(hosts)
  ]


def compare_runs(
  checkouts: Sequence[pathlib.Path],
  name: str,
  *,
  steps: int,
  overrides: Sequence[str] = (),
) -> Iterator[Comparison]:
  """Collects and trains in both checkouts; yields the comparisons.

  Args:
    checkouts: the old and the new checkout.
    name: the name of one of `RUNS`, or of an algorithm.
    steps: the number of steps of each run.
    overrides: further `--config.KEY=VALUE` flags for both runs.
  """
  run = RUNS.get(name, Run(name))
  config = [
    f'--config=configs/quickstart.py:{run.algorithm}',
    *_SMALL,
    *run.flags,
    *overrides,
  ]
  length = [f'--config.sft.num_steps={steps}']
  if run.command == 'train':
    length.append(f'--config.num_steps={steps}')
  with tempfile.TemporaryDirectory() as scratch:
    workdirs = [pathlib.Path(scratch, side) for side in ('old', 'new')]
    batches = [workdir.with_suffix('.npz') for workdir in workdirs]
    for checkout, workdir, batch in zip(checkouts, workdirs, batches):
      _call(checkout, 'lab', 'collect', *config, f'--out={batch}')
      train = [run.command, *config, *length, f'--workdir={workdir}']
      if run.command == 'prefer':
        train.append(f'--batch={batch}')
      _call(checkout, *train, hosts=run.hosts)
    yield compare_arrays(*map(_npz, batches), f'{name}, arrays of a batch')
    kinds = {'metrics': 'metrics.jsonl'}
    if run.command == 'train':
      kinds['trajectories'] = '*-[0-9]*.jsonl'
    for kind, pattern in kinds.items():
      lines = (_lines(workdir, pattern) for workdir in workdirs)
      yield compare_lines(*lines, f'{name}, {kind}')
    files = [workdir / 'policy' / 'model.safetensors' for workdir in workdirs]
    policies = map(safetensors.load_file, files)
    yield compare_arrays(*policies, f'{name}, tensors of the policy')


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints a line for each comparison; returns the exit code."""
  parser = argparse.ArgumentParser(
    prog='python -m benchmarks.same_numbers',
    description='Compares the numbers that two checkouts compute.',
  )
  parser.add_argument('old', type=pathlib.Path, help='folder of a checkout')
  parser.add_argument('new', type=pathlib.Path, help='folder of a checkout')
  parser.add_argument('--steps', type=int, default=5, help='steps of each run')
  parser.add_argument(
    '--runs',
    default=','.join(RUNS),
    help='such as %(default)s, or other algorithms; empty: no run',
  )
  parser.add_argument(
    '--override',
    action='append',
    default=[],
    metavar='KEY=VALUE',
    help='a config key of the runs in both checkouts; may be repeated',
  )
  flags = parser.parse_args(arguments)
  checkouts = [flags.old.resolve(), flags.new.resolve()]
  for checkout in checkouts:
    if not (checkout / 'stppo_jax' / '__main__.py').is_file():
      parser.error(f'{checkout}: not a checkout, it has no stppo_jax')
  overrides = [f'--config.{x}' for x in flags.override]
  golden = [checkout / 'tests' / 'golden' for checkout in checkouts]
  comparisons = [compare_golden(*golden)]
  print(comparisons[0], flush=True)
  for name in filter(None, flags.runs.split(',')):
    for comparison in compare_runs(
      checkouts, name, steps=flags.steps, overrides=overrides
    ):
      print(comparison, flush=True)
      comparisons.append(comparison)
  differs = any(comparison.differences for comparison in comparisons)
  print('the numbers differ' if differs else 'all numbers are the same')
  return int(differs)


if __name__ == '__main__':
  sys.exit(main())
