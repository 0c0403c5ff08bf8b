"""Numbers that are not finite reach no weight, are told, and end a run."""

import json
import math
import shutil

import jax
import numpy as np
import pytest

from stppo_jax import __main__
from stppo_jax.envs import environments
from stppo_jax.envs import search
from stppo_jax.training import skipped_updates
from tests.training import runs

# Times the entropy it is more than float32 has, so no update is finite.
_OVERFLOW = {'evaluate__every': 0, 'loss__entropy_coefficient': 3e38}


class _Poisoned(search.SearchEnvironment):
  """An environment that gives one reward in sixteen as nan."""

  _count = 0

  def rewards(self, question, prompt, texts, status):
    outcomes, scores = super().rewards(question, prompt, texts, status)
    _Poisoned._count += 1
    if _Poisoned._count % 16 == 0:
      outcomes = outcomes | {'exact_match': math.nan}
    return outcomes, scores


def test_a_nan_reward_fails_its_trajectory_and_no_update(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setitem(environments.ENVIRONMENTS, 'search', _Poisoned)
  changes = {'num_steps': 1, 'evaluate__every': 0}
  assert runs.train(tmp_path, **changes) == 0
  (line,) = runs.metrics(tmp_path)
  assert line['rollout/status/infra_error'] == 1
  assert line['update/skipped'] == 0 and 'writer/non_finite' not in line
  reason = 'the reward exact_match is nan, expected a finite number'
  assert reason in capsys.readouterr().out


@pytest.mark.slow
def test_updates_that_are_not_finite_end_the_run(tmp_path, capsys):
  changes = {'checkpoint__every': 99, **_OVERFLOW}
  assert runs.train(tmp_path, updates__max_skipped=4, **changes) == 76
  output, errors = capsys.readouterr()
  # Two updates in a step.
  lines = runs.metrics(tmp_path)
  assert [line['update/skipped'] for line in lines] == [1, 1]
  assert '  skipped 100% of the updates  ' in output
  (line,) = errors.splitlines()
  assert line.startswith('4 updates in a row were skipped')
  assert 'actor/grad_norm inf' in line
  assert 'updates.max_skipped=4' in line
  # What was done is saved, and the same command goes on from there.
  saved = [path.name for path in (tmp_path / 'checkpoints').iterdir()]
  assert saved == ['2'] and not (tmp_path / 'policy').exists()
  assert runs.train(tmp_path, updates__max_skipped=0, **changes) == 0
  assert len(runs.metrics(tmp_path)) == 3


@pytest.fixture(scope='module')
def diverged(tmp_path_factory):
  """Returns the folder of a run that ended in its first step."""
  workdir = tmp_path_factory.mktemp('diverged')
  with pytest.MonkeyPatch.context() as patch:
    address = 'http://me:hushhush@host/?api_key=hushhush&n=1'
    patch.setenv('JAX_OF_A_TEST', f'{address} --token "hushhush"')
    patch.setenv('TPU_TOKEN', 'hushhush')
    assert runs.train(workdir, updates__max_skipped=2, **_OVERFLOW) == 76
  return workdir


def _replay(folder, capsys):
  capsys.readouterr()
  code = __main__.main(['replay', str(folder)])
  return code, *capsys.readouterr()


@pytest.mark.slow
def test_the_update_that_ended_a_run_can_be_repeated(diverged, capsys):
  folder = diverged / 'crash' / 'step_1'
  record = json.loads((folder / 'crash.json').read_text('utf-8'))
  assert (record['step'], record['update']) == (1, 2)
  assert record['metrics']['actor/grad_norm'] in ('nan', 'inf')
  leaf = record['state']['policy.params.norm.scale']
  assert leaf == {
    'shape': [16],
    'dtype': 'float32',
    'not_finite': 0,
    'largest': 1.0,
  }
  shown = 'http://***@host/?api_key=***&n=1 --token ***'
  assert record['environment']['JAX_OF_A_TEST'] == shown
  assert all(b'hushhush' not in path.read_bytes() for path in folder.iterdir())
  code, output, errors = _replay(folder, capsys)
  assert code == 0 and not errors
  lines = output.splitlines()
  assert lines[0].startswith('update 2 of step 1, 8 rows; run: ')
  assert lines[1] == 'batch and state: every number is finite'
  assert 'update/skipped: 1 here, 1 in the run' in lines
  assert lines[-1] == 'reproduced: the update is skipped here, too'


@pytest.mark.slow
def test_a_repeated_update_names_what_is_not_finite(diverged, tmp_path, capsys):
  workdir = shutil.copytree(diverged, tmp_path / 'run')
  folder = workdir / 'crash' / 'step_1'
  # Of another run: its config is sound, its batch is not.
  config = json.loads((folder / 'config.json').read_text('utf-8'))
  config['loss']['entropy_coefficient'] = 0.001
  (folder / 'config.json').write_text(json.dumps(config), 'utf-8')
  code, output, _ = _replay(folder, capsys)
  assert code == 1 and output.endswith('the update is sound here\n')
  arrays = dict(np.load(folder / 'batch.npz', allow_pickle=False))
  row = json.loads((folder / 'crash.json').read_text('utf-8'))['rows'][3]
  place = int(np.flatnonzero(arrays['loss_mask_BL'][row])[0])
  arrays['advantages_BL'][row, place] = np.nan
  np.savez(folder / 'batch.npz', **arrays)
  code, output, _ = _replay(folder, capsys)
  assert code == 0
  line = f'batch: advantages_BL: 1 not finite, the first at [{row}, {place}]'
  assert line in output.splitlines()


def test_a_dump_that_is_no_use_is_refused_in_one_line(
  diverged, tmp_path, capsys
):
  workdir = shutil.copytree(diverged, tmp_path / 'run')
  folder = workdir / 'crash' / 'step_1'
  shutil.rmtree(workdir / 'checkpoints' / '1')
  (workdir / 'checkpoints' / '9').mkdir()
  for damage, line in (
    (lambda: None, 'the checkpoint of step 1 is gone'),
    (lambda: (folder / 'batch.npz').write_bytes(b'PK'), 'cut off or damaged'),
    (lambda: (folder / 'batch.npz').unlink(), 'batch.npz: No such file'),
    (lambda: (folder / 'config.json').unlink(), 'no config.json'),
    (lambda: (folder / 'crash.json').write_text('[]'), 'not the record of an'),
    (lambda: shutil.rmtree(folder), 'no such folder'),
  ):
    damage()
    code, _, errors = _replay(folder, capsys)
    assert code == 2 and line in errors and errors.count('\n') == 1


def test_a_rate_beyond_all_numbers_is_refused(tmp_path, capsys):
  rate = {'policy_optimizer__learning_rate': 1e39}
  assert runs.train(tmp_path / 'run', **rate) == 2
  (line,) = capsys.readouterr().err.splitlines()
  expected = 'policy_optimizer.learning_rate=1e+39: must be in [0, 1]'
  assert line.endswith(expected)
  assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_the_supervised_start_keeps_weights_that_are_not_finite_out(
  tmp_path, capsys
):
  # An eps that is 0 in float32 divides 0 by 0 where there is no gradient: at
  # the embeddings of tokens that do not occur.
  flags = runs.flags(
    num_steps=None,
    sft__optimizer__eps=1e-50,
    model__tie_embeddings=False,
    updates__max_skipped=2,
  )
  assert __main__.main(['sft', *flags, f'--workdir={tmp_path}']) == 76
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('2 updates in a row were skipped')
  assert not list(tmp_path.glob('**/*.safetensors'))


def _updates(*skipped):
  return [{'update/skipped': np.float32(x)} for x in skipped]


def test_only_skips_in_a_row_count_over_several_steps():
  skips = skipped_updates.SkippedUpdates(3)
  skips.check(_updates(1, 1, 0, 1))
  skips.check(_updates(1, 0))
  skips.check(_updates(1, 1))
  with pytest.raises(skipped_updates.Diverged, match='^3 updates in a row'):
    skips.check(jax.device_put(_updates(1)))


def test_a_limit_of_zero_is_none():
  skipped_updates.SkippedUpdates(0).check(_updates(*[1] * 99))


@pytest.mark.parametrize(
  ('updates', 'expected'), [((1, 1), [1]), ((0, 1, 1, 1), [3]), ((1, 1, 0), [])]
)
def test_an_update_is_dumped_only_if_the_state_before_it_is_kept(
  updates, expected, tmp_path
):
  dumped = []

  def dump(update, metrics):
    assert metrics['update/skipped']
    dumped.append(update)
    return tmp_path

  skips = skipped_updates.SkippedUpdates(2)
  with pytest.raises(skipped_updates.Diverged) as error:
    skips.check(_updates(*updates), dump)
  assert dumped == expected
  assert ('stppo_jax replay' in str(error.value)) == bool(expected)
