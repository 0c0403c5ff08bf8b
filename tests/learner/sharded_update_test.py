"""Updates on eight devices equal those on one, with any remat or split."""

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

from stppo_jax.learner import state as state_lib
from stppo_jax.learner import step as step_lib
from stppo_jax.models import functional
from stppo_jax.models.hf import families
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from tests import compilations
from tests.learner import trees
from tests.learner import updates
from tests.models import tiny
from tests.rl import batches

_NUM_UPDATES = 3
# One key/value head: two devices of `tensor` share it.
_SHAPE = {'vocab_size': 12, 'num_kv_heads': 1, 'num_heads': 2}
_EXPERTS = tiny.MIXED | {'moe': 'grouped'}
_ADAM = optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-8)
_STEP = updates.DESCENT._replace(learning_rate=1e-3, max_grad_norm=1.0)
_HYPERPARAMETERS = updates.hyperparameters(
  policy_step=_STEP, value_step=_STEP, load_balance=0.1
)


class _Way(NamedTuple):
  """The way to compute an update: mesh, microbatches, remat, head chunk."""

  mesh: tuple[int, ...] = (1, 1, 1)  # data, fsdp, tensor, and perhaps expert
  num_microbatches: int = 1
  remat: str = 'none'
  chunk: int = 0
  experts: bool = False
  family: str = ''
  # With 'gradient' the correction divides it: three gradients are formed.
  norm: str = 'coefficient'

  @property
  def shape(self):
    shape = _SHAPE | (_EXPERTS if self.experts else {})
    return shape | (tiny.of_family(self.family) if self.family else {})


def _models(way):
  """Returns policy and value model on a mesh."""
  mesh = mesh_lib.make_mesh(
    **dict(zip(('data', 'fsdp', 'tensor', 'expert'), way.mesh)),
    devices=jax.devices()[: math.prod(way.mesh)],
  )
  config = tiny.model(**way.shape, remat=way.remat).config
  return mesh, updates.Models(
    functional.Model(config, 'vocabulary', mesh, chunk=way.chunk),
    functional.Model(config, 'scalar', mesh),
  )


def _start(way):
  """Returns random weights with zero moments."""

  def fresh(model, seed):
    params = tiny.params(model, seed)
    moments = jax.tree.map(np.asarray, _ADAM.init(params))
    return state_lib.ModelState(params, moments, np.int32(0))

  policy, value, *_ = updates.transformers(**way.shape)
  return state_lib.TrainState(fresh(policy, 1), fresh(value, 2))


@functools.cache
def _updates(way) -> list[tuple[dict[str, float], Any]]:
  """Returns losses and gradients of three updates in a row."""
  mesh, models = _models(way)
  algorithm = batches.algorithm(
    'st_ppo',
    correction__clipping_bias__tau=0.1,
    correction__clipping_bias__norm=way.norm,
  )
  hyperparameters = updates.with_algorithm(_HYPERPARAMETERS, algorithm)

  method = updates.telling_gradient(updates.method(algorithm))

  def update(state, batch, packing):
    state, outputs = step_lib.update(
      state,
      {},
      batch,
      hyperparameters,
      packing,
      method=method,
      spec=updates.spec(models),
      optimizers=state_lib.Optimizers(_ADAM, _ADAM),
    )
    return state, outputs.metrics, outputs.diagnostics

  state = _start(way)
  layout = sharding.param_shardings(state, mesh)
  compiled = jax.jit(
    update,
    out_shardings=(layout, None, None),
    compiler_options=compilations.QUICK,
  )
  state = jax.device_put(state, layout)
  batch = updates.batch(updates.transformers(**way.shape))
  if way.experts:
    batch = updates.with_visits(batch)
  order, packing = updates.packed(
    batch, way.num_microbatches, num_shards=math.prod(way.mesh) // way.mesh[2]
  )
  batch = jax.tree.map(lambda x: x[order], batch)
  batch = jax.device_put(batch, sharding.batch_sharding(mesh))
  found = []
  for _ in range(_NUM_UPDATES):
    state, metrics, gradients = compiled(state, batch, packing)
    losses = {n: float(x) for n, x in metrics.items() if n.endswith('loss')}
    found.append((losses, jax.device_get(gradients)))
  return found


# In `make test`, tests/models computes the parts of a model on a mesh, and
# step_test.py the update of a smaller model.
@pytest.mark.slow
@pytest.mark.parametrize(
  'way',
  [
    _Way((2, 2, 2), num_microbatches=2, remat='full', chunk=10),
    _Way((2, 2, 2), 2, remat='full', chunk=10, norm='gradient'),
    _Way((2, 2, 2)),
    _Way((1, 1, 1), num_microbatches=2),
    _Way((8, 1, 1)),
    _Way((1, 8, 1), remat='dots'),
    _Way((2, 2, 2), num_microbatches=2, remat='full', experts=True),
    # A layer with a window and one without; norms over sharded projections.
    *(
      _Way((2, 2, 2), num_microbatches=2, remat='full', family=family)
      for family, row in families.FAMILIES.items()
      if not row.experts
    ),
    _Way((2, 2, 2), remat='dots', family='gemma3_text'),
    _Way((2, 2, 1, 2), num_microbatches=2, remat='full', experts=True),
    _Way((1, 2, 2, 2), remat='dots', chunk=10, experts=True),
  ],
)
def test_three_updates_in_a_row_are_those_of_one_device(way):
  alone = _updates(_Way(experts=way.experts, family=way.family, norm=way.norm))
  many = _updates(way)
  for (losses, gradients), (losses_1, gradients_1) in zip(many, alone):
    assert losses.keys() == losses_1.keys() and len(losses) >= 3
    for name, loss in losses_1.items():
      np.testing.assert_allclose(losses[name], loss, 1e-6, 1e-6, err_msg=name)
    # Gradients are compared, not weights: Adam makes full steps of rounding.
    trees.assert_close(gradients, gradients_1, atol=1e-5)
  # The updates changed the weights: the last gradients differ from the first.
  (_, first), *_, (_, last) = alone
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), first, last)
  assert max(jax.tree.leaves(moved)) > 1e-3
