"""Models of the Hugging Face Hub, from a server that speaks its API."""

import os
import pathlib

import numpy as np
import pytest

from stppo_jax import exits
from stppo_jax import hub as hub_lib
from stppo_jax.commands.flags import configuration
from stppo_jax.models.hf import load
from stppo_jax.models.hf import peft
from stppo_jax.training import model_files
from stppo_jax.workdir import named_files
from tests import processes
from tests.storage import hub as stand_in
from tests.training import runs

_FOLDER = runs.REPO / 'assets' / 'quickstart'
_NAME = 'org/small'


@pytest.fixture
def commit(hub):
  """The commit of a small model on the Hub; nothing of it is here yet."""
  return hub.add(_NAME, _FOLDER)


def _forget():
  for cached in hub_lib.CACHED:
    cached.cache_clear()  # as in another process


def _downloads(hub):
  return [
    x.rpartition('/')[2] for x in hub.requests if x.startswith('GET /org')
  ]


def test_a_model_of_the_hub_is_read_as_in_a_folder(hub, commit):
  shape = load.read_config(_NAME)
  assert shape == load.read_config(_FOLDER)
  assert 'model.safetensors' not in _downloads(hub)  # `plan` needs no weights
  ours, theirs = (load.read_params(x, shape) for x in (_NAME, _FOLDER))
  np.testing.assert_array_equal(ours['embedding'], theirs['embedding'])
  tokenizer = model_files.load_tokenizer(_NAME)
  text = 'Who is the president?'
  ids = model_files.load_tokenizer(_FOLDER).encode_prompt(text)
  assert list(tokenizer.encode_prompt(text)) == list(ids)
  assert len(_downloads(hub)) == len(set(_downloads(hub)))  # once each


def test_a_config_has_the_commit_of_its_model(hub, commit):
  hub.models[_NAME].refs['v1'] = commit
  for name in (_NAME, f'{_NAME}@main', f'{_NAME}@v1', f'{_NAME}@{commit}'):
    found = runs.config(model__path=name, model__tokenizer_path=name)
    assert found.model.path == f'{_NAME}@{commit}'
    assert found.model.tokenizer_path == f'{_NAME}@{commit}'
  # A name means the same on every machine that a run may be submitted to.
  assert configuration.paths(found).keys() == {'env.prompt_template'}
  # The commit says what the files are, whether they are here or not.
  assert dict(named_files.find(found)).keys().isdisjoint(named_files.MODELS)


def test_a_run_stays_at_its_commit_when_the_branch_moves(hub, commit, tmp_path):
  """A later start goes on with the weights that the first one had."""
  assert hub_lib.pinned(_NAME) == f'{_NAME}@{commit}'
  hub.models[_NAME].refs['v1'] = commit
  other = hub.models[_NAME].commit({'config.json': b'{}'})
  _forget()
  earlier = f'{_NAME}@{commit}'
  assert hub_lib.pinned(_NAME) == f'{_NAME}@{other}'
  assert hub_lib.pinned(_NAME, earlier) == earlier
  # Who names a revision means it.
  assert hub_lib.pinned(f'{_NAME}@v1', f'{_NAME}@{other}') == earlier
  assert hub_lib.pinned(_NAME, 'org/other@' + commit) == f'{_NAME}@{other}'


def test_a_path_of_this_machine_is_no_name(hub, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / _NAME).mkdir(parents=True)
  assert hub_lib.local_folder(_NAME) == pathlib.Path(_NAME)
  assert hub_lib.pinned(_NAME) == _NAME
  # Nor is a misspelt one.
  for name in ('org/nope', 'org/small@main'):
    assert 'no such folder; org is a folder here, so ' in _refusal(name)
  assert not hub.requests
  # What a run has recorded means the same in every folder.
  assert hub_lib.is_name(f'org/nope@{"0" * 40}')


@pytest.mark.parametrize(
  'place', ['', 'small', './org/small', 'a/b/c', '/org/small', 'gs://a/b']
)
def test_other_places_are_no_names(place):
  assert not hub_lib.is_name(place)


def _refusal(name):
  """Returns the line with which a config that names a model is refused."""
  with pytest.raises(exits.Misconfigured) as error:
    runs.config(model__path=name)
  (line,) = str(error.value).splitlines()
  assert line.startswith(f'config.model.path={name!r}: ')
  return line.partition(': ')[2]


def test_a_model_that_is_not_there_is_one_line(hub, commit):
  assert 'no such folder, and ' in _refusal('org/none')
  assert 'has no revision v9' in _refusal(f'{_NAME}@v9')


def test_a_model_that_is_not_free_needs_a_token(hub, monkeypatch):
  monkeypatch.delenv('HF_TOKEN', raising=False)
  hub.add('org/gated', _FOLDER, access='gated')
  hub.add('org/private', _FOLDER, access='private')
  assert 'is gated: ask for access' in _refusal('org/gated')
  assert 'if it is private, log in' in _refusal('org/private')
  monkeypatch.setenv('HF_TOKEN', stand_in.TOKEN)
  for name in ('org/gated', 'org/private'):
    assert load.read_config(name) == load.read_config(_FOLDER)
  hub.fault = lambda line: 403
  assert _refusal('org/other').endswith(
    'refuses: log in with `hf auth login` or set HF_TOKEN'
  )


