"""Finds what differs between the folders of two runs of one config."""

from collections.abc import Iterator
import json
import pathlib
from typing import Any

from benchmarks import same_numbers

# The metrics whose names begin like this are not compared: metrics of times,
# and metrics that count the faults themselves. The number of queries that were
# sent is not compared either, because a process that is started again has an
# empty cache of answers.
_LEFT_OUT = (
  *same_numbers.TIMES,
  'retrieval/failures',
  'retrieval/ok',
  'retrieval/outage',
  'retrieval/retries',
  'writer/sink_errors',
)


def differences(
  disturbed: pathlib.Path, undisturbed: pathlib.Path, *, may_lack: bool
) -> Iterator[str]:
  """Yields a line for each difference between the folders of two runs.

  Args:
    disturbed: the folder of the run that faults have struck.
    undisturbed: the folder of the run without faults.
    may_lack: whether the run with faults may lack lines of metrics and
      dialogues.
  """
  name = 'policy/model.safetensors'
  if (disturbed / name).read_bytes() != (undisturbed / name).read_bytes():
    yield name
  if _fingerprints(disturbed) != _fingerprints(undisturbed):
    yield 'the last checkpoint'
  ours, theirs = _metrics(disturbed), _metrics(undisturbed)
  for step, line in theirs.items():
    if step not in ours:
      if not may_lack:
        yield f'metrics of step {step}: missing'
    elif ours[step] != line:
      names = [k for k in line | ours[step] if line.get(k) != ours[step].get(k)]
      yield f'metrics of step {step}: {", ".join(sorted(names)[:3])}'
  for path in sorted(undisturbed.glob('trajectories-*.jsonl')):
    ours_path = disturbed / path.name
    # On a full disk, a file of dialogues is missing or empty. Otherwise it has
    # all lines.
    if not ours_path.is_file() or not ours_path.stat().st_size:
      if not may_lack:
        yield f'{path.name}: missing'
    elif ours_path.read_bytes() != path.read_bytes():
      yield path.name


def _metrics(workdir: pathlib.Path) -> dict[int, dict[str, Any]]:
  """Returns the metrics of each step, without the metrics of `_LEFT_OUT`."""
  return {
    line['step']: {k: x for k, x in line.items() if not k.startswith(_LEFT_OUT)}
    for line in same_numbers.json_lines(workdir / 'metrics.jsonl')
  }


def steps(workdir: pathlib.Path) -> list[int]:
  """Returns the steps for which a run has checkpoints."""
  folder = workdir / 'checkpoints'
  names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
  return [int(name) for name in names if name.isdecimal()]


def _fingerprints(workdir: pathlib.Path) -> dict[str, Any]:
  """Returns the fingerprint of each array of the last checkpoint."""
  step = max(steps(workdir))
  path = workdir / 'checkpoints' / str(step) / 'manifest' / 'metadata'
  leaves = json.loads(path.read_text('utf-8'))['leaves']
  return {'step': step, **leaves}
