"""The comparison of two checkouts finds every planted difference."""

import json
import math

import numpy as np
import pytest

from benchmarks import same_numbers
from tests.training import runs

_METRICS = [
  {'step': 1, 'loss': 0.5, 'x': math.nan, 'timing_s/step': 1.0},
  {'step': 2, 'loss': 0.25, 'x': 0.0, 'perf/throughput': 3.0},
]
_ARRAYS = {
  'x_B': np.array([1.0, np.nan, 0.0], np.float32),
  'ids_B': np.arange(3, dtype=np.int32),
}


def _compared(old, new):
  return same_numbers.compare_lines({'f': old}, {'f': new}, 'run')


def _changed(line, **changes):
  lines = [dict(x) for x in _METRICS]
  lines[line].update(changes)
  return lines


def test_equal_metrics_have_no_difference_although_times_differ():
  new = _changed(0, **{'timing_s/step': 9.0, 'retrieval/latency_p50': 1.0})
  found = _compared(_METRICS, new)
  assert found.differences == [] and found.count == 6
  assert str(found) == 'equal    run: 6 compared'


@pytest.mark.parametrize(
  ('new', 'expected'),
  [
    (_changed(1, loss=math.nextafter(0.25, 1)), 'f line 2: loss 0.25, now '),
    (_changed(1, x=-0.0), 'f line 2: x 0.0, now -0.0'),
    (_changed(0, x=1.0), 'f line 1: x nan, now 1.0'),
    (_changed(1, loss=1), 'f line 2: loss 0.25, now 1'),
    (_changed(0, y=1.0), 'f line 1: y is in new only'),
    (_METRICS[:1], 'f: 2 lines, now 1'),
  ],
)
def test_any_other_number_of_a_run_is_a_difference(new, expected):
  found = _compared(_METRICS, new)
  (line,) = found.differences
  assert line.startswith(expected)
  assert str(found).startswith(f'DIFFERS  run: {expected}')


def test_a_renamed_metric_is_compared_with_its_old_name(monkeypatch):
  monkeypatch.setattr(same_numbers, 'RENAMED', {'loss': 'loss/mean'})
  renamed = [
    {'loss/mean' if k == 'loss' else k: x for k, x in line.items()}
    for line in _METRICS
  ]
  assert _compared(_METRICS, renamed).differences == []
  renamed[0]['loss/mean'] = 0.25
  (line,) = _compared(_METRICS, renamed).differences
  assert line == 'f line 1: loss/mean 0.5, now 0.25'


@pytest.mark.parametrize(
  ('changes', 'expected'),
  [
    ({}, []),
    ({'x_B': np.array([1, np.nan, -0.0], np.float32)}, ['x_B: 1 of 3 entries']),
    ({'ids_B': np.array([0, 1, 3], np.int32)}, ['ids_B: 1 of 3 entries']),
    ({'ids_B': np.arange(3)[None]}, ['ids_B: int32 [3], now int64 [1, 3]']),
    ({'more_B': np.zeros(1)}, ['more_B is in new only']),
  ],
)
def test_arrays_are_compared_byte_by_byte(changes, expected):
  found = same_numbers.compare_arrays(_ARRAYS, _ARRAYS | changes, 'batch')
  assert found.differences == expected and found.count == 2


def test_golden_files_are_compared_by_their_contents(tmp_path):
  old, new = tmp_path / 'old', tmp_path / 'new'
  for folder, indent in ((old, None), (new, 2)):
    (folder / 'model').mkdir(parents=True)
    (folder / 'make.py').write_text(str(indent))  # scripts may change
    text = json.dumps({'a': 1.5}, indent=indent)
    (folder / 'model' / 'config.json').write_text(text)
    (folder / 'weights').write_bytes(b'12')
  np.savez(old / 'x.npz', **_ARRAYS)
  np.savez_compressed(new / 'x.npz', **_ARRAYS)
  found = same_numbers.compare_golden(old, new)
  assert found.differences == [] and found.count == 3
  np.savez(new / 'x.npz', **_ARRAYS | {'x_B': np.zeros(3, np.float32)})
  (new / 'model' / 'config.json').write_text('{"a": 2.5}')
  (new / 'weights').write_bytes(b'13')
  (new / 'added').touch()
  (old / 'removed').touch()
  assert same_numbers.compare_golden(old, new).differences == [
    'model/config.json: other contents',
    'removed is in old only',
    'weights: other bytes',
    'x.npz: x_B: 2 of 3 entries',
  ]


def test_golden_files_decide_the_exit_code(capsys, tmp_path):
  assert same_numbers.main([str(runs.REPO), str(runs.REPO), '--runs=']) == 0
  out, _ = capsys.readouterr()
  assert out.startswith('equal    tests/golden: ')
  assert out.endswith('all numbers are the same\n')
  (tmp_path / 'stppo_jax').mkdir()
  (tmp_path / 'stppo_jax' / '__main__.py').touch()
  assert same_numbers.main([str(runs.REPO), str(tmp_path), '--runs=']) == 1
  assert capsys.readouterr().out.startswith('DIFFERS  tests/golden: ')
  with pytest.raises(SystemExit, match='2'):
    same_numbers.main([str(runs.REPO), str(tmp_path / 'absent')])


@pytest.mark.slow
@pytest.mark.parametrize('name', ['st_ppo', 'sft', 'two_hosts'])
def test_a_checkout_computes_the_same_numbers_twice(name, capsys, monkeypatch):
  if name == 'two_hosts':
    monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '1')  # 16 would be too many
  overrides = [
    f'--override={flag.removeprefix("--config.")}'
    for flag in runs.flags()[1:]
    if 'num_steps' not in flag  # what --steps sets
  ]
  flags = ['--steps=1', f'--runs={name}', *overrides]
  code = same_numbers.main([str(runs.REPO), str(runs.REPO), *flags])
  out, err = capsys.readouterr()
  assert (code, err) == (0, ''), out
  compared = ['arrays of a batch', 'metrics', 'trajectories']
  compared.append('tensors of the policy')
  if name == 'sft':  # it collects no trajectories
    compared.remove('trajectories')
  assert [line.split(':')[0] for line in out.splitlines()] == [
    'equal    tests/golden',
    *(f'equal    {name}, {what}' for what in compared),
    'all numbers are the same',
  ]
