"""Restored bits are the saved ones; damaged steps are set aside."""

import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.records.checkpoints import fingerprint
from stppo_jax.records.checkpoints import manifest as manifest_lib
from stppo_jax.records.checkpoints import pending_save
from stppo_jax.records.checkpoints import saved_steps
from stppo_jax.workdir import run_folder

_REPO = pathlib.Path(__file__).resolve().parents[3]


# Once: a collection takes long in a process that has run many tests.
@pytest.fixture(autouse=True, scope='module')
def _no_read_outlives_these_tests():
  """Collects abandoned reads, whose errors would fail other tests."""
  yield
  gc.collect()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
  params: dict
  opt_state: tuple
  step: jax.Array


def _mesh(*shape):
  return jax.make_mesh(
    shape, ('data', 'fsdp'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )


def _state(mesh, seed=0):
  """Returns a state with all dtypes, shardings and containers of runs."""
  sharded = NamedSharding(mesh, P('fsdp', None))
  whole = NamedSharding(mesh, P())
  rng = np.random.default_rng(seed)
  params = {
    'layers': {'w': rng.standard_normal((16, 8), np.float32)},
    'half': rng.standard_normal((8, 4)).astype(jnp.bfloat16),
  }
  shapes = jax.eval_shape(optax.adamw(1e-3).init, params)
  opt_state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
  params = jax.device_put(params, sharded)
  extra = {
    'flags': np.arange(8) % 3 == 0,
    'ids': np.arange(8, dtype=np.int32) * (seed + 1),
    'nan': np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
  }
  params |= jax.device_put(extra, whole)
  opt_state = jax.device_put(opt_state, whole)
  return _State(params, opt_state, jax.device_put(np.int32(seed), whole))


def _abstract(state):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    state,
  )


def _placed(**leaves):
  """Returns numpy arrays as a state on one device."""
  return jax.device_put(leaves, jax.devices()[0])


def _bits(tree):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def _save(workdir, *steps):
  saver = checkpoint.Checkpointer(workdir, keep=3)
  for step in steps:
    saver.save(step, _state(_mesh(2, 4), step), {'kl': step / 10})
  saver.close()


def _restore(workdir, mesh=None, **options):
  target = _abstract(_state(mesh or _mesh(2, 4)))
  saver = checkpoint.Checkpointer(workdir, keep=3, **options)
  return saver.restore_latest(target)


def _change_manifest(workdir, change):
  """Changes the manifest of step 2, whose digest then fits."""
  path = workdir / 'checkpoints' / '2' / manifest_lib.FILE
  saved = json.loads(path.read_text())
  del saved['digest']
  saved = change(saved)
  path.write_text(json.dumps(saved | {'digest': manifest_lib.digest(saved)}))


def test_restores_bits_on_any_mesh(tmp_path):
  _save(tmp_path, 1, 2)
  for shape in ((2, 4), (8, 1), (1, 8)):
    mesh = _mesh(*shape)
    step, state, host = _restore(tmp_path, mesh)
    expected = _state(mesh, 2)
    assert (step, host) == (2, {'kl': 0.2})
    assert _bits(state) == _bits(expected)
    kinds = lambda tree: jax.tree.map(lambda x: (x.sharding, x.dtype), tree)
    assert kinds(state) == kinds(expected)


def test_the_newest_and_every_mth_step_are_kept(tmp_path):
  saver = checkpoint.Checkpointer(tmp_path, keep=2, keep_every=3)
  state = _placed(x=np.ones(2, np.float32))
  assert saver.restore_latest(state) is None
  for step in range(1, 9):
    saver.save(step, state, {})
  saver.close()
  kept = {int(p.name) for p in (tmp_path / 'checkpoints').iterdir()}
  assert kept == {3, 6, 7, 8}


def test_the_best_step_is_kept_beside_the_newest(tmp_path):
  scores = {1: 0.2, 2: 0.9, 3: 0.9, 4: 0.1, 5: None, 6: 0.3}
  for steps in ((1, 2, 3, 4), (5, 6)):  # two starts
    saver = checkpoint.Checkpointer(tmp_path, keep=2)
    for step in steps:
      score = {} if scores[step] is None else {'score': scores[step]}
      saver.save(step, _placed(x=np.ones(2, np.float32)), score)
    saver.close()
  reader = checkpoint.Checkpointer(tmp_path, read_only=True)
  assert reader.steps() == [3, 5, 6]  # of equals the newest is the best
  assert reader.best() == 3
  reader.close()
  _flip(tmp_path / 'checkpoints' / '3' / 'manifest' / 'metadata', 0.5)
  reader = checkpoint.Checkpointer(tmp_path, read_only=True)
  assert reader.best() == 6  # a damaged step has no score
  reader.close()


