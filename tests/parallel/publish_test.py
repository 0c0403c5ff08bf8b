"""Weights go from the layout of training to that of decoding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import publish
from stppo_jax.parallel import sharding
from stppo_jax.parallel import topology
from stppo_jax.tools.plan import hlo
from stppo_jax.tools.plan import hlo_cost

_LAYERS = 2
_PLACES = tuple(('layers', n) for n in range(_LAYERS))
# Data, fsdp and tensor of training, and tensor of decoding.
_LAYOUTS = [
  (1, 8, 1, 1),
  (1, 8, 1, 4),
  (2, 4, 1, 2),
  (8, 1, 1, 4),
  (1, 2, 4, 4),
  (1, 2, 4, 2),
  (1, 4, 2, 4),
  (2, 2, 2, 8),
]
_FAST = ((1, 8, 1, 4), (1, 2, 4, 2), (2, 2, 2, 8))


def _placement(data, fsdp, tensor, decoding):
  mesh = mesh_lib.make_mesh(data=data, fsdp=fsdp, tensor=tensor)
  return publish.Placement(mesh, decoding)


def _params(mesh):
  """Returns weights of two layers in the layout of training."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  params = {
    'embedding': draw(32, 64),
    'layers': {
      'q_proj': {'kernel': draw(_LAYERS, 64, 32), 'bias': draw(_LAYERS, 32)},
      'down_proj': {'kernel': draw(_LAYERS, 96, 64)},
      'mlp_norm': {'scale': draw(_LAYERS, 64)},
    },
  }
  return jax.device_put(params, sharding.param_shardings(params, mesh))


@jax.jit
def _copied(params):
  return jax.tree.map(jnp.copy, params)


def _cut(params):
  """Returns weights, as numpy arrays, with a tree for each layer."""
  params = jax.device_get(params)
  layer = lambda n: jax.tree.map(lambda x: x[n], params['layers'])
  return {**params, 'layers': tuple(layer(n) for n in range(_LAYERS))}


def _published(placement, params):
  """Returns weights of decoding, which equal those of training."""
  published = publish.Publisher(placement, _copied, places=_PLACES)(params)
  jax.tree.map(np.testing.assert_array_equal, published, _cut(params))
  meshes = {x.sharding.mesh for x in jax.tree.leaves(published)}
  assert meshes == {placement.mesh}
  return published


def _shard(x):
  return x.sharding.shard_shape(x.shape)


