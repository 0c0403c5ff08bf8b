"""Some hosts only collect: the same numbers as without them, and one end."""

import socket

import pytest

from tests.training import host_runs
from tests.training import runs

_STEPS = 4
_OPTIONS = {
  'num_steps': _STEPS,
  'rollout__steps_ahead': 1,
  'writer__trajectories': 16,
  # So large that every policy has other log-probabilities.
  'policy_optimizer__learning_rate': 0.02,
  'policy_optimizer__warmup_updates': 0,
}


def _assert_same(workdir, expected, *, learners=1, apart=host_runs.OF_HOSTS):
  ours, theirs = (
    host_runs.repeated(folder, apart) for folder in (workdir, expected)
  )
  assert ours == theirs
  host_runs.assert_same_dialogues(
    workdir, expected, range(1, _STEPS + 1), counts=(learners, learners)
  )


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
  """A run of one host, which the runs with one that learns must equal."""
  folder = tmp_path_factory.mktemp('alone')
  host_runs.alone(folder, **_OPTIONS)
  return folder


@pytest.mark.slow
@pytest.mark.parametrize('collectors', [1, 2])
def test_who_collects_changes_no_bit(tmp_path, alone, collectors):
  _, *others = host_runs.train(
    tmp_path, 1 + collectors, mesh__collectors=collectors, **_OPTIONS
  )
  assert not any('step 1/' in text for text in others)
  _assert_same(tmp_path, alone)
  lines = runs.metrics(tmp_path)[1:]
  assert [line['rollout/staleness'] for line in lines] == [0.0, 1.0, 1.0, 1.0]
  assert len({line['ratio/token/max'] for line in lines}) == _STEPS
  for line in lines:
    assert 0 <= line['hosts/learners_idle'] < 1
    assert 0 <= line['hosts/steps_waiting'] <= 2
    assert ('hosts/slowest' in line) == (collectors > 1)
    assert line.get('hosts/slowest', 1.0) in (1.0, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
  'changes',
  [
    {'rollout__steps_ahead': 2},
    {'model__lora__rank': 2, 'sft__before_training': True},
    {'rollout__resample_rounds': 1, 'rollout__group_size': 2},
  ],
)
def test_other_runs_are_the_same_too(tmp_path, changes):
  changes = _OPTIONS | changes
  host_runs.alone(tmp_path / 'alone', **changes)
  host_runs.train(tmp_path / 'apart', 2, mesh__collectors=1, **changes)
  _assert_same(tmp_path / 'apart', tmp_path / 'alone')


@pytest.mark.slow
@pytest.mark.parametrize('devices', [1, 4])
def test_hosts_that_collect_may_have_other_devices(tmp_path, alone, devices):
  options = _OPTIONS | {'mesh__collectors': 1}
  host_runs.train(tmp_path, devices={1: devices}, **options)
  apart = (*host_runs.OF_HOSTS, 'mismatch/')
  _assert_same(tmp_path, alone, apart=apart)
  ours, theirs = (
    [
      line['mismatch/logprob_abs_diff_mean']
      for line in runs.metrics(folder)[1:]
    ]
    for folder in (tmp_path, alone)
  )
  assert max(ours) < 1e-6
  if devices == 1:  # it decodes twice as many rows, and rounds differently
    assert ours != theirs


@pytest.mark.slow
def test_several_hosts_learn_beside_one_that_collects(tmp_path):
  # Weights are cut over the hosts, each of which sends some of the pieces.
  options = _OPTIONS | {'mesh__data': 1, 'mesh__fsdp': 4}
  host_runs.train(tmp_path / 'two', 2, **options)
  host_runs.train(tmp_path / 'three', 3, mesh__collectors=1, **options)
  _assert_same(tmp_path / 'three', tmp_path / 'two', learners=2)


@pytest.mark.slow
def test_turns_of_several_policies_are_repeated(tmp_path):
  """Weights come while dialogues go on; their versions are recorded."""
  first, again = tmp_path / 'first', tmp_path / 'again'
  options = _OPTIONS | {
    'mesh__collectors': 1,
    'rollout__turn_swaps': 'recompute',
    'rollout__slots': 4,
  }
  # Newer weights come before the fourth collection begins its turns.
  host_runs.train(first, faults={1: ('sleep', 'collect', '4')}, **options)
  lines = runs.metrics(first)[1:]
  assert lines[3]['rollout/staleness'] < 1 == lines[1]['rollout/staleness']
  assert all(line['rollout/staleness_max'] <= 1 for line in lines)
  assert max(line['mismatch/logprob_abs_diff'] for line in lines) < 1e-4
  found = set()
  for step in range(1, _STEPS + 1):
    versions = host_runs.versions(first, step)
    assert len(versions) == 16 and all(versions)
    found |= {version for row in versions for version in row}
  assert len(found) > 1
  # Here they come later, and turns wait for them.
  host_runs.train(again, rollout__replay_order=first, **options)
  _assert_same(again, first)


def _is_named(text, host, does):
  return f'host {host} ({socket.gethostname()}, which {does})' in text


# Host 0 learns, writes, and has the queue; host 1 collects.
@pytest.mark.slow
@pytest.mark.parametrize('what', ['kill', 'raise'])
@pytest.mark.parametrize(
  ('culprit', 'kind', 'does'),
  [
    (0, 'updated', 'learns'),
    (1, 'collect', 'collects'),
    (1, 'collected', 'collects'),
    (1, 'evaluate', 'collects'),
  ],
)
def test_a_lost_host_ends_all_and_the_command_resumes(
  tmp_path, alone, what, culprit, kind, does
):
  options = _OPTIONS | {'mesh__collectors': 1}
  codes = {'raise': (70, 70), 'kill': (-9, 75)}[what]
  fault = what, kind, '2'
  ends = host_runs.faulty(tmp_path, culprit, fault, codes, **options)
  assert _is_named(ends[1 - culprit][1], culprit, does)
  if kind == 'collected':  # nobody is left to collect beside
    host_runs.alone(tmp_path, **_OPTIONS)
  else:
    host_runs.train(tmp_path, **options)
  _assert_same(tmp_path, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('culprit', 'what', 'kind', 'saved'),
  [
    (0, 'stop', 'updated', 2),
    (1, 'stop', 'collect', 1),
    (1, 'stop', 'evaluate', 2),
    (1, 'outage', 'collect', 1),
  ],
)
def test_an_interrupted_run_is_saved_and_resumed(
  tmp_path, alone, culprit, what, kind, saved
):
  """Step 3 is collected when step 1 has been trained on, at the earliest."""
  options = _OPTIONS | {'mesh__collectors': 1, 'checkpoint__every': 99}
  number = '3' if kind == 'collect' else '2'
  faults = {culprit: (what, kind, number)}
  ends = host_runs.ends(host_runs.start(tmp_path, faults=faults, **options))
  assert [code for code, _ in ends] == [75, 75]
  (step,) = [int(path.name) for path in (tmp_path / 'checkpoints').iterdir()]
  assert step in (saved, saved + 1)
  if what == 'outage':
    assert _is_named(ends[0][1], 1, 'collects') and 'not ready' in ends[0][1]
  else:
    assert f'interrupted after step {step}, saved' in ends[0][1]
  host_runs.train(tmp_path, **options)
  _assert_same(tmp_path, alone)