def test_a_newer_schema_is_refused_and_nothing_is_changed(tmp_path):
  _save(tmp_path, 1, 2)
  _change_manifest(tmp_path, lambda saved: saved | {'version': 2, 'more': 1})
  before = _listing(tmp_path)
  with pytest.raises(manifest_lib.NewerSchema) as caught:
    _restore(tmp_path)
  assert caught.value.exit_code == 2
  assert 'step 2 is of schema 2' in str(caught.value)
  assert _listing(tmp_path) == before
  found = saved_steps.find(tmp_path)
  assert found[-1].notes[-1].startswith('of schema 2')


def test_a_save_beside_the_loop_has_the_bits_of_its_step(tmp_path):
  update = jax.jit(
    lambda state: jax.tree.map(lambda x: (x * 2).astype(x.dtype), state),
    donate_argnums=0,
  )
  saver = checkpoint.Checkpointer(tmp_path, keep=3)
  state = update(_state(_mesh(2, 4), 1))
  expected = {}
  for step in (1, 2, 3):
    expected[step] = [x.copy() for x in jax.device_get(jax.tree.leaves(state))]
    saver.save(step, state, {}, waits=False)
    assert saver.pending.step
    for _ in range(3):
      state = update(state)
  saver.wait()
  assert saver.pending.saved == 3 and saver.pending.seconds > 0
  for step, leaves in expected.items():
    _, restored, _ = saver.restore_latest(_abstract(state), step=step)
    assert _bits(restored) == _bits(leaves)
  saver.close()


def test_a_save_that_check_finds_ended_is_noted_in_the_folder(tmp_path):
  run_folder.write(tmp_path, run_folder.Run('train', 'id', 'digest'))
  saver = checkpoint.Checkpointer(tmp_path, keep=2)
  saver.save(1, _placed(x=np.ones(2, np.float32)), {}, waits=False)
  while saver.pending.step:
    saver.check()
  # Now: a process that is killed never waits for the save.
  assert run_folder.read(tmp_path).has_saved
  saver.close()


def _fingerprint_slowly(array):
  """Returns the fingerprint by Python integers, one word after another."""
  array = np.asarray(array)
  if array.dtype == bool:
    array = array.astype(np.uint8)
  word = f'u{min(array.dtype.itemsize, 4)}'
  words = np.ascontiguousarray(array).reshape(-1).view(word)
  weights = [i * 0x9E3779B1 % 2**32 | 1 for i in range(words.size)]
  return sum(int(x) * w for x, w in zip(words, weights)) % 2**32


def test_fingerprint_is_the_documented_sum_under_every_sharding():
  x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
  shardings = [
    NamedSharding(_mesh(*shape), spec)
    for shape in ((2, 4), (1, 8))
    for spec in (P(), P('fsdp'), P('data', 'fsdp'), P(None, 'fsdp'))
  ]
  arrays = [jax.device_put(x, sharding) for sharding in shardings]
  arrays += [
    np.arange(7, dtype=np.int32) - 3,
    x.astype(jnp.bfloat16),
    x > 0,
    np.int32(5),
    np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
  ]
  expected = [_fingerprint_slowly(y) for y in arrays]
  assert fingerprint.fingerprints(arrays) == expected


def test_fingerprint_misses_no_flipped_bit_and_no_swap():
  x = np.random.default_rng(1).normal(size=(6, 5)).astype(np.float32)
  (clean,) = fingerprint.fingerprints([x])
  words = x.view(np.uint32)
  for place in np.ndindex(x.shape):
    for bit in (0, 1, 15, 22, 30, 31):
      flipped = words.copy()
      flipped[place] ^= np.uint32(1 << bit)
      assert fingerprint.fingerprints([flipped.view(np.float32)]) != [clean]
  assert fingerprint.fingerprints([x[::-1].copy()]) != [clean]
  assert fingerprint.fingerprints([x[:, ::-1].copy()]) != [clean]


def _flip(path, where):
  data = bytearray(path.read_bytes())
  data[int(where * (len(data) - 1))] ^= 0x10
  path.write_bytes(data)


