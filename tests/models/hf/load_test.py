"""Loading weights: values, shardings, memory, and every error."""

import json
import os
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from stppo_jax.models.hf import config_json
from stppo_jax.models.hf import export
from stppo_jax.models.hf import families
from stppo_jax.models.hf import load
from stppo_jax.models.hf import weight_files
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from tests import processes
from tests.models import tiny

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_DENSE, _TIED = tiny.model(), tiny.model(tie_embeddings=True)
_MIXTURE = tiny.model(**tiny.MIXTURE)


def _tensors(model, dtype=np.float32):
  """Returns the tensors of a file of this model, by names spelled out here."""
  params = tiny.params(model)
  found = {}
  for entry in families.entries(model.config):
    leaf = params
    for key in entry.path:
      leaf = leaf[key]
    value = leaf[entry.index].astype(dtype)
    value = value.T if entry.transposed else value
    found[entry.hf_name] = np.ascontiguousarray(value)
  return found


def _write(folder, model, tensors, *, files=1):
  folder.mkdir(exist_ok=True)
  text = json.dumps(config_json.write(model.config))
  (folder / 'config.json').write_text(text)
  if files == 1:
    safetensors.numpy.save_file(tensors, folder / weight_files.SINGLE)
    return folder
  weight_map = {}
  for number in range(files):
    file = f'model-{number + 1:05d}-of-{files:05d}.safetensors'
    names = sorted(tensors)[number::files]
    part = {name: tensors[name] for name in names}
    safetensors.numpy.save_file(part, folder / file)
    weight_map |= dict.fromkeys(names, file)
  text = json.dumps({'weight_map': weight_map})
  (folder / weight_files.INDEX).write_text(text)
  return folder


def _equal(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('dtype', [np.float32, np.float16])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path, bad, dtype):
  tensors = _tensors(_DENSE, dtype)
  name = 'model.layers.1.mlp.up_proj.weight'
  tensors[name][-1, -1] = bad
  _write(tmp_path, _DENSE, tensors)
  with pytest.raises(ValueError, match=f'{name} has a value that is not finit'):
    load.read_params(tmp_path, _DENSE.config)


@pytest.mark.parametrize('change', [0.0, 1.0])
def test_an_unused_head_that_differs_is_said(tmp_path, caplog, change):
  tensors = _tensors(_TIED)
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight'] + change
  tensors['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.ones(4)
  _write(tmp_path, _TIED, tensors)
  load.check_weights(tmp_path, _TIED.config)
  _equal(load.read_params(tmp_path, _TIED.config), tiny.params(_TIED))
  said = [record.getMessage() for record in caplog.records]
  assert said == [
    f'{tmp_path}: lm_head.weight differs from model.embed_tokens.weight and is '
    'not used, because config.json says tie_word_embeddings=true'
  ] * bool(change)


@pytest.mark.parametrize('dtype', [ml_dtypes.bfloat16, np.float16])
def test_weights_of_any_dtype_become_float32(tmp_path, dtype):
  _write(tmp_path, _DENSE, _tensors(_DENSE, dtype), files=3)
  params = load.read_params(tmp_path, _DENSE.config)
  rounded = lambda x: x.astype(dtype).astype(np.float32)
  _equal(params, jax.tree.map(rounded, tiny.params(_DENSE)))
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype('f4')}


# Slices: whole leaves; some layers or rows; pieces of a layer; single numbers.
@pytest.mark.parametrize(
  ('sizes', 'model', 'block_bytes'),
  [
    ((8, 1, 1), _DENSE, 2**24),
    ((2, 2, 2), _MIXTURE, 200),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        ((8, 1, 1), _MIXTURE, 1500),
        ((2, 2, 2), _DENSE, 200),
        ((2, 2, 2), _MIXTURE, 1500),
        ((2, 2, 2), _MIXTURE, 2**24),
      )
    ),
  ],
)
def test_leaves_are_read_into_their_shardings(
  tmp_path, monkeypatch, model, sizes, block_bytes
):
  _write(tmp_path, model, _tensors(model), files=2)
  monkeypatch.setattr(weight_files, 'SLICE_BYTES', block_bytes)
  mesh = mesh_lib.make_mesh(**dict(zip(('data', 'fsdp', 'tensor'), sizes)))
  layout = sharding.param_shardings(tiny.params(model), mesh)
  params = load.load_params(tmp_path, model.config, layout)
  _equal(params, tiny.params(model))
  assert jax.tree.map(lambda leaf: leaf.sharding, params) == layout


