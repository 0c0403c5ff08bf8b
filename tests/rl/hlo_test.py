"""Programs for accelerators have no scatter, and devices share scalars only.

This is read from the compiled program of loss and gradient, the pass that forms
the minibatch's statistics included, with the rows sharded over eight devices.
"""

import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.configs import algorithms
from stppo_jax.rl import losses
from stppo_jax.rl import segments
from stppo_jax.tools.plan import hlo
from stppo_jax.tools.plan import hlo_cost
from tests import compilations
from tests.rl import batches

_MESH_SIZE = 8
# The forms of the segment sums that are meant for accelerators.
_ACCELERATED = ('unrolled', 'broadcast')
# Instructions that read or write where the data says. A compiler may turn a
# scatter into a loop of dynamic updates, so these reveal it too.
_INDEXED = frozenset(
  {'scatter', 'gather', 'dynamic-slice', 'dynamic-update-slice', 'sort'}
)
# These options compile quickly. The program is the one for accelerators, but
# compiled for CPU: the output of their own compilers is not tested here.
_COMPILER_OPTIONS = dict(compilations.QUICK)
# The generator of fused loops that tests/conftest.py chooses makes scatters
# loops, in which this test would not find them.
if 'use_fusion_emitters=false' in os.environ.get('XLA_FLAGS', ''):
  _COMPILER_OPTIONS['xla_cpu_use_fusion_emitters'] = True


def _indexed(program) -> list[str]:
  """Returns the opcodes of the instructions whose indices are data."""
  instructions = hlo.read(program.as_text()).instructions
  return [x.opcode for x in instructions if x.opcode in _INDEXED]


def _collectives(program) -> list[tuple[str, bool]]:
  """Returns kind of each collective operation, and whether it sends scalars."""
  return [
    (x.kind, not any(array.dims for array in x.arrays))
    for x in hlo_cost.collectives(hlo.read(program.as_text()))
  ]


def _compile(function, *arguments):
  return (
    jax.jit(function)
    .lower(*arguments)
    .compile(compiler_options=_COMPILER_OPTIONS)
  )


def _by_row(tree):
  """Returns the arrays with their rows sharded over the devices."""
  axis = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((_MESH_SIZE,), ('data',), axis)
  rows = jax.sharding.PartitionSpec('data')
  return jax.device_put(tree, jax.sharding.NamedSharding(mesh, rows))


def _arguments():
  """Returns (logprobs, entropy, batch) with a row for each device."""
  batch, logprobs, entropy = batches.make(spread=0.6)
  index = np.arange(_MESH_SIZE) % len(logprobs)
  return logprobs[index], entropy[index], batches.rows(batch, index)


def _loss_and_gradients(algorithm, implementation):
  """Returns all terms of the loss, each with its gradient."""

  @batches.summing(implementation)
  def run(logprobs_BL, entropy_BL, batch):
    statistics = losses.minibatch_statistics(
      algorithm, logprobs_BL, entropy_BL, batch, num_turns=batches.T
    )

    def parts(logprobs_BL, entropy_BL):
      loss = batches.policy_loss(
        algorithm,
        logprobs_BL,
        entropy_BL,
        batch,
        statistics=statistics,
        entropy_coefficient=0.01,
      )
      return {'loss': loss.loss, 'bias': loss.bias}, loss

    heads, pull, loss = jax.vjp(parts, logprobs_BL, entropy_BL, has_aux=True)
    return loss, pull(jax.tree.map(jnp.ones_like, heads))

  return run


_CASES = {
  'token': ('token_ppo', {}),
  'turn': ('turn_ppo', {}),
  'sequence': ('gspo', {}),
  'minibatch scope': ('st_ppo', {'scope': 'minibatch'}),
  'microbatch scope': ('st_ppo', {'scope': 'microbatch'}),
  'sequence scope': ('st_ppo', {'scope': 'sequence'}),
  'turn scope': ('st_ppo', {'scope': 'turn', 'level': 'turn'}),
  'norm of the gradient': ('st_ppo', {'norm': 'gradient'}),
}


def _algorithm(case):
  name, changes = _CASES[case]
  changes = {f'correction__clipping_bias__{k}': x for k, x in changes.items()}
  return batches.algorithm(name, **changes)


@functools.cache
def _alone(case):
  """Returns the same on one device, in the form that is meant for CPUs."""
  run = _loss_and_gradients(_algorithm(case), 'segment_sum')
  return _compile(run, *_arguments())(*_arguments())


def _check(algorithm, implementation):
  arguments = _by_row(_arguments())
  run = _loss_and_gradients(algorithm, implementation)
  program = _compile(run, *arguments)
  assert _indexed(program) == []
  # The devices must agree on a loss.
  assert set(_collectives(program)) == {('all-reduce', True)}
  return program(*arguments)


# The forms differ in the segment sums alone, and the levels and scopes in which
# of them they take: these show what all do.
_FAST = (('norm of the gradient', 'broadcast'), ('turn scope', 'unrolled'))


@pytest.mark.parametrize(
  ('case', 'implementation'),
  [
    pytest.param(*case, marks=() if case in _FAST else pytest.mark.slow)
    for case in itertools.product(_CASES, _ACCELERATED)
  ],
)
def test_no_scatter_and_scalars_between_devices(case, implementation):
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12),
    _check(_algorithm(case), implementation),
    _alone(case),
  )


# These rank the tokens of a whole minibatch, for which they sort all of them.
_RANKING = ('clip_cov', 'kl_cov')


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', [name for name in algorithms.ALGORITHMS if name not in _RANKING]
)
def test_every_algorithm_of_the_table_has_no_scatter(name):
  _check(batches.algorithm(name), 'broadcast')


def test_a_planted_scatter_is_found():
  arguments = _by_row(_arguments())
  turns = lambda batch: segments.Segments(batch.turn_ids_BL, batches.T)
  run = lambda x, _, batch: segments.segment_totals(x, turns(batch))
  with batches.summing('segment_sum'):
    assert _indexed(_compile(run, *arguments))


@pytest.mark.parametrize(
  ('function', 'opcode'),
  [
    (lambda x, ids: jnp.zeros(9).at[ids].add(x), 'scatter'),
    (lambda x, ids: x[ids], 'gather'),
    (lambda x, ids: jax.lax.dynamic_slice(x, ids[:1], (2,)), 'dynamic-slice'),
    (lambda x, ids: jnp.sort(x), 'sort'),
    (
      # A loop's body counts.
      lambda x, ids: jax.lax.fori_loop(
        0, ids[0], lambda i, y: y.at[i % 9].add(1), x
      ),
      'dynamic-update-slice',
    ),
  ],
)
def test_planted_instructions_are_found(function, opcode):
  program = _compile(function, np.ones(9), np.arange(9))
  assert opcode in _indexed(program)


@pytest.mark.parametrize(
  ('function', 'is_scalar'),
  [
    (lambda x: jnp.sum(x), True),
    (lambda x: jnp.sum(x, axis=0), False),
    (lambda x: jnp.cumsum(x, axis=0), False),
  ],
)
def test_planted_collectives_are_found(function, is_scalar):
  found = _collectives(_compile(function, _by_row(np.ones((8, 16)))))
  assert found and all(scalar for _, scalar in found) == is_scalar
