"""Several processes are one run: the same numbers, one end, one resumption.

Each has two virtual devices; collectives go over loopback.
"""

import json
import os
import shutil
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.training import checkpoint_state
from tests.training import host_runs
from tests.training import runs


def _one_step(out, count):
  """Returns what hosts make of a stored batch, and their greedy dialogues."""
  out.mkdir()
  address, module = runs.free_address(), 'tests.training.stored_batch_host'
  words = [(str(out), address, str(count), str(n)) for n in range(count)]
  processes = [
    runs.start(*x, module=module, **host_runs.DEVICES) for x in words
  ]
  assert [code for code, _ in host_runs.ends(processes)] == [0] * count
  texts = [(out / f'dialogues-{n}.json').read_text() for n in range(count)]
  dialogues = [dialogue for text in texts for dialogue in json.loads(text)]
  with np.load(out / 'update.npz') as arrays:
    return dict(arrays), dialogues


def _assert_same_run(
  workdir, expected, *, counts=(2, 1), steps=runs.STEPS, **close
):
  """Asserts that so many hosts did the same, up to rounding."""
  steps = range(1, steps + 1)
  host_runs.assert_same_dialogues(workdir, expected, steps, counts=counts)
  lines = (host_runs.repeated(folder) for folder in (workdir, expected))
  for ours, theirs in zip(*lines, strict=True):
    _assert_same_metrics(ours, theirs, **close)


# Quotients by the spread of advantages or returns, which is almost 0 here. With
# other shards, other trajectories share a row, so sums are rounded differently;
# by step 4 these metrics differed by up to 3.5e-4, and no other by 1e-4.
_QUOTIENTS = (
  'critic/advantages/max',
  'critic/advantages/min',
  'critic/vf_explained_var',
)


def _assert_same_metrics(
  ours, theirs, *, rtol=1e-4, atol=1e-5, quotient_rtol=5e-4
):
  assert ours.keys() == theirs.keys()
  for name in ours:
    near = quotient_rtol if name in _QUOTIENTS else rtol
    np.testing.assert_allclose(
      ours[name], theirs[name], rtol=near, atol=atol, err_msg=name
    )


def _restored(workdir, **changes):
  """Returns the newest state of a run, on a mesh of this process."""
  learner = runs.learner(runs.config(**changes))
  saved = checkpoint.Checkpointer(workdir, read_only=True)
  found = saved.restore_latest(
    checkpoint_state.abstract_state(learner, learner.start())
  )
  saved.close()
  assert found is not None
  return jax.device_get(found[1])


@pytest.mark.slow
def test_hosts_repeat_the_collections_that_one_host_repeats(tmp_path):
  changes = {
    'updates__value_epochs': 1,
    'updates__value_replay': 1,
    'evaluate__every': 0,
  }
  one, two = tmp_path / 'one', tmp_path / 'two'
  assert runs.train(one, **changes, num_steps=2) == 0
  host_runs.train(two, num_steps=2, **changes)
  _assert_same_run(two, one, steps=2)
  (ours,), (theirs,) = (_restored(x, **changes).replayed for x in (two, one))
  assert np.any(theirs.value_mask_BL)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5),
    ours,
    theirs,
  )
  np.testing.assert_array_equal(ours.tokens_BL, theirs.tokens_BL)


@pytest.mark.slow
def test_a_stored_batch_has_the_same_gradients_on_any_number_of_hosts(tmp_path):
  arrays, dialogues = _one_step(tmp_path / '1', 1)
  gradients = [name for name in arrays if name.startswith('gradient ')]
  assert len(gradients) > 20 and len(arrays) > len(gradients) + 1
  assert max(np.abs(arrays[name]).max() for name in gradients) > 0.01
  assert len(dialogues) == 16 and all(map(len, dialogues))
  for count in (2, 4):
    others, same = _one_step(tmp_path / str(count), count)
    assert same == dialogues  # token for token
    assert others.keys() == arrays.keys()
    for name, x in arrays.items():
      np.testing.assert_allclose(
        others[name], x, rtol=0, atol=1e-6, err_msg=name
      )


