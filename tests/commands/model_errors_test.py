"""Model directories that do not fit: one line, exit code 2, no file."""

import json
import shutil

import pytest

from stppo_jax.configs import base
from stppo_jax.models.hf import export
from stppo_jax.training import components
from stppo_jax.training import model_files
from stppo_jax.workdir import run_folder
from tests.models import tiny
from tests.training import runs

_SOURCE = runs.REPO / 'assets' / 'quickstart'
_NORM = 'model.norm.weight'
# Waiting for it would end a run with another line, and exit code 75.
_NO_RETRIEVER = {
  'retrieval__url': 'http://127.0.0.1:9',
  'retrieval__ready_timeout': 1,
}


@pytest.fixture
def model(tmp_path):
  return shutil.copytree(_SOURCE, tmp_path / 'model')


def _config(**changes):
  def change(model):
    path = model / 'config.json'
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(content))

  return change


def _header(change):
  """Returns a change of the header of the weights, in as many bytes."""

  def rewrite(model):
    path = model / 'model.safetensors'
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], 'little')
    header = json.loads(whole[8:end])
    change(header)
    text = json.dumps(header, separators=(',', ':')).encode().ljust(end - 8)
    path.write_bytes((len(text)).to_bytes(8, 'little') + text + whole[end:])

  return rewrite


def _rename(header):
  header['model.norm.wait'] = header.pop(_NORM)


def _write(name, text):
  return lambda model: (model / name).write_text(text)


# One for each file; tests/models/hf and tests/sampling have the others.
@pytest.mark.parametrize(
  ('change', 'expected'),
  [
    (_write('chat_template.jinja', '{% for m in %}'), 'TemplateSyntaxError'),
    (_write('generation_config.json', '{"eos_token_id": [290]}'), 'token 290'),
    (_write('config.json', '{"a": '), 'config.json'),
    (_write('tokenizer.json', '{"a": 1}'), 'tokenizer'),
    (_write('model.safetensors', ''), 'model.safetensors'),
    (_config(max_position_embeddings=7), 'max_position_embeddings'),
    (_config(model_type='bert'), "'bert'"),
    (_config(intermediate_size=7), 'expected (7, 64)'),
    (_header(_rename), f'missing tensors {_NORM}'),
  ],
)
def test_a_model_that_does_not_fit_is_one_line_and_2(
  tmp_path, model, refused, change, expected
):
  change(model)
  flags = runs.flags(model__path=model, **_NO_RETRIEVER)
  workdir = tmp_path / 'run'
  assert expected in refused('train', *flags, f'--workdir={workdir}')
  assert not workdir.exists()


def test_a_longer_context_is_allowed_by_name(model):
  _config(max_position_embeddings=7)(model)
  config = base.get_config()
  config.model.path = str(model)
  config.model.allow_beyond_max_position_embeddings = True
  model_files.check(config, model_files.load_tokenizer(_SOURCE))


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path, refused):
  model, small = tmp_path / 'model', tiny.model()
  export.export(model, small.config, tiny.params(small))
  export.copy_tokenizer(_SOURCE, model)
  flags = runs.flags(model__path=model)
  err = refused('train', *flags, f'--workdir={tmp_path}/run')
  assert str(model) in err and '290 tokens' in err and '11 rows' in err
  assert not (tmp_path / 'run').exists()


# The reference is the quickstart's; the policy, of random weights, is not.
_LIKE_SOURCE = {
  'model__hidden_size': 64,
  'model__intermediate_size': 176,
  'model__num_layers': 3,
  'model__num_heads': 2,
  'model__num_kv_heads': 2,
  'model__head_dim': 32,
}


@pytest.mark.parametrize(
  ('theta', 'change', 'expected'),
  [
    (
      *(5.0, lambda model: None),
      'rope_theta=10000.0, but the policy of this config has 5.0\n',
    ),
    (
      1e4,
      _config(vocab_size=291),
      'vocab_size=291, but the policy of this',
    ),
    (1e4, _header(_rename), f'missing tensors {_NORM}'),
  ],
)
def test_a_reference_must_have_the_shape_of_random_weights(
  tmp_path, model, refused, theta, change, expected
):
  change(model)
  flags = runs.flags(
    model__reference_path=model,
    model__rope_theta=theta,
    sft__before_training=True,
    **_LIKE_SOURCE,
  )
  err = refused('train', *flags, f'--workdir={tmp_path}/run')
  assert err.startswith(f'{model}: {expected}')
  assert not (tmp_path / 'run').exists()


def test_a_start_of_another_shape_than_the_reference_is_refused(
  tmp_path, model, refused
):
  _config(rope_theta=5.0)(model)
  model.rename(tmp_path / 'start')  # as if the run had made it
  run_folder.write(tmp_path, run_folder.Run('train', 'id', 'digest'))
  flags = runs.flags(
    model__reference_path=_SOURCE, sft__before_training=True, **_LIKE_SOURCE
  )
  err = refused('train', *flags, f'--workdir={tmp_path}')
  assert err.startswith(f'{_SOURCE}: rope_theta=10000.0')


def test_only_runs_that_imitate_need_batches_of_demonstrations_to_divide():
  for changes in ({}, {'sft__before_training': True, 'init_from': 'other'}):
    config = runs.config(sft__batch_size=12, **changes)
    shape, mesh = runs.shape(config), components.build_mesh(config)
    components.check_sizes(config, shape, mesh, placement=None)


def test_a_remote_engine_has_no_rows_to_divide_among_devices():
  remote = {'url': 'http://127.0.0.1:9', 'model': 'x'}
  config = runs.config(
    mesh__tensor=2,
    rollout__slots=3,
    rollout__lanes=3,
    rollout__engine='remote',
    **{f'rollout__remote__{name}': value for name, value in remote.items()},
  )
  shape, mesh = runs.shape(config), components.build_mesh(config)
  placement = components.build_placement(config, shape, mesh)
  assert placement is None
  components.check_sizes(config, shape, mesh, placement)
  config.lock().rollout.engine = 'local'
  placement = components.build_placement(config, shape, mesh)
  with pytest.raises(ValueError, match='^rollout.slots=3.*\n.*$'):
    components.check_sizes(config, shape, mesh, placement)


@pytest.mark.parametrize('command', ['config', 'prompt'])
def test_commands_that_need_no_weights_know_the_families(
  command, model, refused
):
  _config(model_type='bert')(model)
  assert refused(command, *runs.flags(model__path=model)).startswith(
    f"config.model.path='{model}': config.json: unsupported model_type 'bert'; "
  )
