"""A run goes on with what it began with, unless a change is allowed."""

import json
import shutil

import pytest

from stppo_jax.records import run_folder
from tests.training import runs


@pytest.fixture
def run(finished, tmp_path):
  """Returns a copy of the folder of a finished run."""
  return shutil.copytree(finished, tmp_path / 'run')


def test_a_guarded_key_is_refused_unless_it_is_allowed(run, finished, capsys):
  changes = {
    'model.path': finished / 'policy',
    'model.tokenizer_path': finished / 'policy',
    'algorithm.bounds.clip_low': 0.1,
  }
  before = (run / 'config.json').read_bytes()
  identity = run_folder.read(run)
  assert runs.train(run, **changes) == 2
  err = capsys.readouterr().err
  assert [line.partition(':')[0] for line in err.splitlines()] == [
    f'{key}={changes[key]}' for key in sorted(changes)
  ]
  assert (run / 'config.json').read_bytes() == before
  allowed = {'resume.allow_change': repr(tuple(changes))}
  assert runs.train(run, **changes, **allowed) == 0
  out, err = capsys.readouterr()
  assert out.count('note: ') == 3 and err == ''
  recorded = json.loads((run / 'config.json').read_text())
  assert recorded['model']['path'] == str(finished / 'policy')
  assert run_folder.read(run) == identity
