"""A run and its files; a run that was killed resumes as the same run."""

import itertools
import json
import math
import re
import time

import jax
import numpy as np
import pytest

from stppo_jax.models.hf import load
from stppo_jax.training import checkpoint_state
from stppo_jax.workdir import recorded_config
from tests.training import runs

_STEPS = runs.STEPS


# Names that users know, and ours; of every step of a run that updates.
_NAMES = """
actor/{pg_loss,pg_clipfrac,ppo_kl,entropy,kl_loss,grad_norm,lr}
critic/{vf_loss,vf_clipfrac,vf_explained_var,grad_norm,lr,kl,kl_coef}
critic/{score,rewards,advantages,returns,values}/{mean,max,min}
{response_length,num_turns}/{mean,max,min}
env/{number_of_valid_search,ratio_of_valid_action,finish_ratio}
timing_s/{collect,wait,annotate,update,checkpoint,step}
perf/{throughput,decode_gb_read_per_second,update_gb_sent_per_second}
ratio/{token,turn,sequence}/{mean,std,min,max,ess}
ratio/{token,turn,sequence}/std/turn_{1,2,3}
clipfrac/{token,turn,sequence}/{low,high}{,/turn_1,/turn_2,/turn_3}
stab/{rho,scale,norm_clipped,norm_unclipped,bias_grad_norm}
mismatch/{logprob_abs_diff,k3,weight_raw_max,truncation}
mismatch/turn/sum/weight_raw_mean
retrieval/{ok,retries,failures,latency_p50,latency_p99}
rollout/status/{completed,truncated_length,truncated_turns,infra_error}
rollout/{resampled_groups,resample_rounds,refilled_rows}
rollout/{staleness,staleness_max,versions}
reward/turns/mean
update/skipped
"""


def _expanded(pattern):
  """Returns the names that a pattern with choices in braces stands for."""
  parts = [part.split(',') for part in re.split('[{}]', pattern)]
  return map(''.join, itertools.product(*parts))


def test_evaluations_leave_their_dialogues(finished):
  names = sorted(path.name for path in finished.glob('evaluation-*'))
  assert names == [f'evaluation-{step:06d}.jsonl' for step in (0, 2, _STEPS)]
  for name, line in zip(names, (runs.metrics(finished)[n] for n in (0, 2, 3))):
    lines = (finished / name).read_text('utf-8').splitlines()
    records = [json.loads(text) for text in lines]
    # As many as an evaluation has in these runs, eight of each set.
    assert len(records) == 16
    for data_set in ('one_hop', 'two_hop'):
      scores = [
        record['scores']['em']
        for record in records
        if record['data_set'] == data_set
      ]
      assert sum(scores) / 8 == line[f'val/em/{data_set}']


def test_metrics_have_their_names_and_are_finite(finished):
  text = (finished / 'metrics.jsonl').read_text('utf-8')
  lines = [
    json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()
  ]
  assert [line['step'] for line in lines] == [0, 1, 2, 3]
  names = {name for x in _NAMES.split() for name in _expanded(x)}
  evaluated = {'val/em/one_hop', 'val/em/two_hop'}
  assert evaluated <= lines[0].keys()
  for line in lines[1:]:
    assert not names - line.keys()
    assert all(math.isfinite(value) for value in line.values())
    # Evaluated after every second step and after the last one.
    due = line['step'] in (2, _STEPS)
    assert (evaluated <= line.keys()) == due
    assert ('timing_s/evaluate' in line) == due
    # Every second is in one phase.
    phases = ('step', 'checkpoint', 'other')
    seconds = sum(line[f'timing_s/{phase}'] for phase in phases)
    assert line['timing_s/total'] == pytest.approx(seconds)
    assert 0 < line['goodput/fraction'] <= 1
    assert line['goodput/restarts'] == line['goodput/lost_steps'] == 0
  # The save of a step is timed in the line of the next.
  assert lines[1]['timing_s/checkpoint'] == 0
  assert lines[2]['timing_s/checkpoint'] > 0


@pytest.mark.slow
def test_the_times_of_a_step_are_those_of_the_clock(tmp_path):
  moments = {}

  def act(moment):
    moments[moment] = time.monotonic()
    if moment == ('collect', 2):
      time.sleep(0.2)

  changes = {'num_steps': 2, 'evaluate__every': 0, 'checkpoint__every': 99}
  assert runs.train(tmp_path, act, **changes) == 0
  ended = time.monotonic()
  line = runs.metrics(tmp_path)[-1]
  seconds = lambda phase: line[f'timing_s/{phase}']
  # The time of a step begins with the line of the step before, which is written
  # between these two moments, and ends with its own.
  least = moments['updated', 2] - moments['collect', 2]
  most = ended - moments['updated', 1]
  assert 0.2 < least <= seconds('total') <= most
  collecting = moments['collected', 2] - moments['collect', 2]
  assert 0.2 < collecting <= seconds('wait')
  phases = ('wait', 'annotate', 'update', 'token_details')
  assert seconds('step') == pytest.approx(sum(map(seconds, phases)))
  # Every row of the batch is updated on once.
  tokens = line['perf/throughput'] * seconds('step')
  updated = line['perf/update_tokens_per_second'] * seconds('update')
  assert updated == pytest.approx(tokens)


