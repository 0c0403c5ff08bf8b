"""A run that an earlier version has begun goes on as it would have there."""

import json
import tarfile

import pytest

from stppo_jax import __main__
from tests.golden import make_run_of_0_2 as recorded
from tests.training import runs


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
