"""An optimiser step equals the chain of optax: clip, AdamW, warm-up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stppo_jax.learner import optimizer
from tests import compilations

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
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, tolerance, tolerance),
    actual,
    expected,
  )


@functools.cache
def _jitted():
  adam, numbers = optimizer.from_config(_NAME | _ADAM | _NUMBERS._asdict())
  assert numbers == _NUMBERS
  return adam, jax.jit(functools.partial(optimizer.apply_gradient, adam))


def test_several_steps_are_those_of_optax():
  rng = np.random.default_rng(0)
  params = expected = _tree(rng)
  adam, step = _jitted()
  state = adam.init(params)
  reference = optax.chain(
    optax.clip_by_global_norm(_NUMBERS.max_grad_norm),
    optax.adamw(
      lambda count: 0.1 * jnp.minimum(1.0, (count + 1) / 4),
      weight_decay=_NUMBERS.weight_decay,
      **_ADAM,
    ),
  )
  reference_state = reference.init(expected)
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
    norm = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(report['grad_norm'], norm, rtol=1e-6)
    np.testing.assert_allclose(
      report['lr'], 0.1 * min(1, (count + 1) / 4), rtol=1e-6
    )


def test_other_numbers_do_not_recompile():
  rng = np.random.default_rng(1)
  params, gradient = _tree(rng), _tree(rng)
  adam, step = _jitted()
  state, count = adam.init(params), np.int32(0)
  step(params, state, gradient, count, _NUMBERS)
  with compilations.counted() as programs:
    still, _, _ = step(
      params, state, gradient, count, _NUMBERS._replace(learning_rate=0.0)
    )
    moved, _, report = step(
      params, state, gradient, count, _NUMBERS._replace(warmup_updates=0.0)
    )
  assert not programs
  jax.tree.map(np.testing.assert_array_equal, still, params)
  assert report['lr'] == np.float32(0.1)
  assert np.abs(moved['a'] - params['a']).max() > 0.05


def _of_config(name, **adam):
  section = _ADAM | {'name': name} | _NUMBERS._asdict() | adam
  return optimizer.from_config(section)[0]


def test_rounding_is_right_on_average():
  low = float(jnp.bfloat16(1.3))
  x = np.full(200_000, low * (1 + 2**-10), np.float32)
  found = optimizer.round_stochastically(x, jax.random.key(1))
  steps = (np.asarray(found, np.float64) - low) / 2**-7
  assert set(steps) == {0, 1}
  share = (x[0] - low) / 2**-7
  np.testing.assert_allclose(steps.mean(), share, atol=4 * 0.5 / 200_000**0.5)
  exact = jnp.array([0.0, -2.5, np.inf, np.nan])
  found = optimizer.round_stochastically(exact, jax.random.key(2))
  np.testing.assert_array_equal(found.astype(jnp.float32), exact)


def test_small_moments_follow_those_of_float32():
  rng = np.random.default_rng(3)
  params = {'a': np.zeros((64, 64), np.float32)}
  directions, states = {}, {}
  for name in ('adamw', 'adamw_bfloat16'):
    adam = _of_config(name, b1=0.9, b2=0.999)
    state, update = adam.init(params), jax.jit(adam.update)
    # After large gradients, the squares decay by a thousandth in each update.
    for n in range(300):
      gradient = {'a': rng.normal(size=(64, 64)).astype(np.float32)}
      size = 1.0 if n < 100 else 0.1
      directions[name], state = update(
        jax.tree.map(lambda g: size * g, gradient), state
      )
    states[name] = state
  small, exact = states['adamw_bfloat16'], states['adamw']
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


def test_adafactor_is_that_of_optax():
  rng = np.random.default_rng(4)
  params = {'a': rng.normal(size=(2, 130, 140)).astype(np.float32)}
  ours = _of_config('adafactor')
  # Its learning rate is 1, and its updates are those to add.
  theirs = optax.adafactor(1.0, multiply_by_parameter_scale=False)
  state, reference = ours.init(params), theirs.init(params)
  for _ in range(3):
    gradient = {'a': rng.normal(size=(2, 130, 140)).astype(np.float32)}
    direction, state = ours.update(gradient, state, params)
    wanted, reference = theirs.update(gradient, reference, params)
    _assert_close(direction, jax.tree.map(np.negative, wanted))
