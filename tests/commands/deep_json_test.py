"""Tests that JSON that is nested too deeply is an error of one line."""

import json
import shutil

import pytest

from stppo_jax import __main__
from stppo_jax.data import formats
from tests.training import runs

_DEEP = '{"a": ' * 100_000
_MODEL = runs.REPO / 'assets' / 'quickstart'


@pytest.fixture
def run(tmp_path):
  """Returns the folder of a run, made by hand."""
  folder = tmp_path / 'run'
  (folder / 'checkpoints' / '1').mkdir(parents=True)
  record = {'command': 'train', 'run_id': '1', 'config_digest': '2'}
  (folder / 'run.json').write_text(json.dumps(record))
  (folder / 'metrics.jsonl').write_text('{"step": 1, "loss": 0.5}\n')
  return folder


@pytest.mark.parametrize(
  'command',
  [
    ('report', 'RUN', '--out=OUT/report.html'),
    ('export', '--workdir=RUN', '--out=OUT/policy'),
    ('evaluate', '--checkpoint=RUN'),
    ('train', '--workdir=RUN', *runs.flags()),
    ('train', '--workdir=OUT/new', *runs.flags(init_from='RUN')),
  ],
)
def test_the_config_of_a_run(run, tmp_path, capsys, command):
  (run / 'config.json').write_text(_DEEP)
  words = ' '.join(command).replace('RUN', str(run))
  words = words.replace('OUT', str(tmp_path)).split(' ')
  assert __main__.main(words) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert 'config.json' in line


def test_records_that_status_passes_over(run, refused):
  for name in ('config.json', 'heartbeat.json', 'metrics.jsonl', 'lock'):
    (run / name).write_text(_DEEP + '\n')
  assert __main__.main(['status', str(run)]) == 0
  (run / 'run.json').write_text(_DEEP)
  assert 'no run.json' in refused('status', run)


@pytest.mark.parametrize(
  'name', ['config.json', 'generation_config.json', 'model.safetensors']
)
def test_the_files_of_a_model(tmp_path, refused, name):
  model = tmp_path / 'model'
  shutil.copytree(_MODEL, model)
  data = _DEEP.encode()
  if name == 'model.safetensors':
    data = len(data).to_bytes(8, 'little') + data
  (model / name).write_bytes(data)
  flags = runs.flags(model__path=model)
  assert name in refused('train', *flags, f'--workdir={tmp_path}/run')


def test_a_list_in_a_row_of_a_data_set():
  row = {'possible_answers': '[' * 100_000, 'question': '', 'id': 1}
  with pytest.raises(ValueError, match='nested too deeply'):
    formats.popqa(row)
