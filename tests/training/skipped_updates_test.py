"""Numbers that are not finite reach no weight, are told, and end a run."""

import math

import jax
import numpy as np
import pytest

from stppo_jax import __main__
from stppo_jax.envs import environments
from stppo_jax.envs import search
from stppo_jax.training import checks
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


@pytest.mark.slow
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
  assert 'update 2 of step 2' in line and 'actor/grad_norm inf' in line
  assert 'updates.max_skipped=4' in line
  # What was done is saved, and the same command goes on from there.
  saved = [path.name for path in (tmp_path / 'checkpoints').iterdir()]
  assert saved == ['2'] and not (tmp_path / 'policy').exists()
  assert runs.train(tmp_path, updates__max_skipped=0, **changes) == 0
  assert len(runs.metrics(tmp_path)) == 3


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
  assert 'updates.max_skipped=2' in capsys.readouterr().err
  assert not list(tmp_path.glob('**/*.safetensors'))


def _updates(*skipped):
  return [
    {'update/skipped': np.float32(x), 'actor/grad_norm': np.float32('inf')}
    for x in skipped
  ]


def test_only_skips_in_a_row_count_over_several_steps():
  skips = checks.SkippedUpdates(3)
  skips.check(1, _updates(1, 1, 0, 1))
  skips.check(2, _updates(1, 0))
  skips.check(3, _updates(1, 1))
  line = 'update 1 of step 4: .*actor/grad_norm inf.*updates.max_skipped=3 '
  with pytest.raises(checks.Diverged, match=line):
    skips.check(4, jax.device_put(_updates(1)))


def test_a_limit_of_zero_is_none():
  checks.SkippedUpdates(0).check(1, _updates(*[1] * 99))
