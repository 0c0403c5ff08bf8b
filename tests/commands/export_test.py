"""`export` as users call it: any checkpoint of a run, and every error."""

import builtins
import json
import os
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from stppo_jax import __main__
from stppo_jax.models.hf import load
from stppo_jax.training import checkpoint_state
from tests.training import runs


def _export(*flags):
  return __main__.main(['export', *flags])


def _tensors(folder):
  return safetensors.numpy.load_file(folder / 'model.safetensors')


def test_the_newest_checkpoint_is_the_policy_of_the_finished_run(
  finished, tmp_path, capsys
):
  out = tmp_path / 'deep' / 'out'
  assert _export(f'--workdir={finished}', f'--out={out}') == 0
  assert (
    f'{out}: the policy after step {runs.STEPS}, float32'
    in capsys.readouterr().out
  )
  theirs = finished / 'policy'
  assert {p.name for p in out.iterdir()} == {p.name for p in theirs.iterdir()}
  for path in theirs.iterdir():
    assert (out / path.name).read_bytes() == path.read_bytes(), path.name


def test_an_earlier_step_in_bfloat16(finished, tmp_path):
  flags = [
    f'--workdir={finished}',
    f'--out={tmp_path}',
    f'--step={runs.STEPS - 1}',
  ]
  assert _export(*flags) == 0
  whole = _tensors(tmp_path)
  newest = _tensors(finished / 'policy')
  assert any((whole[name] != newest[name]).any() for name in whole)
  assert _export(*flags, '--dtype=bfloat16') == 0  # in place of the other
  rounded = _tensors(tmp_path)
  for name, value in whole.items():
    assert rounded[name].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(
      rounded[name], value.astype(ml_dtypes.bfloat16)
    )
  config = json.loads((tmp_path / 'config.json').read_text())
  assert config['torch_dtype'] == 'bfloat16'
  runtime = {'dtype': 'float32', 'remat': 'none', 'scan_unroll': 1}
  assert load.read_config(tmp_path, **runtime) == load.read_config(
    finished / 'policy', **runtime
  )


def _copy(finished, folder, **changes):
  """Copies the folder of the run and changes its config; None deletes a key."""
  shutil.copytree(finished, folder)
  path = folder / 'config.json'
  config = json.loads(path.read_text())
  for key, value in changes.items():
    *sections, name = key.split('__')
    section = config
    for each in sections:
      section = section[each]
    section[name] = value
    if value is None:
      del section[name]
  path.write_text(json.dumps(config))
  return folder


@pytest.mark.parametrize(
  'changes',
  [
    {  # as an earlier version records it
      'rollout__tensor': None,
      'rollout__cache_dtype': None,
      'algorithm__advantage__critic_tokens': None,
      'rollout__key_of_an_earlier_version': 1,
    },
    {
      'env__prompt_template': '/absent',
      'model__reference_path': '/absent',
      'model__reference_memory': 'host',
      'model__attention': 'cudnn',
      'writer__samples': 'none',
      'mesh__fsdp': 3,
    },
  ],
)
def test_keys_that_an_export_does_not_read_may_be_anything(
  finished, tmp_path, changes
):
  run, out = _copy(finished, tmp_path / 'run', **changes), tmp_path / 'out'
  assert _export(f'--workdir={run}', f'--out={out}') == 0
  name = 'model.safetensors'
  assert (out / name).read_bytes() == (finished / 'policy' / name).read_bytes()


def test_a_source_that_has_moved_is_named(finished, tmp_path, refused):
  run = _copy(finished, tmp_path / 'run', model__path='/absent')
  flags = [f'--workdir={run}', f'--out={tmp_path}/out']
  err = refused('export', *flags)
  assert err.startswith("config.model.path='/absent': no such folder; ")
  assert err.endswith('; if it has moved: --model=DIR\n')
  err = refused('export', *flags, '--model=/nowhere')
  assert err == '--model=/nowhere: no such folder\n'
  source = tmp_path / 'source'
  shutil.copytree(finished / 'policy', source)
  # All weights that are exported are in the checkpoint. Keys that are read are
  # checked.
  (source / 'model.safetensors').unlink()
  assert _export(*flags, f'--model={source}') == 0
  theirs = (finished / 'policy' / 'model.safetensors').read_bytes()
  assert (tmp_path / 'out' / 'model.safetensors').read_bytes() == theirs
  run = _copy(finished, tmp_path / 'other', model__num_layers='two')
  err = refused('export', f'--workdir={run}', f'--out={tmp_path}/new')
  assert err == "config.model.num_layers='two': must be of type int\n"


@pytest.fixture(scope='module')
def based(finished, tmp_path_factory):
  """Returns (model, the folder of a run that starts from it)."""
  folder = tmp_path_factory.mktemp('based')
  model = shutil.copytree(finished / 'policy', folder / 'models' / 'M')
  (model / 'export.json').unlink()  # as it is downloaded
  return model, _copy(finished, folder / 'run', model__path=str(model))


def test_an_export_replaces_nothing_that_the_run_reads(
  based, tmp_path, refused
):
  model, run = based
  before = {path: path.read_bytes() for path in model.iterdir()}
  start = shutil.copytree(run / 'policy', run / 'start' / 'policy')
  for out, expected in (
    (model, f'is {model}, the folder of model.path'),
    (model.parent, f'holds {model}, the folder of model.path'),
    (run, f'is {run}, the folder of --workdir'),
    (run.parent, 'holds '),
    (start, f'is {start}, the folder of the supervised start'),
    (start.parent, f'holds {start}, the folder of the supervised start'),
    (run / 'checkpoints', 'is not empty and was not written by export'),
  ):
    err = refused('export', f'--workdir={run}', f'--out={out}')
    assert err.startswith(f'--out={out}: {expected}')
  moved = shutil.copytree(model, tmp_path / 'moved')
  flags = ['export', f'--workdir={run}', f'--out={moved}']
  line = f'is {moved}, the folder of --model'
  assert line in refused(*flags, f'--model={moved}')
  # A model that the run does not read is one of others.
  assert 'was not written by export' in refused(*flags)
  assert {path: path.read_bytes() for path in model.iterdir()} == before
  # Beside what the run has left there is room.
  assert _export(f'--workdir={run}', f'--out={run}/exported') == 0


@pytest.mark.parametrize(
  ('width', 'shared'), [(16, 8), (12, 6), (7, 7), (11, 1), (10, 5)]
)
def test_as_many_devices_share_a_policy_as_divide_its_width(width, shared):
  assert checkpoint_state.mesh_for_width(width).shape['fsdp'] == shared


def test_a_full_disk_is_a_line_and_75(finished, tmp_path, capsys, monkeypatch):
  opened = open

  def on_a_full_disk(path, *args, **options):
    is_new = pathlib.Path(path).is_relative_to(tmp_path)
    return opened('/dev/full' if is_new else path, *args, **options)

  monkeypatch.setattr(builtins, 'open', on_a_full_disk)
  assert _export(f'--workdir={finished}', f'--out={tmp_path}/out') == 75
  err = capsys.readouterr().err
  assert 'No space left on device' in err and err.count('\n') == 1
  assert os.listdir(tmp_path) == []
