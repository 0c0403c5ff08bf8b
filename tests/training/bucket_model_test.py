"""A model in a bucket is the model in a folder."""

import jax
import numpy as np
import pytest

from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax.models.hf import load
from stppo_jax.training import model_files
from stppo_jax.workdir import named_files
from tests.training import runs

_FOLDER = runs.REPO / 'assets' / 'quickstart'
_ADDRESS = 'gs://mine/models/small'


@pytest.fixture
def model(google, tmp_path, monkeypatch):
  """The address of a small model; nothing of it is here yet."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  buckets.local_folder.cache_clear()
  for path in _FOLDER.iterdir():
    if path.is_file():
      google.put(f'models/small/{path.name}', path.read_bytes())
  yield _ADDRESS
  buckets.local_folder.cache_clear()


def test_a_model_in_a_bucket_is_read_as_in_a_folder(google, model):
  shape = load.read_config(model)
  assert shape == load.read_config(_FOLDER)
  ours, theirs = (load.read_params(x, shape) for x in (model, _FOLDER))
  assert jax.tree.structure(ours) == jax.tree.structure(theirs)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
    assert np.array_equal(a, b)
  tokenizer = model_files.load_tokenizer(model)
  text = 'Who is the president?'
  ids = model_files.load_tokenizer(_FOLDER).encode_prompt(text)
  assert list(tokenizer.encode_prompt(text)) == list(ids)
  downloads = [x for x in google.requests if 'model.safetensors?' in x]
  assert len(downloads) == 1  # once in a process


def test_a_config_with_a_model_in_a_bucket_is_checked(google, model):
  found = runs.config(model__path=model, model__reference_path=model)
  assert found.model.path == model  # the record of the run names the bucket
  files = dict(named_files.find(found))
  sums = {
    named_files.checksum(files[f'model.{key}'])
    for key in ('path', 'reference_path')
  }
  assert sums == {named_files.checksum(_FOLDER)}
  with pytest.raises(
    exits.Misconfigured, match='nothing is stored at this address'
  ):
    runs.config(model__path='gs://mine/models/none')


def test_other_bytes_than_the_bucket_has_are_no_model(model, monkeypatch):
  download = buckets.Bucket.download

  def cut(self, names, folder):
    download(self, names, folder)
    for name in names:
      (folder / name).write_bytes((folder / name).read_bytes()[:-1])

  monkeypatch.setattr(buckets.Bucket, 'download', cut)
  with pytest.raises(buckets.BucketError, match='bytes of .*, expected'):
    load.read_config(model)
