"""Loads the weights of a run's models onto its devices."""

import functools
from typing import Any

import jax

from stppo_jax import keys
from stppo_jax.models import functional
from stppo_jax.models import precision
from stppo_jax.models.hf import load
from stppo_jax.parallel import sharding

# The dtype of trained weights, whatever the dtype of the activations.
TRAINED = 'float32'


def compute_options(config) -> dict[str, Any]:
  """Returns the options of a config that choose how its models compute."""
  return {
    'dtype': config.model.dtype,
    'remat': config.updates.remat,
    'scan_unroll': config.model.scan_unroll,
  }


def load_or_init(
  config, path: str, policy: functional.Model, mesh: jax.sharding.Mesh
) -> functional.Params:
  """Loads a policy's weights, or draws random ones.

  No host and no device ever holds more of them than its own shards.

  Args:
    config: the run's config.
    path: a Hugging Face directory; '' draws random weights.
    policy: the model.
    mesh: the devices.

  Raises:
    ValueError: files that do not fit the model.
  """
  key = keys.step_key(config.seed, 0, keys.Purpose.INIT)
  layout, init = _layout_and_init(policy, mesh)
  if path:
    return load.load_params(path, policy.config, layout)
  return init(key)


def load_start(
  config, path: str, policy: functional.Model, mesh: jax.sharding.Mesh
) -> tuple[functional.Params, jax.Array]:
  """Returns the weights of a directory, and the key of what is added to them.

  A value head and adapters are drawn with the key. The weights are those of a
  frozen base if the policy has adapters.

  Args:
    config: the run's config.
    path: a Hugging Face directory; '' draws random weights.
    policy: the policy, with its adapters.
    mesh: the devices.

  Raises:
    ValueError: files that do not fit the model.
  """
  load = load_or_init if policy.lora is None else load_frozen
  params = load(config, path, policy.plain_policy, mesh)
  key = keys.step_key(config.seed, 0, keys.Purpose.INIT)
  return params, jax.random.fold_in(key, 1)


@functools.lru_cache(maxsize=8)
def _layout_and_init(policy: functional.Model, mesh: jax.sharding.Mesh):
  """Returns the layout of a policy's weights, and a program that draws them."""
  layout = sharding.param_shardings(policy.abstract_params, mesh)
  return layout, jax.jit(policy.init, out_shardings=layout)


def load_frozen(
  config, path: str, policy: functional.Model, mesh: jax.sharding.Mesh
) -> functional.Params:
  """Loads weights that are not trained: a LoRA base, or the reference.

  They are kept in the dtype of the activations. If that has fewer bits than the
  files, an export of merged adapters has fewer bits, too.
  """
  params = load_or_init(config, path, policy, mesh)
  return precision.cast_and_delete(params, policy.config.dtype)
