"""Adapters of PEFT leave a run, and another run starts from them."""

import json

import jax
import numpy as np
import pytest

from stppo_jax import __main__
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import weights
from stppo_jax.models import functional
from stppo_jax.models import lora
from stppo_jax.models.hf import peft
from stppo_jax.records import plots
from stppo_jax.training import checkpoint_state
from stppo_jax.workdir import recorded_config
from tests.training import runs

_LORA = runs.LORA | {
  'model__lora__rank_pattern': "('up_proj=3',)",
  'model__lora__rslora': True,
}


@pytest.fixture(scope='module')
def trained(finished, tmp_path_factory):
  """The folder of a run with adapters, and that of its exported adapters."""
  workdir = tmp_path_factory.mktemp('trained')
  out = tmp_path_factory.mktemp('exported') / 'adapters'
  base = {'model__path': finished / 'policy', 'num_steps': 1}
  assert runs.train(workdir, **base, **_LORA) == 0
  flags = [f'--workdir={workdir}', f'--out={out}', '--adapters']
  assert __main__.main(['export', *flags]) == 0
  return workdir, out


@pytest.mark.slow
def test_exported_adapters_are_those_of_the_checkpoint(trained, finished):
  workdir, out = trained
  config = recorded_config.read(workdir)
  policy = checkpoint_state.read_policy(config, workdir, step=None)
  shapes = jax.eval_shape(lambda x: x, policy.trained)
  model = policy.learner.models.policy
  adapters = peft.read(out, model.config, model.lora, shapes)
  jax.tree.map(np.testing.assert_allclose, adapters, policy.trained)
  assert all(np.any(leaf) for leaf in jax.tree.leaves(adapters))
  content = json.loads((out / peft.CONFIG).read_text())
  assert content['base_model_name_or_path'] == str(finished / 'policy')
  assert (content['r'], content['rank_pattern']) == (2, {'up_proj': 3})
  assert (out / 'tokenizer.json').is_file()
  assert not list(out.glob('model*'))


@pytest.mark.slow
def test_a_run_starts_from_adapters(trained, finished):
  """Policy and value model are those of the run that has left them."""
  workdir, out = trained
  config = runs.config(
    model__path=finished / 'policy', model__lora__path=out, seed=5
  )
  assert config.model.lora.rank == 2
  assert config.model.lora.rslora
  learner = runs.learner(config)
  assert isinstance(learner, learner_lib.Learner)
  state = learner.start()
  theirs = checkpoint_state.read_policy(
    recorded_config.read(workdir), workdir, step=None
  )
  compare = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6)
  jax.tree.map(compare, state.policy.params, theirs.trained)
  value = {'layers': state.value.params['layers']}
  jax.tree.map(compare, value, theirs.trained)
  merged = learner.merged_params(state.params)
  jax.tree.map(compare, merged, theirs.params)
  evaluated = weights.load_merged(
    config, config.model.path, learner.models.policy
  )
  jax.tree.map(compare, evaluated, theirs.params)


@pytest.mark.slow
def test_adapters_are_evaluated_on_their_base(trained, finished, capsys):
  _, out = trained
  flags = [f'--checkpoint={finished / "policy"}', *runs.flags()]
  flags = [flag for flag in flags if 'model.path' not in flag]
  flags += [f'--config.model.lora.path={out}']
  assert __main__.main(['evaluate', *flags]) == 0
  wrong = '--config.model.lora.rank=3'
  assert __main__.main(['evaluate', *flags, wrong]) == 2
  assert 'must be 2, as in model.lora.path=' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
  'changes, targets',
  [({}, '(q|down)_proj'), (runs.EXPERTS, 'moe/|q_proj')],
  ids=['dense', 'experts'],
)
def test_the_engine_samples_from_the_adapters_of_the_start(
  changes, targets, tmp_path
):
  """Or the first step would end the run, because the two disagree."""
  shape = runs.shape(runs.config(**changes))
  options = lora.Lora(2, 3.0, targets, ('q_proj=3',), rslora=True)
  model = functional.Model(shape, 'vocabulary', lora=options)
  rng = np.random.default_rng(0)
  adapters = jax.tree.map(
    lambda x: rng.standard_normal(x.shape).astype(np.float32),
    jax.eval_shape(model.init_adapters, jax.random.key(0)),
  )
  folder = tmp_path / 'adapters'
  folder.mkdir()
  peft.write(folder, shape, options, adapters, base='', dtype='F32')
  changes = {**changes, 'model__lora__path': folder, 'evaluate__every': 0}
  assert runs.train(tmp_path / 'run', num_steps=1, **changes) == 0
  metrics = plots.read_metrics(tmp_path / 'run' / 'metrics.jsonl')
  assert metrics['mismatch/logprob_abs_diff_mean'][-1] < 2e-5
  assert metrics['critic/kl'][-1] > 1e-3  # the reference is the base
