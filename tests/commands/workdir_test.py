"""No command replaces a model, a tokenizer, data, or files of others."""

import shutil
import sys

import numpy as np
import pytest

from tests.training import runs

_ASSETS = runs.REPO / 'assets' / 'quickstart'


@pytest.fixture
def model(tmp_path):
  """Returns a model as it is downloaded."""
  return shutil.copytree(_ASSETS, tmp_path / 'models' / 'M')


@pytest.fixture
def batch(tmp_path):
  """Returns a file that `prefer` would read."""
  np.savez(tmp_path / 'batch.npz', tokens_BL=np.zeros((2, 2)))
  return tmp_path / 'batch.npz'


def _files(folder):
  return {p: p.read_bytes() for p in folder.rglob('*') if p.is_file()}


@pytest.mark.parametrize('command', ['train', 'sft', 'prefer'])
@pytest.mark.parametrize(
  ('workdir', 'relation'), [('', 'is'), ('..', 'holds'), ('run', 'lies in')]
)
@pytest.mark.parametrize('key', ['path', 'reference_path', 'tokenizer_path'])
def test_a_model_is_no_workdir(
  model, batch, refused, command, key, workdir, relation
):
  before = _files(model)
  flags = runs.flags(**{f'model__{key}': model}, num_steps=None)
  flags += [f'--workdir={model}/{workdir}']
  flags += [f'--batch={batch}'] if command == 'prefer' else []
  line = refused(command, *flags)
  assert f': {relation} {model}, the folder of model.{key}; ' in line
  assert _files(model) == before


def test_not_every_address_is_a_workdir(tmp_path, monkeypatch, refused):
  monkeypatch.chdir(tmp_path)
  for place in ('s3://mine/run', 'gs://mine', 'gs://mine/', 'gs://a:b@c/run'):
    flags = [*runs.flags(), f'--workdir={place}']
    assert refused('train', *flags) == (
      f'--workdir={place}: must be a folder, or an address as gs://BUCKET/RUN\n'
    )
    assert refused('train', *flags, '--verify_resume=1') == (
      f'--workdir={place}: an address, not a folder; name a folder of this '
      'machine\n'
    )
  monkeypatch.setitem(sys.modules, 's3fs', None)
  for command in ('status', 'report', 'view', 'alarms'):
    line = refused(command, 's3://mine/run')
    assert line.startswith('s3://mine/run: needs a package for s3://: pip ')
  assert not _files(tmp_path)


def test_the_folder_of_the_data_is_no_workdir(tmp_path, refused):
  data = tmp_path / 'data' / 'nq'
  data.mkdir(parents=True)
  line = '{"id": "1", "dataset": "d", "kind": "open", '
  (data / 'q.jsonl').write_text(line + '"question": "?", "answers": ["a"]}\n')
  flags = runs.flags(
    data__name='jsonl',
    data__root=tmp_path / 'data',
    data__train='nq/q.jsonl',
    retrieval__url='http://127.0.0.1:9',
  )
  for folder, relation in (
    (data, 'is'),
    (data.parent, 'holds'),
    (data / 'runs' / '1', 'lies in'),
  ):
    line = refused('train', *flags, f'--workdir={folder}')
    assert f': {relation} {data}, the folder of data.train; ' in line


def test_a_batch_is_collected_into_no_model_and_over_no_other_file(
  model, tmp_path, refused
):
  before = _files(model)
  (tmp_path / 'notes.txt').write_text('mine')
  collect = ['lab', 'collect', *runs.flags(model__path=model)]
  line = refused(*collect, f'--out={model}/model.safetensors')
  assert f'lies in {model}, the folder of model.path' in line
  line = refused(*collect, f'--out={tmp_path}/notes.txt')
  assert 'exists and is not a npz file' in line
  assert _files(model) == before


def test_a_folder_without_a_run_has_no_score(model, tmp_path, refused):
  flags = runs.flags(model__path=model)
  collect = ['lab', 'collect', f'--out={tmp_path}/F.npz', *flags]
  for folder in (model, tmp_path):
    line = refused(*collect, f'--workdir={folder}')
    assert line == f'no run of train in {folder}\n'
  assert not (tmp_path / 'F.npz').exists()
  line = refused('evaluate', *flags, f'--checkpoint={tmp_path}')
  assert f'{tmp_path}: neither a run' in line
