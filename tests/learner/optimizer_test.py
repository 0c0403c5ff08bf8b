"""An optimiser step equals the chain of optax: clip, AdamW, warm-up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stppo_jax.learner import optimizer
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from tests import compilations
from tests.learner import trees
from tests.models import tiny

_NAME = {'name': 'adamw'}
_ADAM = {'b1': 0.8, 'b2': 0.95, 'eps': 1e-6}
_NUMBERS = optimizer.Hyperparameters(
  learning_rate=0.1,
  warmup_updates=4.0,
  weight_decay=0.3,
  max_grad_norm=1.0,
  skip_grad_norm=np.inf,
)


def _tree(rng, scale=1.0):
  return {
    'a': (scale * rng.normal(size=(3, 4))).astype(np.float32),
    'b': {'c': (scale * rng.normal(size=5)).astype(np.float32)},
  }


def _assert_close(actual, expected, tolerance=1e-6):
  trees.assert_close(actual, expected, tolerance, tolerance)


@functools.cache
def _jitted():
  adam, numbers = optimizer.from_config(_NAME | _ADAM | _NUMBERS._asdict())
  assert numbers == _NUMBERS
  return adam, jax.jit(functools.partial(optimizer.apply_gradient, adam))


def test_several_steps_are_those_of_optax():
  rng = np.random.default_rng(0)
  params = expected = _tree(rng)
  adam, step = _jitted()
  state = jax.jit(adam.init)(params)
  reference = optax.chain(
    optax.clip_by_global_norm(_NUMBERS.max_grad_norm),
    optax.adamw(
      lambda count: 0.1 * jnp.minimum(1.0, (count + 1) / 4),
      weight_decay=_NUMBERS.weight_decay,
      **_ADAM,
    ),
  )
  reference_state = jax.jit(reference.init)(expected)
  update = jax.jit(reference.update)
  # Above and below the norm that is clipped, and past the warm-up.
  for count, scale in enumerate([1.0, 0.01, 30.0, 0.1, 2.0, 0.001]):
    gradient = _tree(rng, scale)
    before, count = params, np.int32(count)
    params, state, report = step(params, state, gradient, count, _NUMBERS)
    changes, reference_state = update(gradient, reference_state, expected)
    expected = jax.tree.map(np.add, expected, changes)
    _assert_close(params, expected)
    assert not np.allclose(before['a'], params['a'], atol=1e-4)
    norm = trees.norm(gradient)
    np.testing.assert_allclose(report['grad_norm'], norm, rtol=1e-6)
    np.testing.assert_allclose(
      report['lr'], 0.1 * min(1, (count + 1) / 4), rtol=1e-6
    )


def test_other_numbers_do_not_recompile():
  rng = np.random.default_rng(1)
  params, gradient = _tree(rng), _tree(rng)
  adam, step = _jitted()
  state, count = jax.jit(adam.init)(params), np.int32(0)
  step(params, state, gradient, count, _NUMBERS)
  with compilations.counted() as programs:
    still, _, _ = step(
      params, state, gradient, count, _NUMBERS._replace(learning_rate=0.0)
    )
    moved, _, report = step(
      params, state, gradient, count, _NUMBERS._replace(warmup_updates=0.0)
    )
  assert not programs
  trees.assert_equal(still, params)
  assert report['lr'] == np.float32(0.1)
  assert np.abs(np.subtract(moved['a'], params['a'])).max() > 0.05


def _of_config(name, **adam):
  section = _ADAM | {'name': name} | _NUMBERS._asdict() | adam
  return optimizer.from_config(section)[0]


def test_rounding_is_right_on_average():
  low = float(jnp.bfloat16(1.3))
  x = np.full(200_000, low * (1 + 2**-10), np.float32)
  exact = np.array([0.0, -2.5, np.inf, np.nan], np.float32)
  rounded = jax.jit(optimizer.round_stochastically)
  found = np.float64(rounded(np.append(x, exact), jax.random.key(1)))
  steps = (found[:-4] - low) / 2**-7
  assert set(steps) == {0, 1}
  share = (x[0] - low) / 2**-7
  np.testing.assert_allclose(steps.mean(), share, atol=4 * 0.5 / 200_000**0.5)
  np.testing.assert_array_equal(found[-4:], exact)


def test_small_moments_follow_those_of_float32():
  gradients = np.random.default_rng(3).normal(size=(300, 64, 64))
  # After large gradients, the squares decay by a thousandth in each update.
  gradients[100:] *= 0.1

  def last(name):
    """Returns the state after all updates."""
    adam = _of_config(name, b1=0.9, b2=0.999)
    step = lambda state, gradient: (adam.update(gradient, state)[1], None)
    run = jax.jit(
      lambda gradients: jax.lax.scan(
        step, adam.init({'a': gradients[0]}), {'a': gradients}
      )[0]
    )
    return jax.device_get(run(gradients.astype(np.float32)))

  small, exact = last('adamw_bfloat16'), last('adamw')
  assert small.nu['a'].dtype == small.mu['a'].dtype == jnp.bfloat16
  assert small.count == exact.count == 300
  ratio = np.mean(np.float32(small.nu['a'])) / np.mean(exact.nu['a'])
  np.testing.assert_allclose(ratio, 1.0, atol=0.01)


def test_states_have_the_size_that_they_promise():
  params = {'layers': {'kernel': jax.ShapeDtypeStruct((4, 256, 512), 'f4')}}
  size = lambda name: sum(
    x.size * x.dtype.itemsize
    for x in jax.tree.leaves(jax.eval_shape(_of_config(name).init, params))
    if x.ndim
  )
  weights = 4 * 4 * 256 * 512
  assert size('adamw') == 2 * weights
  assert size('adamw_bfloat16') == weights
  assert size('adafactor') < 0.01 * weights
  assert size('muon') == weights + 12  # with the three numbers of an iteration


def test_adafactor_is_that_of_optax():
  rng = np.random.default_rng(4)
  params = {'a': rng.normal(size=(2, 130, 140)).astype(np.float32)}
  ours = _of_config('adafactor')
  # Its learning rate is 1, and its updates are those to add.
  theirs = optax.adafactor(1.0, multiply_by_parameter_scale=False)
  state, reference = (jax.jit(x.init)(params) for x in (ours, theirs))
  update, twin = jax.jit(ours.update), jax.jit(theirs.update)
  for _ in range(3):
    gradient = {'a': rng.normal(size=(2, 130, 140)).astype(np.float32)}
    direction, state = update(gradient, state, params)
    wanted, reference = twin(gradient, reference, params)
    _assert_close(direction, jax.tree.map(np.negative, wanted))


def _orthogonal(x):
  """Returns a matrix with singular values near 1, by a loop, in float64."""
  x = x / np.linalg.norm(x)
  for _ in range(5):
    square = x @ x.T
    x = 3.4445 * x - (4.775 * square - 2.0315 * square @ square) @ x
  return x


def test_muon_is_a_loop_over_matrices_and_nadam():
  rng = np.random.default_rng(5)
  shapes = {'kernel': (3, 5, 7), 'experts': (2, 2, 9, 4), 'embedding': (6, 4)}
  tree = lambda: {
    n: rng.normal(size=x).astype(np.float32) for n, x in shapes.items()
  }
  params, ours = tree(), _of_config('muon')
  theirs = optax.scale_by_adam(**_ADAM, nesterov=True)
  state, reference = (jax.jit(x.init)(params) for x in (ours, theirs))
  update, twin = jax.jit(ours.update), jax.jit(theirs.update)
  means = {name: 0.0 for name in shapes}
  for count in range(1, 4):
    gradient = tree()
    direction, state = update(gradient, state, params)
    wanted, reference = twin(gradient, reference)
    _assert_close(direction['embedding'], wanted['embedding'], 1e-5)
    for name in ('kernel', 'experts'):
      g = np.float64(gradient[name])
      means[name] = 0.95 * means[name] + 0.05 * g
      ahead = 0.95 * means[name] / (1 - 0.95 ** (count + 1))
      ahead += 0.05 * g / (1 - 0.95**count)
      *_, rows, columns = g.shape
      found = np.asarray(direction[name]).reshape(-1, rows, columns)
      for matrix, x in zip(found, ahead.reshape(found.shape), strict=True):
        expected = 0.2 * max(rows, columns) ** 0.5 * _orthogonal(x)
        np.testing.assert_allclose(matrix, expected, rtol=0, atol=1e-4)
        assert 0.1 < np.sqrt(np.mean(matrix**2)) < 0.25


@pytest.mark.slow
def test_muon_on_devices_is_that_of_one():
  model = tiny.model(**tiny.MIXED, vocab_size=16)
  params, gradient = tiny.params(model), tiny.params(model, 3)
  section = _ADAM | {'name': 'muon'} | _NUMBERS._asdict()

  def directions(mesh, params, gradient):
    muon, _ = optimizer.from_config(section)
    state = jax.jit(muon.init)(params)
    layout = None
    if mesh is not None:
      layout = sharding.param_shardings((params, state), mesh)
      params, state = jax.device_put((params, state), layout)
      gradient = jax.device_put(gradient, layout[0])
    update = jax.jit(muon.update, out_shardings=layout)
    _, state = update(gradient, state, params)
    return update(gradient, state, params)[0]

  mesh = mesh_lib.make_mesh(data=1, fsdp=2, expert=2, tensor=2)
  _assert_close(
    directions(mesh, params, gradient),
    directions(None, params, gradient),
    2e-5,
  )