def test_numbers_of_a_run_make_sense(finished):
  for line in runs.metrics(finished)[1:]:
    # Sampler and trainer are two programs over the same weights.
    assert line['mismatch/logprob_abs_diff'] < 1e-4
    assert abs(line['mismatch/weight_raw_max'] - 1) < 1e-4
    statuses = [v for k, v in line.items() if k.startswith('rollout/status/')]
    assert sum(statuses) == 16
    assert line['update/skipped'] == 0
    # Nothing is cut off, and nothing is collected ahead.
    assert line['mismatch/truncation'] == line['rollout/staleness'] == 0
    assert 0 <= line['timing_s/wait'] - line['timing_s/collect'] < 1
    assert abs(line['critic/advantages/mean']) < 1e-5
    # 20 updates of warm-up, two in a step: the mean of both.
    updates = 2 * line['step']
    assert line['actor/lr'] == pytest.approx(2.5e-4 * (updates - 0.5) / 20)
  first, *_, last = runs.metrics(finished)[1:]
  assert first['critic/kl'] == 0  # the reference is the start
  assert last['critic/kl'] != 0


def test_tensorboard_has_the_config_and_metrics_what_a_step_used(finished):
  curve = (finished / 'learning_curve.png').read_bytes()
  assert curve.startswith(b'\x89PNG') and len(curve) > 1000
  (path,) = (finished / 'tensorboard').iterdir()
  data = path.read_bytes()
  # The formats of both are proved in tests/records.
  assert b'algorithm.ratio.level' in data and b'quickstart: st_ppo' in data
  lines = [line for line in runs.metrics(finished) if line['step']]
  assert all(line['timing_s/compile'] >= 0 for line in lines)
  peaks = [line['perf/max_memory_host_gb'] for line in lines]
  assert 0 < peaks[0] <= peaks[-1]


def test_the_exported_policy_is_the_trained_one(finished):
  config = recorded_config.read(finished)
  policy = checkpoint_state.read_policy(config, finished, step=None)
  exported = load.read_params(finished / 'policy', policy.learner.policy.config)
  jax.tree.map(np.testing.assert_array_equal, exported, policy.params)


_SAVE = '2.orbax-checkpoint-tmp'  # renamed when it is complete


# Each kill is a process that traces its programs. In `make test`, crashes end
# runs in interruption_run_test.py, and savers are killed in
# tests/records/checkpoints/checkpoint_test.py.
@pytest.mark.slow
def test_a_killed_run_is_the_same_run(finished, tmp_path):
  flags = *runs.flags(num_steps=_STEPS), f'--workdir={tmp_path}'
  for event, name, written in (
    ('collect', '2', [0, 1]),  # a collection has begun
    ('os.mkdir', _SAVE, [0, 1, 2]),  # the metrics are written
    ('os.rename', _SAVE, [0, 1, 2]),  # a save is not committed yet
  ):
    runs.kill_at(event, name, *flags)
    lines = [line['step'] for line in runs.metrics(tmp_path)]
    # Threads save, so one more step may be written meanwhile.
    assert lines in (written, [*written, written[-1] + 1])
    left = {path.name for path in (tmp_path / 'checkpoints').iterdir()}
    # The collection begins while threads still write step 1.
    begun = {'1.orbax-checkpoint-tmp'}
    expected = {'1', _SAVE} if event == 'os.rename' else {'1'}
    assert left == expected or (event == 'collect' and left == begun)
  assert runs.train(tmp_path) == 0
  runs.assert_same_files(tmp_path, finished)
  last = runs.metrics(tmp_path)[-1]
  # The second and the third step, and what threads had not saved yet.
  assert last['goodput/restarts'] == 3 and 2 <= last['goodput/lost_steps'] <= 4
  assert (
    last['goodput/fraction'] < runs.metrics(finished)[-1]['goodput/fraction']
  )


@pytest.mark.slow
def test_a_run_keeps_as_many_files_and_lines_as_its_config_says(tmp_path):
  kept = {'writer__keep_files': 2, 'writer__keep_lines': 1}
  assert runs.train(tmp_path, **kept) == 0
  (line,) = runs.metrics(tmp_path)
  assert line['step'] == runs.STEPS
  names = sorted(path.name for path in tmp_path.glob('*-*.jsonl'))
  assert names == [
    f'{kind}-{step:06d}.jsonl'
    for kind in ('evaluation', 'trajectories')
    for step in (runs.STEPS - 1, runs.STEPS)
  ]
