"""A run starts from the first origin that there is, and says which it was."""

import json
import shutil

import pytest

from stppo_jax import __main__
from stppo_jax.training import starts
from tests.training import runs

# Updates change nothing, so that weights are compared after a step.
_STILL = {
  'num_steps': 1,
  'evaluate__every': 0,
  'policy_optimizer__learning_rate': 0.0,
  'value_optimizer__learning_rate': 0.0,
}
# Orbax reads the leaves concurrently; see checkpoint_test.py.
pytestmark = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)


def _weights(workdir, step):
  """Returns the fingerprints of all weights in a checkpoint."""
  path = workdir / 'checkpoints' / str(step) / 'manifest' / 'metadata'
  leaves = json.loads(path.read_text('utf-8'))['leaves']
  kept = [name for name in leaves if name.split('.')[1] == 'params']
  return {name: leaves[name] for name in kept}


def test_a_run_starts_from_another_one_and_then_needs_it_no_more(
  tmp_path, finished, capsys
):
  source, run = tmp_path / 'source', tmp_path / 'run'
  shutil.copytree(finished, source)
  options = _STILL | {'init_from': source, 'model__hidden_size': 32}
  assert runs.train(run, **options) == 0
  printed = capsys.readouterr().out
  assert f'init_from={source}: its policy after step 3\n' in printed
  assert f'start: init_from={source}, kept in {run}/start\n' in printed
  policies = {
    (folder / 'model.safetensors').read_bytes()
    for folder in (source / 'policy', run / 'start', run / 'policy')
  }
  assert len(policies) == 1  # of the other run, and of its width
  weights = _weights(run, 1)
  assert any(name.startswith('value') for name in weights)
  assert weights == _weights(source, 3)
  assert runs.metrics(run)[-1]['goodput/origin'] == 2

  shutil.rmtree(source)
  assert runs.train(run, **options | {'num_steps': 2}) == 0
  assert 'start: step 1 of this run\n' in capsys.readouterr().out
  assert runs.metrics(run)[-1]['goodput/origin'] == 1


def test_random_numbers_and_a_directory_are_said_and_counted(tmp_path, capsys):
  first, second = tmp_path / 'first', tmp_path / 'second'
  changes = {'num_steps': 1, 'evaluate__every': 0}
  assert runs.train(first, **changes) == 0
  assert 'start: random numbers\n' in capsys.readouterr().out
  assert runs.metrics(first)[-1]['goodput/origin'] == 4
  model = first / 'policy'
  assert runs.train(second, model__path=model, **changes) == 0
  assert f'start: model.path={model}\n' in capsys.readouterr().out
  assert runs.metrics(second)[-1]['goodput/origin'] == 3


def test_a_value_model_that_is_not_there_is_said(tmp_path):
  learner = runs.learner(runs.config())
  start = learner.start()
  assert starts.with_value(runs.config(), start, tmp_path) == (start, '')
  config = runs.config(init_from='other')
  state, note = starts.with_value(config, start, tmp_path)
  assert state is start and 'it has no value model that fits' in note


def test_each_origin_has_a_number(tmp_path):
  def number(saved='', **changes):
    config = runs.config(**changes)
    return starts.find(config, tmp_path, saved=saved).number

  start = {'model__path': tmp_path / 'start', 'init_from': 'other'}
  (tmp_path / 'start').mkdir()
  (tmp_path / 'start' / 'config.json').touch()
  assert number(saved='step 3', **start) == 1
  assert number(**start) == 2
  assert number(model__path=tmp_path / 'start') == 3
  assert number(model__path=runs.REPO / 'assets' / 'quickstart') == 3
  assert number() == 4


def test_a_folder_that_is_no_run_is_refused(tmp_path, finished, capsys):
  def refused(source):
    flags = runs.flags(**_STILL, init_from=source)
    assert __main__.main(['train', *flags, f'--workdir={tmp_path}/run']) == 2
    assert not (tmp_path / 'run' / 'checkpoints').exists()
    return capsys.readouterr().err

  none = tmp_path / 'none'
  assert refused(none) == (
    f'config.init_from={none}: no config.json: not the folder of a run\n'
  )
  none.mkdir()
  shutil.copy(finished / 'config.json', none)
  assert refused(none) == f'{none}: no checkpoint; there are: none\n'