_DAMAGE = {
  'flip first': lambda path: _flip(path, 0.0),
  'flip middle': lambda path: _flip(path, 0.5),
  'truncate': lambda path: os.truncate(path, path.stat().st_size // 2),
  'delete': lambda path: path.unlink(),
}


# Each restoration takes a moment, so `make test` damages a file in one way.
@pytest.mark.parametrize(
  'kinds',
  [
    [*_DAMAGE],
    *(pytest.param([kind], marks=pytest.mark.slow) for kind in _DAMAGE),
  ],
  ids='-'.join,
)
def test_damage_to_any_file_is_never_loaded(tmp_path, kinds):
  origin = tmp_path / 'origin'
  _save(origin, 1, 2)
  newest = origin / 'checkpoints' / '2'
  files = [p for p in newest.rglob('*') if p.is_file() and p.stat().st_size]
  files.sort(key=lambda path: path.name)
  older, fell_back = _bits(_state(_mesh(2, 4), 1)), 0
  newer = _bits(_state(_mesh(2, 4), 2))
  saved_again = set()
  for number, file in enumerate(files):
    workdir = tmp_path / str(number)
    shutil.copytree(origin, workdir)
    damage = _DAMAGE[kinds[number % len(kinds)]]
    damage(workdir / file.relative_to(origin))
    step, state, host = _restore(workdir)
    # Some files are not needed to read; then the newest step is intact.
    assert _bits(state) == {1: older, 2: newer}[step], file
    assert host == {'kl': step / 10}
    fell_back += step == 1
    # The run goes on and saves this step again: tried once for each item of a
    # checkpoint and each outcome.
    outcome = (file.relative_to(newest).parts[0], step)
    if outcome not in saved_again:
      saved_again.add(outcome)
      _save(workdir, 2)
      assert _restore(workdir)[0] == 2, file
  assert fell_back >= 3


def test_each_damaged_step_is_one_line(tmp_path, caplog):
  _save(tmp_path, 1, 2, 3)
  folder, name = tmp_path / 'checkpoints', 'params.layers.w'

  def change(saved):
    saved['leaves'][name]['fingerprint'] ^= 1
    return saved

  _change_manifest(tmp_path, change)
  for path in (folder / '3').rglob('d/*'):
    _DAMAGE['truncate'](path)
  shutil.copytree(folder / '1', folder / '7')  # a copy under another number
  gc.collect()  # what earlier tests left behind may log as it is freed
  caplog.clear()
  step, state, _ = _restore(tmp_path)
  assert step == 1 and _bits(state) == _bits(_state(_mesh(2, 4), 1))
  lines = [record.getMessage() for record in caplog.records]
  for step, line in zip((7, 3, 2), lines, strict=True):
    assert f'checkpoint {step} is not valid' in line
    assert f'{step}.corrupt' in line
    assert (folder / f'{step}.corrupt').is_dir()
    assert not (folder / str(step)).exists()
  assert name in lines[2]


def _listing(folder):
  """Returns every path below the folder with its bytes."""
  return {
    str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
    for p in folder.rglob('*')
  }


def test_a_wrong_config_harms_no_checkpoint(tmp_path):
  state = _placed(a=np.arange(4, dtype=np.float32), b=np.ones(2, np.int32))
  saver = checkpoint.Checkpointer(tmp_path, keep=2)
  saver.save(1, state, {})
  saver.save(2, state, {})
  before = _listing(tmp_path)
  for leaves, expected in (
    ({'a': np.zeros(4, jnp.bfloat16)}, 'a: expected bfloat16[4], found float'),
    ({'a': np.ones((4, 1), 'f')}, 'a: expected float32[4,1], found float32[4]'),
    ({'c': np.zeros(2, np.int32)}, 'c: expected int32[2], found nothing'),
    ({'b': None}, 'b: expected nothing, found int32[2]'),
  ):
    with pytest.raises(checkpoint.OtherState) as caught:
      saver.restore_latest(state | _placed(**leaves))
    assert f'not fit this config: leaf {expected}' in str(caught.value)
    assert caught.value.exit_code == 2
  assert _listing(tmp_path) == before
  assert saver.restore_latest(state)[0] == 2


def test_only_corrupt_checkpoints_are_no_fresh_start(tmp_path):
  _save(tmp_path, 1)
  _flip(tmp_path / 'checkpoints' / '1' / 'manifest' / 'metadata', 0.5)
  # Each twice: the next start must not silently begin anew.
  for read_only in (True, True, False, False):
    name = 'left: 1$' if read_only else 'left: 1.corrupt; '
    with pytest.raises(checkpoint.CorruptCheckpoints, match=name) as caught:
      _restore(tmp_path, read_only=read_only)
    assert caught.value.exit_code == 3


def test_read_only_changes_nothing(tmp_path, caplog):
  _save(tmp_path, 1, 2)
  folder = tmp_path / 'checkpoints'
  # Orbax names a save under way so; opened for writing, it is swept away.
  under_way = folder / '3.orbax-checkpoint-tmp'
  shutil.copytree(folder / '1', under_way)
  _flip(folder / '2' / 'manifest' / 'metadata', 0.5)
  before = _listing(tmp_path)
  step, state, _ = _restore(tmp_path, read_only=True)
  assert step == 1 and _bits(state) == _bits(_state(_mesh(2, 4), 1))
  assert 'checkpoint 2 is not valid' in caplog.text
  assert _listing(tmp_path) == before
  _restore(tmp_path)
  assert not under_way.exists() and (folder / '2.corrupt').is_dir()


def test_a_full_disk_is_an_error_and_keeps_the_old_step(tmp_path, caplog):
  size = 1 << 18
  saver = checkpoint.Checkpointer(tmp_path, keep=2)
  x = np.random.default_rng(0).standard_normal(size, np.float32)
  state, other = _placed(x=x), _placed(x=x + 1)
  saver.save(1, state, {})
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
  try:
    with pytest.raises(pending_save.SaveFailed, match='step 2 could not be'):
      saver.save(2, other, {})
    # Beside the loop, the failure is told when the next step asks.
    saver.save(2, other, {}, waits=False)
    with pytest.raises(pending_save.SaveFailed, match='step 2 could not be'):
      while saver.pending.step:
        saver.check()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert not [record for record in caplog.records if record.exc_info]
  assert saver.steps() == [1] and saver.pending.saved == 1
  assert saver.restore_latest(state)[0] == 1
  saver.save(2, other, {})  # there is room again
  step, restored, _ = saver.restore_latest(state)
  assert step == 2
  assert np.array_equal(restored['x'], x + 1)


_SAVE_FOR_EVER = textwrap.dedent("""
    import itertools, sys
    import jax
    import numpy as np
    from stppo_jax.records.checkpoints import checkpoint
    saver = checkpoint.Checkpointer(sys.argv[1], keep=2)
    of_step = lambda step: jax.device_put(
      dict.fromkeys('xy', np.full(1 << 16, step, np.float32)), jax.devices()[0]
    )
    state = of_step(0)
    restored = saver.restore_latest(state)
    first = restored[0] + 1 if restored else 1
    print('ready', flush=True)
    for step in itertools.count(first):
      saver.save(step, of_step(step), {'step': step})
      print(step, flush=True)
""")


@pytest.mark.parametrize('kills', [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_only_complete_steps(tmp_path, kills):
  pauses = np.random.default_rng(0).uniform(0.0, 0.06, kills)
  saved = 0
  for pause in pauses:
    process = subprocess.Popen(
      [sys.executable, '-c', _SAVE_FOR_EVER, str(tmp_path)],
      stdout=subprocess.PIPE,
      text=True,
      cwd=_REPO,
    )
    assert process.stdout.readline() == 'ready\n'
    process.stdout.readline()  # at least one step each time
    time.sleep(pause)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    zeros = np.zeros(1 << 16, np.float32)
    target = _placed(x=zeros, y=zeros)
    saver = checkpoint.Checkpointer(tmp_path, keep=2)
    step, state, host = saver.restore_latest(target)
    assert step > saved and host == {'step': step}
    assert all(np.all(np.asarray(x) == step) for x in state.values())
    saved = step
    saver.close()
  saver = checkpoint.Checkpointer(tmp_path, keep=2)
  saver.save(saved + 1, state, {})  # first, what the kill has left is removed
  saver.close()
  names = [p.name for p in (tmp_path / 'checkpoints').iterdir()]
  assert not [name for name in names if not name.isdigit()], names


def test_a_subtree_is_read_alone(tmp_path):
  layout = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  one = np.arange(6, dtype=np.float32)
  with contextlib.closing(checkpoint.Checkpointer(tmp_path)) as saving:
    for step in (1, 2):
      state = _placed(policy={'w': one + step}, value={'w': one[:3]})
      saving.save(step, state, {'n': step})
  shape = {'w': jax.ShapeDtypeStruct((6,), jnp.float32, sharding=layout)}
  reading = checkpoint.Checkpointer(tmp_path, read_only=True)
  with contextlib.closing(reading):
    assert reading.steps() == [1, 2]
    for wanted, found in ((None, 2), (1, 1)):
      step, part, host = reading.restore_latest(
        shape, subtree='policy', step=wanted
      )
      assert (step, host) == (found, {'n': found})
      assert part.keys() == {'w'}
      np.testing.assert_array_equal(part['w'], one + found)
    assert reading.restore_latest(shape, subtree='policy', step=3) is None
    with pytest.raises(checkpoint.OtherState, match='leaf value.w: expected f'):
      reading.restore_latest(shape, subtree='value')
