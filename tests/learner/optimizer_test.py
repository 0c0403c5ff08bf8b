"""An optimiser step equals the chain of optax: clip, AdamW, warm-up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stppo_jax.learner import optimizer
from tests import compilations

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
  adam, numbers = optimizer.from_config(_ADAM | _NUMBERS._asdict())
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