@pytest.mark.slow
def test_each_host_records_the_tokens_of_its_own_rows(tmp_path):
  host_runs.train(
    tmp_path, num_steps=1, writer__token_details=3, evaluate__every=0
  )
  for name in ('trajectories-000001.jsonl', 'trajectories-000001-host1.jsonl'):
    lines = (tmp_path / name).read_text('utf-8').splitlines()
    records = [json.loads(line) for line in lines]
    detailed = ['tokens' in record['turns'][0] for record in records]
    assert sum(detailed) >= 3 and all(detailed[: sum(detailed)])
    for turn in (t for record in records for t in record['turns']):
      if 'tokens' in turn:
        assert sum(turn['tokens']['characters']) == len(turn['text'])
        # The update of a step moves the policy a little.
        assert all(0.5 < ratio < 2 for ratio in turn['tokens']['ratio'])


# A group of eight for each host.
_GROUPS = {'rollout__trajectories_per_step': 32, 'writer__trajectories': 32}
# Gains are small differences of probabilities of about 1 / 300, so that float32
# leaves them four digits. All rewards here are gains, and a policy that has
# learned nothing has tiny ones.
_GAINS = _GROUPS | {
  'env__rewards__information_gain': 1e4,
  'evaluate__every': 0,
}


@pytest.mark.slow
@pytest.mark.parametrize(
  ('algorithm', 'count', 'options', 'rtol'),
  [
    *(('token_ppo', count, {}, 1e-4) for count in (2, 4)),
    *(('st_ppo', count, {}, 1e-4) for count in (2, 4)),
    *(('so_grpo', count, _GROUPS, 1e-4) for count in (2, 4)),
    *((algorithm, 2, _GAINS, 2e-3) for algorithm in ('igpo', 'a2tgpo')),
  ],
)
def test_trajectories_do_not_depend_on_the_number_of_hosts(
  tmp_path, algorithm, count, options, rtol
):
  one, many, gains = tmp_path / 'one', tmp_path / 'many', options is _GAINS
  steps = 2 if gains else 4
  options = options | {'algorithm': algorithm, 'num_steps': steps}
  first, *others = host_runs.train(many, count, **options)
  host_runs.alone(one, environment={}, **options)
  close = {'rtol': rtol, 'quotient_rtol': max(rtol, 5e-4)}
  _assert_same_run(many, one, counts=(count, 1), steps=steps, **close)
  last = f'step {steps}/{steps}'
  assert last in first and not any(last in text for text in others)
  assert not list(many.glob('probe-*'))
  for line in runs.metrics(many)[-steps:]:
    assert line['hosts/collect_s_min'] <= line['hosts/collect_s_max']
    assert line['hosts/slowest'] in range(count)
    if gains:
      assert abs(line['critic/rewards/max']) > 0.01 < line['actor/grad_norm']


@pytest.mark.slow
@pytest.mark.parametrize(
  'before, count, mesh',
  [
    (4, 1, {}),
    (4, 2, {}),
    (4, 1, {'mesh__data': 2, 'mesh__fsdp': 4}),
    (1, 2, {}),
  ],
)
def test_a_checkpoint_resumes_on_another_number_of_hosts(
  tmp_path, finished, before, count, mesh
):
  run = tmp_path / 'run'
  if before == 1:
    shutil.copytree(finished, run)
    shutil.rmtree(run / 'checkpoints' / '3')
  else:
    host_runs.train(run, before, num_steps=2)
  # What is restored is what was saved, bit for bit on every mesh; a checkpoint
  # has checksums of the latter.
  jax.tree.map(
    np.testing.assert_array_equal,
    _restored(run),
    _restored(run, mesh__data=2, mesh__fsdp=4),
  )
  if count == 1:
    assert runs.train(run, **mesh) == 0
  else:
    host_runs.train(run, count, **mesh)
  # What is computed from there on is added in another order. With as many
  # devices each has as many rows, so that nothing else differs. The explained
  # variance is a quotient of which the divisor is almost 0 here.
  host_runs.assert_same_dialogues(run, finished, [3], counts=(count, 1))
  ours, theirs = (host_runs.repeated(x)[-1] for x in (run, finished))
  close = {}
  if count == 1:
    close = {'rtol': 1e-6, 'atol': 1e-6, 'quotient_rtol': 1e-6}
    name = 'critic/vf_explained_var'
    assert ours.pop(name) == pytest.approx(theirs.pop(name), rel=1e-5)
  _assert_same_metrics(ours, theirs, **close)


