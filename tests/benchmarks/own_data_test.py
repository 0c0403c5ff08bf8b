"""A small version of the benchmark of one's own data."""

import json
import re

import pytest

from benchmarks import own_data


def _write(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


@pytest.fixture
def folder(tmp_path):
  lakes = [
    {'pid': f'p{n}', 'title': f'Lake {n}', 'text': f'It is {n} km.'}
    for n in range(40)
  ]
  asked = [
    {
      'id': f'q{n}',
      'dataset': 'lakes',
      'question': f'how long is lake {n}',
      'answers': [f'{n} km'],
      'gold_pids': [f'p{n}'],
    }
    for n in range(40)
  ]
  _write(tmp_path / 'passages.jsonl', lakes)
  _write(tmp_path / 'questions.jsonl', asked)
  files = (tmp_path / 'questions.jsonl', tmp_path / 'passages.jsonl')
  own_data.split(*files, tmp_path / 'data')
  return tmp_path


def test_no_question_is_on_both_sides(folder):
  sides = {
    name: set(re.findall(r'"(q\d+)"', (folder / 'data' / name).read_text()))
    for name in ('train.jsonl', 'test.jsonl')
  }
  assert set.union(*sides.values()) == {f'q{n}' for n in range(40)}
  assert not set.intersection(*sides.values())
  assert 4 <= len(sides['test.jsonl']) <= 16  # a quarter of 40, about


@pytest.mark.slow
def test_both_policies_are_asked_both_parts_and_once(folder):
  flags = ['--config.num_steps=1', '--config.sft.num_steps=2']
  flags += ['--config.rollout.trajectories_per_step=8']
  flags += ['--config.updates.minibatch_size=8', '--config.evaluate.every=0']
  measured = dict(questions=4, cores=2, arguments=flags)
  text = own_data.report(folder, **measured)
  rows = re.findall(
    r'^\| (held out|trained on), (greedy|sampled) +\|(.*)\|$', text, re.M
  )
  assert len(rows) == 4
  for *_, cells in rows:
    before, after, difference, majority = map(float, cells.split('|'))
    assert difference == pytest.approx(after - before, abs=2e-3)
    assert 0 < majority <= 1
  parts = dict(re.findall(r'^\| ([a-z][\w :,]+?) +\| (\d+) ', text, re.M))
  spent = [int(parts[x]) for x in parts if x.startswith(('start', 'eval'))]
  assert len(spent) == 5 and abs(sum(spent) - int(parts['all'])) <= 5
  assert own_data.report(folder, **measured) == text  # nothing is made again