# What is sent differs by the layout, and is read from every program below.
@pytest.mark.parametrize(
  'layout',
  [
    pytest.param(layout, marks=() if layout in _FAST else pytest.mark.slow)
    for layout in _LAYOUTS
  ],
)
def test_published_weights_equal_the_trained_ones(layout):
  placement = _placement(*layout)
  published = _published(placement, _params(placement.training))
  decoding = layout[-1]
  assert placement.mesh.axis_names == mesh_lib.AXES
  assert placement.mesh.devices.shape == (8 // decoding, 1, 1, decoding)
  layer = published['layers'][1]
  assert _shard(published['embedding']) == (32 // decoding, 64)
  assert _shard(layer['q_proj']['kernel']) == (64, 32 // decoding)
  assert _shard(layer['down_proj']['kernel']) == (96 // decoding, 64)
  assert _shard(layer['mlp_norm']['scale']) == (64,)


@pytest.mark.parametrize(('fsdp', 'decoding'), [(4, 2), (4, 1), (1, 1)])
def test_devices_that_only_collect_get_the_weights(fsdp, decoding):
  devices = jax.devices()
  mesh = mesh_lib.make_mesh(data=1, fsdp=fsdp, tensor=1, devices=devices[:fsdp])
  placement = publish.Placement(mesh, decoding, tuple(devices[4:]))
  published = _published(placement, _params(mesh))
  assert placement.mesh.devices.flatten().tolist() == devices[4:]
  kernel = published['layers'][1]['q_proj']['kernel']
  assert _shard(kernel) == (64, 32 // decoding)


@pytest.mark.parametrize('layout', _LAYOUTS)
def test_devices_send_what_the_formula_says(layout):
  placement = _placement(*layout)
  params = _params(placement.training)
  publisher = publish.Publisher(placement, _copied, places=_PLACES)
  data, fsdp, tensor, decoding = layout
  matrices = [
    4 * x.size // (_LAYERS if x.ndim == 3 else 1)
    for x in jax.tree.leaves(params)
    for _ in range(_LAYERS if x.ndim == 3 else 1)
    if x.size > 64 * _LAYERS
  ]
  # Training may have several devices for one of decoding along `tensor`, or one
  # for several, of which some are along `fsdp` and the others along `data`.
  by_fsdp = math.gcd(max(decoding // tensor, 1), fsdp)
  by_data = max(decoding // tensor, 1) // by_fsdp
  assert data % by_data == 0
  rows = fsdp // by_fsdp * max(tensor // decoding, 1)
  exchanged = (1 - 1 / by_fsdp) / (fsdp * tensor * by_data)
  expected = sum(matrices) * (exchanged + (1 - 1 / rows) / decoding)
  found, sent = [], 0
  for part, count in publisher.parts(params):
    copy, _ = publisher.program(part)
    text = copy.lower(part, 0).compile().as_text()
    found += hlo_cost.collectives(hlo.read(text))
    sent += count * sum(x.sent for x in hlo_cost.collectives(hlo.read(text)))
  assert sent == pytest.approx(expected, rel=0.03)
  # No device holds a whole matrix of which it needs a part.
  largest = max(matrices) / decoding
  assert all(collective.size <= largest for collective in found)


# Data, fsdp, expert and tensor of training, and tensor of decoding.
@pytest.mark.parametrize(
  'layout',
  [
    (1, 2, 4, 1, 2),
    pytest.param((2, 1, 4, 1, 4), marks=pytest.mark.slow),
    (1, 2, 2, 2, 4),
    pytest.param((1, 1, 8, 1, 1), marks=pytest.mark.slow),
  ],
)
def test_experts_of_all_devices_are_published(layout):
  *axes, decoding = layout
  sizes = dict(zip(mesh_lib.AXES, axes))
  placement = publish.Placement(mesh_lib.make_mesh(**sizes), decoding)
  rng = np.random.default_rng(0)
  kernel = lambda *shape: {
    'kernel': rng.standard_normal((_LAYERS, *shape), np.float32)
  }
  moe = {'gate_proj': kernel(8, 64, 32), 'down_proj': kernel(8, 32, 64)}
  params = {'layers': {'moe': moe, 'q_proj': kernel(64, 32)}}
  params = jax.device_put(
    params, sharding.param_shardings(params, placement.training)
  )
  published = _published(placement, params)
  down = published['layers'][1]['moe']['down_proj']['kernel']
  assert _shard(down) == (8, 32 // decoding, 64)
  publisher = publish.Publisher(placement, _copied, places=_PLACES)
  copy, _ = publisher.program(params)
  text = copy.lower(params, 0).compile().as_text()
  # The formula of docs/sharding.md; the mesh cuts weights over `parts`.
  parts = sizes['fsdp'] * sizes['expert'] * sizes['tensor']
  columns = decoding // sizes['tensor']
  size = sum(x.nbytes for x in jax.tree.leaves(params)) / _LAYERS
  sent = (1 - 1 / columns) / parts + (1 - decoding / parts) / decoding
  found = hlo_cost.collectives(hlo.read(text))
  assert sum(x.sent for x in found) == pytest.approx(size * sent, rel=0.03)


@pytest.mark.parametrize(
  ('axes', 'collecting', 'decoding', 'expected'),
  [
    ((1, 8, 1), 0, 3, 'must divide the 8 devices of this host'),
    ((4, 1, 1), 3, 2, 'must divide the 3 devices of this host that collect'),
    ((3, 1, 1), 4, 2, 'must divide the 3 devices of this host that learn'),
    ((1, 2, 3), 0, 2, 'must divide mesh.tensor=3, or be that number'),
  ],
)
def test_devices_that_cannot_be_cut_are_refused(
  axes, collecting, decoding, expected
):
  devices = jax.devices()
  sizes = dict(zip(('data', 'fsdp', 'tensor'), axes))
  learning = devices[: math.prod(axes)]
  mesh = mesh_lib.make_mesh(**sizes, devices=learning)
  with pytest.raises(ValueError, match=expected):
    publish.Placement(mesh, decoding, tuple(devices[8 - collecting :]))


def test_a_plan_places_the_engine_on_the_last_host():
  chips = topology.virtual(topology.find('v5e:4x4'))
  mesh = mesh_lib.make_mesh(data=2, fsdp=8, tensor=1, devices=chips)
  for host in (0, 3):
    placement = publish.Placement(mesh, 2, host=host)
    hosts = {chip.process_index for chip in placement.mesh.devices.flat}
    assert hosts == {host} and placement.mesh.shape['tensor'] == 2


def test_a_stack_without_adapters_is_published_as_nothing():
  mesh = mesh_lib.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
  params = {'layers': {'mlp_norm': {'scale': np.arange(6.0).reshape(2, 3)}}}
  places = [('layers', 0), ('dense_layers', 0), ('layers', 1)]
  publisher = publish.Publisher(
    publish.Placement(mesh, 1), _copied, places=places
  )
  first, dense, last = publisher(params)['layers']
  assert dense == {}
  np.testing.assert_array_equal(first['mlp_norm']['scale'], [0, 1, 2])
  np.testing.assert_array_equal(last['mlp_norm']['scale'], [3, 4, 5])