def test_too_many_requests_end_with_another_try(hub, commit, monkeypatch):
  monkeypatch.setattr('time.sleep', lambda seconds: None)
  hub.fault = lambda line: 429 if '/resolve/' in line else 0
  with pytest.raises(hub_lib.HubError, match='too many requests') as error:
    hub_lib.local_folder(_NAME)
  assert error.value.exit_code == exits.TRY_AGAIN
  asked = len(hub.requests)
  # The library waits and repeats the requests for files.
  hub.fault = lambda line: (
    429 if '/resolve/' in line and len(hub.requests) < asked + 6 else 0
  )
  assert (hub_lib.local_folder(_NAME) / 'config.json').is_file()


@pytest.mark.parametrize('key', named_files.MODELS)
def test_another_try_is_asked_for_with_the_key(key, hub, commit, monkeypatch):
  monkeypatch.setattr('time.sleep', lambda seconds: None)
  name = key.replace('.', '__')
  # First the commit is asked for, and with a commit the files.
  for place in (_NAME, f'{_NAME}@{commit}'):
    hub.fault = lambda line: 429
    with pytest.raises(hub_lib.HubError) as error:
      runs.config(**{name: place})
    line = f'config.{key}={place!r}: {hub.address} answers "too many requests"'
    assert str(error.value).startswith(line)
    assert error.value.exit_code == exits.TRY_AGAIN


@pytest.mark.parametrize('key', ['path', 'reference_path', 'value_path'])
def test_weights_that_cannot_be_had_are_told_with_the_key(key, hub, commit):
  config = runs.config(**{f'model__{key}': f'{_NAME}@{commit}'})
  if key == 'reference_path':
    config = runs.config(model__path=str(_FOLDER), model__reference_path=_NAME)
  hub.fault = lambda line: 403 if 'model.safetensors' in line else 0
  with pytest.raises(hub_lib.HubError) as error:
    model_files.check(config, model_files.load_tokenizer(_FOLDER))
  line = f"config.model.{key}='{_NAME}@{commit}': {hub.address} refuses"
  assert str(error.value).startswith(line)


def test_weights_of_adapters_are_told_with_the_key(hub, tmp_path):
  (tmp_path / peft.CONFIG).write_text('{"r": 2, "lora_alpha": 2}')
  (tmp_path / peft.WEIGHTS).write_bytes(b'weights')
  commit = hub.add('org/adapters', tmp_path)
  hub.fault = lambda line: 403 if peft.WEIGHTS in line else 0
  line = f"config.model.lora.path='org/adapters@{commit}': .* refuses"
  with pytest.raises(hub_lib.HubError, match=line):
    runs.config(model__lora__path='org/adapters')


def test_a_broken_download_is_completed(hub, commit, monkeypatch):
  monkeypatch.setattr('time.sleep', lambda seconds: None)
  broken = []

  def fault(line):
    if 'model.safetensors' in line and len(broken) < 2:
      broken.append(line)
      return -1000 if line.startswith('GET') else 0
    return 0

  hub.fault = fault
  folder = hub_lib.local_folder(_NAME, ['model.safetensors'])
  whole = (_FOLDER / 'model.safetensors').read_bytes()
  assert (folder / 'model.safetensors').read_bytes() == whole
  assert _downloads(hub).count('model.safetensors') == 2


def test_what_the_cache_has_is_used_offline(hub, commit, monkeypatch):
  load.read_config(_NAME)
  _forget()
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
  asked = len(hub.requests)
  assert runs.config(model__path=_NAME).model.path == f'{_NAME}@{commit}'
  with pytest.raises(
    hub_lib.HubError, match=r'incomplete.*\(model.safetensors\)'
  ) as error:
    load.read_params(_NAME, load.read_config(_NAME))
  assert error.value.exit_code == exits.USAGE
  assert 'HF_HUB_OFFLINE is set' in str(error.value)
  assert 'no file of the model in the cache' in _refusal('org/none')
  assert len(hub.requests) == asked


@pytest.mark.slow
def test_the_environment_names_server_and_cache(hub, commit, tmp_path):
  environment = {
    'HF_ENDPOINT': hub.address,
    'HF_HOME': str(tmp_path / 'home'),
    'HF_HUB_OFFLINE': '0',
  }
  done = processes.python(
    *('-m', 'stppo_jax', 'config', '--config=quickstart'),
    f'--config.model.path={_NAME}',
    env=os.environ | environment,
  )
  assert done.returncode == 0, done.stderr
  assert f'{_NAME}@{commit}' in done.stdout
  assert not done.stderr


@pytest.mark.parametrize('name', ['folder/my--model', 'folder/x-', 'org/x.git'])
def test_a_name_that_no_model_can_have_is_a_path(name, hub):
  with pytest.raises(hub_lib.HubError) as found:
    hub_lib.pinned(name)
  assert found.value.exit_code == exits.USAGE and not hub.requests
  assert str(found.value).startswith(f'{name}: no such folder, and not a name')