@pytest.mark.slow
@pytest.mark.parametrize('fraction', [0.0, 0.5])
def test_hosts_collect_ahead(tmp_path, fraction):
  """All devices do both, or one device of each host collects and one learns."""
  options = {'rollout__steps_ahead': 1}
  assert runs.train(tmp_path / 'one', **options) == 0
  options['mesh__collect_fraction'] = fraction
  host_runs.train(tmp_path / 'two', **options)
  _assert_same_run(tmp_path / 'two', tmp_path / 'one')
  lines = runs.metrics(tmp_path / 'two')[1:]
  assert [line['rollout/staleness'] for line in lines] == [0.0, 1.0, 1.0]


@pytest.mark.slow
def test_hosts_repeat_turns_of_several_policies(tmp_path):
  """Each host swaps weights at moments of its own, and records them."""
  first, again = tmp_path / 'first', tmp_path / 'again'
  options = {
    'rollout__turn_swaps': 'recompute',
    'rollout__steps_ahead': 1,
    'rollout__slots': 4,
    'mesh__collect_fraction': 0.5,
  }
  host_runs.train(first, **options)
  lines = runs.metrics(first)[1:]
  # It depends on how long things take, but is at most the steps ahead.
  assert all(line['rollout/staleness_max'] <= 1 for line in lines)
  assert lines[-1]['mismatch/logprob_abs_diff'] < 1e-4
  found = set()
  for step in (1, 2, 3):
    for host in (0, 1):
      versions = host_runs.versions(first, step, host)
      assert len(versions) == 8 and all(versions)
      found |= {version for row in versions for version in row}
  assert len(found) > 1
  host_runs.train(again, rollout__replay_order=first, **options)
  assert host_runs.repeated(again) == host_runs.repeated(first)
  host_runs.assert_same_dialogues(again, first, (1, 2, 3), counts=(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize('start', ['sft__before_training', 'init_from'])
def test_the_start_of_a_run_is_made_by_all(tmp_path, finished, start):
  options = {start: start != 'init_from' or finished, 'num_steps': 1}
  first, _ = host_runs.train(tmp_path / 'two', **options)
  if start == 'init_from':
    assert f'start: init_from={finished}, kept in {tmp_path}/two/start' in first
  assert runs.train(tmp_path / 'one', **options) == 0
  _assert_same_run(tmp_path / 'two', tmp_path / 'one', steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('printed', 'said', 'is_begun'),
  [
    ('a turn ends at', 'interrupted before the first step', False),
    ('step 50/51', 'interrupted after step 50, saved', True),
    ('start: the superv', 'interrupted before the first step', True),
  ],
)
def test_a_signal_on_one_host_ends_a_start_on_all(
  tmp_path, printed, said, is_begun
):
  """The texts are printed before a start, between updates of it, and after it.

  The other host is then in a program, or comes to one, that needs both.
  """
  options = {'sft__before_training': True, 'sft__num_steps': 51, 'num_steps': 1}
  faults = {0: ('stop', 'printed', printed)}
  ends = host_runs.ends(host_runs.start(tmp_path, faults=faults, **options))
  assert [code for code, _ in ends] == [75, 75]
  for _, text in ends:
    assert said in text
  assert (tmp_path / 'start').is_dir() == is_begun
  host_runs.train(tmp_path, **options)


_OUTSIDE_OF_A_RUN = """
import os, signal, sys
from stppo_jax import interruption
from stppo_jax.parallel import distributed

address, index = sys.argv[1:]
place = distributed.place(address, 2, int(index))
with interruption.Interruption() as interrupt:
  try:
    with interrupt.interruptible(), distributed.joined(place) as hosts:
      hosts.exchange('word', None)
      if hosts.index:
        os.kill(os.getpid(), signal.SIGINT)
  except (interruption.Interrupted, Exception) as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.mark.slow
def test_a_signal_outside_of_a_run_has_its_exit_code_on_all():
  """A host may wait at the end of a run, or at its start, for the others."""
  address = runs.free_address()
  processes = [
    subprocess.Popen(
      [sys.executable, '-c', _OUTSIDE_OF_A_RUN, address, str(index)],
      env=os.environ | host_runs.DEVICES | {'JAX_PLATFORMS': 'cpu'},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for index in range(2)
  ]
  (code, text), (culprit, _) = host_runs.ends(processes)
  assert culprit == code == 130
  assert 'failed: Interrupted: by a signal' in text


# The second evaluation is that after step 2.
@pytest.mark.slow
@pytest.mark.parametrize('kind', ['collect', 'updated', 'evaluate'])
@pytest.mark.parametrize('culprit', [0, 1])
def test_a_signal_on_one_host_saves_the_same_step_on_all(
  tmp_path, finished, kind, culprit
):
  faults = {culprit: ('stop', kind, '2')}
  options = {'checkpoint__every': 99}
  ends = host_runs.ends(host_runs.start(tmp_path, faults=faults, **options))
  assert [code for code, _ in ends] == [75, 75]
  saved = 1 if kind == 'collect' else 2
  for _, text in ends:
    assert f'interrupted after step {saved}, saved' in text
  assert [p.name for p in (tmp_path / 'checkpoints').iterdir()] == [str(saved)]
  host_runs.train(tmp_path, **options)
  _assert_same_run(tmp_path, finished)


def _named(host):
  return f'host {host} ({socket.gethostname()})'


@pytest.mark.slow
@pytest.mark.parametrize('what', ['raise', 'kill'])
@pytest.mark.parametrize('kind', ['collect', 'updated'])
@pytest.mark.parametrize('culprit', [0, 1])
def test_a_lost_host_ends_all_and_the_command_resumes(
  tmp_path, finished, what, kind, culprit
):
  codes = {'raise': (70, 70), 'kill': (-9, 75)}[what]
  ends = host_runs.faulty(tmp_path, culprit, (what, kind, '2'), codes)
  assert _named(culprit) in ends[1 - culprit][1]
  host_runs.train(tmp_path)
  _assert_same_run(tmp_path, finished)


# One of two groups of each host waits for slots, and one of five evaluation
# questions more is on the second host.
_TOGETHER = {
  'rollout__span': 'slice',
  'rollout__slots': 4,
  'evaluate__num_questions': 5,
}


@pytest.mark.slow
@pytest.mark.parametrize('deterministic', [True, False])
def test_hosts_that_decode_together_are_the_same_run(tmp_path, deterministic):
  options = _TOGETHER | {'rollout__deterministic': deterministic}
  host_runs.train(tmp_path / 'together', **options)
  host_runs.train(tmp_path / 'alone', **options | {'rollout__span': 'host'})
  _assert_same_run(tmp_path / 'together', tmp_path / 'alone', counts=(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
  ('what', 'kind', 'culprit', 'codes'),
  [
    ('stop', 'collect', 1, (75, 75)),
    ('stop', 'collected', 0, (75, 75)),
    ('raise', 'collect', 0, (70, 70)),
    ('kill', 'collected', 1, (-9, 75)),
  ],
)
def test_hosts_that_decode_together_end_together(
  tmp_path, what, kind, culprit, codes
):
  """The other host waits for this one before a program."""
  ends = host_runs.faulty(
    tmp_path, culprit, (what, kind, '2'), codes, **_TOGETHER
  )
  stopped = 'interrupted after step 1, saved'
  said = stopped if what == 'stop' else _named(culprit)
  assert said in ends[1 - culprit][1]


@pytest.mark.slow
@pytest.mark.parametrize('culprit', [0, 1])
def test_a_host_that_cannot_save_ends_all_at_once(tmp_path, finished, culprit):
  """Orbax would let the others wait for it for twenty minutes."""
  # Weights are cut over the hosts, so that both of them write.
  options = {'mesh__fsdp': 4}
  fault = 'fill', 'updated', '2'
  ends = host_runs.faulty(tmp_path, culprit, fault, (75, 75), **options)
  assert 'step 2 could not be saved in ' in ends[culprit][1]
  assert f'{_named(culprit)} failed: SaveFailed' in ends[1 - culprit][1]
  host_runs.train(tmp_path, **options)
  _assert_same_run(tmp_path, finished)
