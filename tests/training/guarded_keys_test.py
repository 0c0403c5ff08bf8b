"""A run goes on with what it began with, unless a change is allowed."""

import json
import os
import shutil

import pytest

from stppo_jax.workdir import run_folder
from tests import processes
from tests.training import runs


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


@pytest.mark.slow
def test_a_file_that_has_changed_is_refused_unless_it_is_allowed(run, capsys):
  tokenizer = shutil.copytree(run / 'policy', run.parent / 'tokenizer')
  named = {'model.tokenizer_path': tokenizer}
  allowed = {'resume.allow_change': "('model.tokenizer_path',)"}
  assert runs.train(run, **named, **allowed) == 0
  path = tokenizer / 'tokenizer.json'
  path.write_text(json.dumps(json.loads(path.read_text())))  # other bytes
  capsys.readouterr()
  assert runs.train(run, **named) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f'model.tokenizer_path={tokenizer}: changed ')
  assert line.endswith('--config.resume.allow_change=model.tokenizer_path')
  assert runs.train(run, **named, **allowed) == 0
  assert runs.train(run, **named) == 0  # from now on
  change = json.loads(
    (run / 'config_changes.jsonl').read_text().splitlines()[-1]
  )
  assert change['key'] == f'model.tokenizer_path={tokenizer}'
  # A run of an earlier version has no checksums, and has them from now on.
  (run / 'files.json').unlink()
  assert runs.train(run, **named) == 0
  assert (run / 'files.json').exists()


@pytest.mark.slow
def test_a_run_goes_on_in_another_clone(run, tmp_path):
  clone = tmp_path / 'clone'
  for name in ('stppo_jax', 'configs', 'assets'):
    shutil.copytree(runs.REPO / name, clone / name, symlinks=True)
  words = ['-m', 'stppo_jax', 'train', f'--workdir={run}']
  words += [f'--config={clone}/configs/quickstart.py']
  words += runs.flags(num_steps=runs.STEPS)[1:]

  def start():
    environment = os.environ | {'PYTHONPATH': str(clone)}
    return processes.python(*words, cwd=clone, env=environment)

  assert start().returncode == 0
  # An earlier version has recorded where the first clone is.
  for name in ('config.json', 'files.json'):
    text = (run / name).read_text()
    assert 'asset:prompts/quickstart.txt' in text
    folder = f'{runs.REPO}/configs/prompts/'
    (run / name).write_text(text.replace('asset:prompts/', folder))
  assert start().returncode == 0
  template = clone / 'configs' / 'prompts' / 'quickstart.txt'
  template.write_text(template.read_text() + '!')
  refused = start()
  name = 'env.prompt_template=asset:prompts/quickstart.txt: changed'
  assert refused.returncode == 2 and refused.stderr.startswith(name)