def test_loaded_weights_can_be_donated(tmp_path):
  # An array on the host's memory is copied by the program that consumes it.
  _write(tmp_path, _DENSE, _tensors(_DENSE))
  mesh = mesh_lib.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
  layout = sharding.param_shardings(tiny.params(_DENSE), mesh)
  params = load.load_params(tmp_path, _DENSE.config, layout)
  places = lambda tree: [
    leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)
  ]
  before = places(params)
  keep = jax.jit(lambda tree: tree, donate_argnums=0)
  assert places(keep(params)) == before


@pytest.mark.parametrize(
  ('changes', 'expected'),
  [
    ({'model.norm.weight': None}, 'missing tensors model.norm.weight'),
    ({'model.extra': np.zeros(2)}, 'unexpected tensors model.extra'),
    (
      # No kernel is square, so that a transposed one has another shape.
      {'model.layers.1.mlp.up_proj.weight': np.zeros((16, 24), np.float32)},
      r'up_proj.weight has shape \(16, 24\), expected \(24, 16\)',
    ),
    ({'model.norm.weight': np.zeros(16, np.int8)}, 'model.norm.weight .* I8'),
    ({name: np.zeros(0) for name in _tensors(_DENSE)}, 'and 51 more$'),
  ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, changes, expected):
  tensors = _tensors(_DENSE) | changes
  there = {name: x for name, x in tensors.items() if x is not None}
  _write(tmp_path, _DENSE, there)
  with pytest.raises(ValueError, match=expected) as caught:
    load.check_weights(tmp_path, _DENSE.config)
  assert '\n' not in str(caught.value)


# Prints by how much the peak of anonymous memory exceeds the parameters, as a
# share of the largest file. Memory that does not grow with the model is
# allocated before.
_MEASURE = """
import pathlib, re, sys, threading, time
import jax
from stppo_jax.models.hf import load as load_hf
from stppo_jax.models import functional
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding

def anonymous():
  text = pathlib.Path('/proc/self/status').read_text()
  return 1024 * int(re.search(r'RssAnon:\\s+(\\d+) kB', text).group(1))

def watch():
  while True:
    peaks.append(anonymous())
    time.sleep(0.002)

def load(folder):
  config = load_hf.read_config(
    folder, dtype='float32', remat='none', scan_unroll=1
  )
  model = functional.Model(config, 'vocabulary')
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  layout = sharding.param_shardings(shapes, mesh)
  return load_hf.load_params(folder, config, layout)

small, large = map(pathlib.Path, sys.argv[1:])
mesh = mesh_lib.make_mesh(data=1, fsdp=-1, tensor=1)
load(small)
before, peaks = anonymous(), []
threading.Thread(target=watch, daemon=True).start()
params = load(large)
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
file = max(path.stat().st_size for path in large.glob('*.safetensors'))
print((max(peaks) - before - size) / file)
print((anonymous() - before) / size)
"""


def _large(folder, num_layers, hidden_size):
  """Writes a bfloat16 model of constants and returns the bytes of its file."""
  model = tiny.model(
    vocab_size=8 * hidden_size,
    hidden_size=hidden_size,
    intermediate_size=4 * hidden_size,
    num_layers=num_layers,
  )
  params = jax.tree.map(
    lambda x: np.broadcast_to(np.float32(0.5), x.shape), model.abstract_params
  )
  export.export(folder, model.config, params, dtype='bfloat16')
  return (folder / weight_files.SINGLE).stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize('num_devices', [1, 4])
def test_little_memory_is_needed_beside_the_parameters(tmp_path, num_devices):
  _large(tmp_path / 'small', 2, 64)
  size = _large(tmp_path / 'large', 5, 1024)
  assert size > 150e6
  environment = os.environ | {'JAX_NUM_CPU_DEVICES': str(num_devices)}
  words = '-c', _MEASURE, tmp_path / 'small', tmp_path / 'large'
  done = processes.python(*words, env=environment)
  assert done.returncode == 0, done.stderr
  excess, kept = map(float, done.stdout.split())
  assert excess <= 0.3
  # The parameters are counted, because they are neither mapped nor shared.
  assert 0.99 < kept
