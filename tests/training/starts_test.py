"""A run starts from the first origin that there is, and says which it was."""

import shutil
import types as python_types

import jax
import numpy as np
import pytest

from stppo_jax import __main__
from stppo_jax.training import claim
from stppo_jax.training import starts
from tests.training import runs

# Updates change nothing, so that weights are compared after a step.
_STILL = {
  'num_steps': 1,
  'evaluate__every': 0,
  'policy_optimizer__learning_rate': 0.0,
  'value_optimizer__learning_rate': 0.0,
}


@pytest.mark.slow
def test_a_run_starts_from_another_one_and_then_needs_it_no_more(
  tmp_path, finished, capsys
):
  source, run = tmp_path / 'source', tmp_path / 'run'
  shutil.copytree(finished, source)
  options = _STILL | {'init_from': source, 'model__hidden_size': 32}
  assert runs.train(run, **options) == 0
  printed = capsys.readouterr().out
  line = (
    f'init_from={source}: the run starts from the policy of that run after '
    'step 3\n'
  )
  assert line in printed
  assert f'start: init_from={source}, kept in {run}/start/policy\n' in printed
  # Of the other run, and of its width.
  assert len({*map(runs.weights, (source, run / 'start', run))}) == 1
  ours, theirs = (
    {
      name: fingerprint
      for name, fingerprint in runs.leaves(folder, step).items()
      if name.split('.')[1] == 'params'
    }
    for folder, step in ((run, 1), (source, 3))
  )
  assert any(name.startswith('value') for name in ours) and ours == theirs
  assert runs.metrics(run)[-1]['goodput/origin'] == 2

  shutil.rmtree(source)
  assert runs.train(run, **options | {'num_steps': 2}) == 0
  assert 'start: step 1 of this run\n' in capsys.readouterr().out
  assert runs.metrics(run)[-1]['goodput/origin'] == 1


def test_random_numbers_and_a_directory_are_said_and_counted(
  tmp_path, finished, capsys
):
  assert runs.metrics(finished)[-1]['goodput/origin'] == 4
  model = finished / 'policy'
  changes = {'num_steps': 1, 'evaluate__every': 0, 'model__path': model}
  assert runs.train(tmp_path, **changes) == 0
  assert f'start: model.path={model}\n' in capsys.readouterr().out
  assert runs.metrics(tmp_path)[-1]['goodput/origin'] == 3


def _load(workdir, **changes):
  """Loads the start of a run, which is there already."""
  config = runs.config(**changes)
  with claim.claimed(config, workdir) as folder:
    start = starts.resolve(config, folder)
    parts = python_types.SimpleNamespace(learner=runs.learner(start.config))
    return starts.load(start, config, parts, folder), parts.learner


def _make(workdir, finished, name='start/policy'):
  """Makes the start of a run, as if the run had made it."""
  return shutil.copytree(finished / 'policy', workdir / name)


def test_a_value_model_that_is_not_there_is_said(tmp_path, finished):
  note = (
    '; that run has no value model that fits, so the value model starts from '
    'the policy'
  )
  loaded, _ = _load(tmp_path)
  assert note not in loaded.name
  made = _make(tmp_path, finished)
  loaded, learner = _load(tmp_path, init_from='other')
  assert loaded.name == f'init_from=other, kept in {made}{note}'
  state = learner.start(str(made))
  jax.tree.map(np.testing.assert_array_equal, loaded.state, state)
  # Without a value model, there is nothing to say.
  loaded, _ = _load(tmp_path, algorithm='grpo', init_from='other')
  assert loaded.name == f'init_from=other, kept in {made}'


@pytest.mark.slow
@pytest.mark.parametrize(
  'theirs',
  [
    {'model__value_path': str(runs.REPO / 'assets' / 'quickstart')},
    {'loss__value_range': (0.0, 1.0)},
  ],
)
def test_a_value_model_that_does_not_fit_is_said(theirs, tmp_path, capsys):
  changes = {'num_steps': 1, 'evaluate__every': 0}
  assert runs.train(tmp_path / 'theirs', **changes, **theirs) == 0
  capsys.readouterr()
  changes['init_from'] = tmp_path / 'theirs'
  assert runs.train(tmp_path / 'ours', **changes) == 0
  said = 'no value model that fits, so the value model starts from the policy'
  assert said in capsys.readouterr().out


def test_each_origin_has_a_number(tmp_path, finished):
  """Number 1, a run's own checkpoint, is that of runs that are resumed."""

  def origin(workdir, **changes):
    loaded, _ = _load(tmp_path / workdir, **changes)
    return loaded.number, loaded.name.partition('; ')[0]

  made = _make(tmp_path / 'new', finished)
  older = _make(tmp_path / 'old', finished, 'start')  # by version 0.2
  for workdir, start in (('new', made), ('old', older)):
    copied = f'init_from=other, kept in {start}'
    assert origin(workdir, init_from='other') == (2, copied)
    imitated = 3, f'the supervised start in {start}'
    assert origin(workdir, sft__before_training=True) == imitated
    # It is not the start of a run that makes none.
    assert origin(workdir) == (4, 'random numbers')
  model = runs.REPO / 'assets' / 'quickstart'
  assert origin('x', model__path=model) == (3, f'model.path={model}')
  assert origin('x', model__path=made) == (3, f'model.path={made}')


def test_a_folder_that_is_no_run_is_refused(tmp_path, finished, capsys):
  def refused(source):
    flags = runs.flags(**_STILL, init_from=source)
    assert __main__.main(['train', *flags, f'--workdir={tmp_path}/run']) == 2
    assert not (tmp_path / 'run' / 'checkpoints').exists()
    return capsys.readouterr().err

  none = tmp_path / 'none'
  assert refused(none).startswith(f'config.init_from={none}: no config.json')
  none.mkdir()
  shutil.copy(finished / 'config.json', none)
  assert refused(none).startswith(f'{none}: no checkpoint')
