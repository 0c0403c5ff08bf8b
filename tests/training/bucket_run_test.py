"""A run whose machine is lost goes on elsewhere, from its copy in a bucket."""

import json
import shutil
import signal
import socket
import sys

import pytest

from stppo_jax import __main__
from tests.training import faults
from tests.training import runs

# Orbax reads the leaves concurrently; see checkpoint_test.py.
pytestmark = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)


def _train(workdir, address, act=lambda moment: None):
  changes = {'writer__copy_to': address, 'checkpoint__every': 2}
  with faults.at(runs.config(**changes), act):
    return runs.train(workdir, **changes)


@pytest.fixture
def google(monkeypatch):
  """The address of a folder in a bucket that an emulator of Google's serves."""
  pytest.importorskip('gcsfs')
  emulator = pytest.importorskip('gcp_storage_emulator.server')
  with socket.create_server(('127.0.0.1', 0)) as free:
    port = free.getsockname()[1]
  served = emulator.create_server(
    '127.0.0.1', port, in_memory=True, default_bucket='mine'
  )
  monkeypatch.setenv('STORAGE_EMULATOR_HOST', f'http://127.0.0.1:{port}')
  served.start()
  yield 'gs://mine/run'
  served.stop()


@pytest.mark.slow
def test_a_run_is_copied_to_google_cloud(google, tmp_path, capsys):
  lost, other = tmp_path / 'lost', tmp_path / 'other'
  send = faults.send_at(('collect', 3), signal.SIGTERM)
  assert _train(lost, google, send) == 75
  shutil.rmtree(lost)
  assert _train(other, google) == 0
  said = f'{other}: brought here from {google}, step 2'
  assert said in capsys.readouterr().out
  for command in (['status'], ['checkpoint', 'verify']):
    assert __main__.main([*command, google]) == 0
  out = capsys.readouterr().out
  assert 'finished' in out and 'ok     step 3' in out


@pytest.mark.slow
def test_a_run_goes_on_from_its_bucket(finished, tmp_path, capsys):
  address = f'file://{tmp_path}/bucket/run'
  lost, other = tmp_path / 'lost', tmp_path / 'other'
  send = faults.send_at(('collect', 3), signal.SIGTERM)
  assert _train(lost, address, send) == 75
  shutil.rmtree(lost)
  capsys.readouterr()
  assert __main__.main(['status', address, '--json']) == 0
  state = json.loads(capsys.readouterr().out)
  assert (state['folder'], state['state']) == (address, 'interrupted')
  assert (state['step'], state['checkpoint']) == (2, 2)

  assert _train(other, address) == 0
  said = f'{other}: brought here from {address}, step 2'
  assert said in capsys.readouterr().out
  runs.assert_same_files(other, finished, num_steps=runs.STEPS)
  weights = 'policy/model.safetensors'
  written = (finished / weights).read_bytes()
  assert (other / weights).read_bytes() == written
  assert (tmp_path / 'bucket' / 'run' / weights).read_bytes() == written

  # What reads a run reads its copy, too.
  assert __main__.main(['status', address]) == 0
  assert 'finished' in capsys.readouterr().out
  for action, expected in (('list', 'newest'), ('verify', 'ok     step 3')):
    assert __main__.main(['checkpoint', action, address]) == 0
    assert expected in capsys.readouterr().out
  report = tmp_path / 'report.html'
  assert __main__.main(['report', address, f'--out={report}']) == 0
  assert '1 run' in capsys.readouterr().out and report.stat().st_size > 10_000
  assert __main__.main(['view', address]) == 0
  assert 'step 3: 16 of 16 dialogues' in capsys.readouterr().out

  # Another run must not take the place of this one.
  begins = ['train', *runs.flags(seed=5, writer__copy_to=address)]
  assert __main__.main([*begins, f'--workdir={tmp_path / "new"}']) == 2
  assert 'seed=5: the run in' in capsys.readouterr().err
  assert __main__.main([*begins, f'--workdir={other}', '--restart']) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f'writer.copy_to={address}: holds a run already; ')


def test_a_bucket_without_its_package_is_one_line(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setitem(sys.modules, 's3fs', None)
  flags = runs.flags(writer__copy_to='s3://bucket/run')
  assert __main__.main(['train', *flags, f'--workdir={tmp_path}/run']) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('config.writer.copy_to: s3://bucket/run: needs a pack')
  assert not list(tmp_path.iterdir())
