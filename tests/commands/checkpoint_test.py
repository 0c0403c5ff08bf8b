"""`checkpoint` lists and verifies what a run has saved, and changes nothing."""

import gc
import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax import __main__
from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.records.checkpoints import manifest as manifest_lib
from stppo_jax.workdir import run_folder
from tests import processes

# As in tests/records/checkpoints/checkpoint_test.py.
pytestmark = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)
_RUN = run_folder.Run('train', 'mine', 'digest')


@pytest.fixture(autouse=True)
def _no_read_outlives_its_test():
  """Waits for abandoned reads, whose errors would fail other tests."""
  yield
  gc.collect()


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """Returns the folder of a run that has saved the steps 2, 4 and 10."""
  folder = tmp_path_factory.mktemp('saved')
  run_folder.write(folder, _RUN)
  saver = checkpoint.Checkpointer(folder)
  for step, score in {2: 0.25, 4: 0.5, 10: None}.items():
    weights = np.arange(128, dtype=np.float32).reshape(16, 8) + step
    state = {
      'params': {'w': weights, 'b': np.full(8, step, jnp.bfloat16)},
      'count': np.int32(step),
    }
    saver.save(
      step,
      jax.tree.map(jnp.asarray, state),
      {} if score is None else {'score': score},
    )
  saver.close()
  return folder


@pytest.fixture
def run(saved, tmp_path):
  """Returns a copy of that folder."""
  return shutil.copytree(saved, tmp_path / 'run')


def _call(capsys, action, folder):
  """Returns the exit code and the lines; asserts that nothing has changed."""
  before = _listing(folder)
  code = __main__.main(['checkpoint', action, str(folder)])
  out, err = capsys.readouterr()
  assert not err and _listing(folder) == before
  return code, out.splitlines()


def _listing(folder):
  return {
    str(path): (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
    for path in folder.rglob('*')
  }


def _manifest(folder, step):
  return folder / 'checkpoints' / str(step) / manifest_lib.FILE


def test_the_list_has_time_size_score_and_the_best(capsys, run):
  os.rename(run / 'checkpoints' / '2', run / 'checkpoints' / '2.corrupt')
  for path in (run / 'checkpoints' / '4').rglob('*'):
    os.utime(path, (1.8e9, 1.8e9))
  # A save in progress is no checkpoint.
  (run / 'checkpoints' / '12.orbax-checkpoint-tmp').mkdir()
  code, (titles, two, four, ten) = _call(capsys, 'list', run)
  assert code == 0 and titles.split() == ['step', 'saved', 'size', 'score']
  assert two.startswith('2  ') and two.endswith('set aside: 2.corrupt')
  assert four.split()[:4] == ['4', '2027-01-15', '08:00:00', 'UTC']
  assert four.split()[-2:] == ['0.5000', 'best']
  assert re.search(r'^10 .* KiB +newest$', ten)


def test_the_list_shows_a_damaged_manifest_and_loads_no_jax(run):
  _manifest(run, 4).write_text('{"version"')
  program = (
    'import sys; from stppo_jax import __main__\n'
    'code = __main__.main(sys.argv[1:])\n'
    'assert not {"jax", "orbax"} & set(sys.modules)\n'
    'sys.exit(code)'
  )
  words = 'checkpoint', 'list', f'--workdir={run}'
  done = processes.python('-c', program, *words)
  assert done.returncode == 0, done.stderr
  _, two, four, _ = done.stdout.splitlines()
  assert two.endswith('0.2500  best')
  assert 'damaged: manifest/metadata: not JSON' in four


def _flip(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 0x10
  path.write_bytes(data)


def _arrays(folder):
  """Returns the file of step 4 that has the arrays."""
  files = (folder / 'checkpoints' / '4' / 'state').rglob('d/*')
  return max(files, key=lambda path: path.stat().st_size)


def _edit(folder, **changes):
  """Changes the manifest of step 4; its digest is right again."""
  path = _manifest(folder, 4)
  content = json.loads(path.read_text()) | changes
  for name, leaf in content['leaves'].items():
    leaf['fingerprint'] ^= name == 'params.w' and 'run_id' not in changes
  del content['digest']
  path.write_text(
    json.dumps(content | {'digest': manifest_lib.digest(content)})
  )


_DAMAGE = {
  'flipped array': (
    lambda run: _flip(_arrays(run)),
    r'(count|params\.[bw]).*: ',
  ),
  'truncated array': (
    lambda run: os.truncate(_arrays(run), 9),
    'cannot be read',
  ),
  'missing arrays': (
    lambda run: _arrays(run).unlink(),
    r'count and 2 others: cannot be read \(.*\)$',
  ),
  'flipped manifest': (
    lambda run: _flip(_manifest(run, 4)),
    'manifest/metadata: (not JSON|the manifest does not match its digest)',
  ),
  'missing manifest': (
    lambda run: _manifest(run, 4).unlink(),
    'manifest/metadata: No such file or directory',
  ),
  'other leaf': (_edit, r'params\.w: fingerprint \d+, but \d+ in the man'),
  'other run': (
    lambda run: _edit(run, run_id='theirs'),
    'manifest/metadata: of the run theirs, but the run of this workdir is mine',
  ),
}


@pytest.mark.parametrize('kind', _DAMAGE)
def test_damage_is_named_and_the_others_are_verified(capsys, run, kind):
  damage, expected = _DAMAGE[kind]
  damage(run)
  code, (two, four, *more, ten) = _call(capsys, 'verify', run)
  assert code == 3 and len(more) <= 1
  assert two.startswith('ok     step 2: ') and ten.startswith('ok     step 10')
  start, _, problem = four.partition('step 4: ')
  assert start == 'WRONG  ' and re.search(expected, problem)


def test_sound_checkpoints_are_verified(capsys, run):
  code, lines = _call(capsys, 'verify', run)
  assert code == 0
  starts = [line.split(':')[0].split() for line in lines]
  assert starts == [['ok', 'step', number] for number in ('2', '4', '10')]


def test_a_run_without_checkpoints_has_lost_them_or_none(capsys, tmp_path):
  run = tmp_path / 'run'
  run.mkdir()
  run_folder.write(run, _RUN)
  for action in ('list', 'verify'):
    assert _call(capsys, action, run) == (0, [f'{run}: no checkpoints'])
  (run / 'metrics.jsonl').touch()
  assert __main__.main(['checkpoint', 'verify', str(run)]) == 3
  assert 'has no checkpoint: is it' in capsys.readouterr().err
