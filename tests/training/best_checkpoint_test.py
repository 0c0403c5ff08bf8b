"""A run whose policy gets worse still has its best state."""

import pytest

from stppo_jax.envs import environments
from stppo_jax.envs import search
from tests.training import runs


class _Declining(search.SearchEnvironment):
  """An environment whose scores are 1 in one evaluation and 0 otherwise."""

  _num_scored = 0

  def rewards(self, question, prompt, texts, status):
    outcomes, scores = super().rewards(question, prompt, texts, status)
    # A step trains on 16 trajectories and evaluates 16; the start is evaluated
    # before the first step.
    evaluation, rest = divmod(self._num_scored, 32)
    self._num_scored += 1
    good = evaluation == 1 and rest < 16
    return outcomes, scores | {'em': 1.0 if good else 0.0}


@pytest.mark.slow
def test_the_best_evaluation_is_kept(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(environments.ENVIRONMENTS, 'search', _Declining)
  changes = {'evaluate__every': 1, 'checkpoint__keep': 1}
  assert runs.train(tmp_path, **changes) == 0
  scores = [line['val/em/one_hop'] for line in runs.metrics(tmp_path)]
  assert scores == [0, 1, 0, 0]
  saved = {path.name for path in (tmp_path / 'checkpoints').iterdir()}
  assert saved == {'1', '3'}
  best = tmp_path / 'checkpoints' / '1'
  output = capsys.readouterr().out
  assert f'best evaluation: after step 1, kept in {best}' in output
