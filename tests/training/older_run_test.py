"""A run that an earlier version has begun goes on as it would have there."""

import json
import tarfile

import pytest

from stppo_jax import __main__
from stppo_jax.sampling import chat_template
from tests.golden import make_run_of_0_2 as recorded
from tests.training import runs


# In `make test`, run_record_test.py has the config of such a run, and
# starts_test.py its folder.
@pytest.mark.slow
def test_a_run_of_0_2_goes_on(tmp_path, monkeypatch):
  with tarfile.open(recorded.ARCHIVE) as archive:
    archive.extractall(tmp_path, filter='data')
  workdir = tmp_path / 'run'
  expected = json.loads((workdir / 'expected.json').read_text())
  start = (workdir / 'start' / 'model.safetensors').read_bytes()
  monkeypatch.chdir(runs.REPO)
  flags = [*recorded.FLAGS, f'--config.num_steps={recorded.STEPS + 1}']
  assert __main__.main(['train', *flags, f'--workdir={workdir}']) == 0
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  found = json.loads(lines[-1])
  assert [json.loads(line)['step'] for line in lines] == [0, 1, 2, 3]
  compared = {
    name: value
    for name, value in expected.items()
    if not name.startswith(runs.OF_THE_CLOCK) and name in found
  }
  assert len(compared) > 100
  assert {name: found[name] for name in compared} == pytest.approx(
    compared, rel=1e-4, abs=1e-6
  )
  # What it started from is where that version has put it, and as it was.
  assert (workdir / 'start' / 'model.safetensors').read_bytes() == start
  assert not (workdir / 'start' / 'policy').exists()


@pytest.mark.slow
def test_a_run_whose_prompts_had_no_bos_keeps_them(run, monkeypatch, capsys):
  record = json.loads((run / 'config.json').read_text())
  del record['prompt']
  (run / 'config.json').write_text(json.dumps(record))
  # As with the tokenizer of a base model of Llama.
  monkeypatch.setattr(
    chat_template.Prompts,
    'begun_by_tokenizer',
    property(lambda prompts: prompts._options.bos == 'auto'),
  )
  command = ['train', *runs.flags(num_steps=runs.STEPS)]
  train = lambda *flags: __main__.main([*command, f'--workdir={run}', *flags])
  assert train() == 2
  (line,) = capsys.readouterr().err.splitlines()[-1:]
  assert line.startswith('prompt.bos=auto: would put a bos_token before ')
  assert f'the run in {run} was begun by' in line
  *_, bos, allow = line.split()
  assert train(bos, allow) == 0
  assert train(bos) == 0
