"""The models' files: whether they fit the run, and their weights on devices."""

from typing import Any

import jax

from stppo_jax.learner import keys
from stppo_jax.models import functional
from stppo_jax.models import precision
from stppo_jax.models.hf import load
from stppo_jax.parallel import sharding

TRAINED = 'float32'  # what weights are trained in, whatever computes with them


def computed_as(config) -> dict[str, Any]:
  """How the models of a run are computed, whatever their shape."""
  return {
    'dtype': config.model.dtype,
    'remat': config.updates.remat,
    'scan_unroll': config.model.scan_unroll,
  }


def initial(
  config, path: str, policy: functional.Model, mesh: jax.sharding.Mesh
) -> functional.Params:
  """A policy's weights: those of a directory, or random ones where path is ''.

  No host and no device ever holds more of them than its part.

  Raises:
    ValueError: files that do not fit the model.
  """
  key = keys.step_key(config.seed, 0, keys.Purpose.INIT)
  layout = sharding.param_shardings(jax.eval_shape(policy.init, key), mesh)
  if path:
    return load.load_params(path, policy.config, layout)
  return jax.jit(policy.init, out_shardings=layout)(key)


def frozen(
  config, path: str, policy: functional.Model, mesh: jax.sharding.Mesh
) -> functional.Params:
  """`initial`, for weights that nobody trains: the base, and the reference.

  In the dtype that they are computed in. What is merged with such a base and
  exported is what was trained, not the base of the files: where these hold more
  bits than `model.dtype`, those are gone.
  """
  params = initial(config, path, policy, mesh)
  return precision.replaced(params, policy.config.dtype)
