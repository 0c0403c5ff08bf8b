"""Loads the weights of a run's models onto its devices."""

import functools
from typing import Any, NamedTuple

import jax

from stppo_jax import keys
from stppo_jax.learner import model_roles
from stppo_jax.models import functional
from stppo_jax.models import modules
from stppo_jax.models.hf import load
from stppo_jax.models.hf import peft
from stppo_jax.parallel import sharding

# The dtype of trained weights, whatever the dtype of the activations.
TRAINED = 'float32'


def compute_options(config) -> dict[str, Any]:
  """Returns the config's dtype, remat and scan_unroll, for its models."""
  return {
    'dtype': config.model.dtype,
    'remat': config.updates.remat,
    'scan_unroll': config.model.scan_unroll,
  }


def load_or_init(
  config, path: str, policy: functional.Model
) -> functional.Params:
  """Loads a policy's weights, or draws random weights.

  No host and no device ever holds more weights than its own shards.

  Args:
    config: the run's config.
    path: a Hugging Face directory; '' draws random weights.
    policy: the model, with the mesh of training.

  Raises:
    ValueError: the files do not fit the model.
  """
  key = keys.step_key(config.seed, 0, keys.Purpose.INIT)
  layout, init = _layout_and_init(policy)
  # The weights are read or drawn in their shards, so that no device holds all
  # weights.
  if path:
    return load.load_params(path, policy.config, layout)
  return init(key)


class Start(NamedTuple):
  """The positional arguments of `state.init`.

  Attributes:
    policy: the policy's weights; with adapters, the weights of the frozen base.
    key: the random key of the adapters.
    adapters: the adapters in `model.lora.path`, or None.
    values: the weights in `model.value_path`, or None.
  """

  policy: functional.Params
  key: jax.Array
  adapters: functional.Params | None
  values: functional.Params | None


def load_start(config, path: str, models: model_roles.Models) -> Start:
  """Returns the weights that the models of a run start from.

  Args:
    config: the run's config.
    path: the policy's Hugging Face directory; '' draws random weights.
    models: the models, with the adapters and the mesh of training.

  Raises:
    ValueError: the files do not fit the models.
  """
  start = _load_policy(config, path, models.policy)
  if not models.value_path:
    return start
  assert models.value is not None
  value = models.value.plain_policy
  return start._replace(values=load_or_init(config, models.value_path, value))


def _load_policy(config, path: str, policy: functional.Model) -> Start:
  loaded = load_or_init if policy.lora is None else load_frozen
  params = loaded(config, path, policy.plain_policy)
  key = keys.step_key(config.seed, 0, keys.Purpose.INIT)
  # This key must differ from the key with which `load_or_init` draws random
  # weights. Otherwise adapters would be drawn with the same random numbers.
  key = jax.random.fold_in(key, 1)
  adapters, named = None, config.model.lora.path
  if policy.lora is not None and named:
    shapes = jax.eval_shape(policy.init_adapters, key)
    adapters = peft.read(named, policy.config, policy.lora, shapes)
  return Start(params, key, adapters, None)


def load_merged(
  config, path: str, policy: functional.Model
) -> functional.Params:
  """Returns the weights that a policy starts from, with merged adapters.

  If `model.lora.path` is empty, there are no adapters to merge. For `path` see
  `load_start`.
  """
  if not config.model.lora.path:
    return load_or_init(config, path, policy.plain_policy)
  start = _load_policy(config, path, policy)
  assert start.adapters is not None  # `model.lora.path` is not empty
  return policy.merge_adapters(policy.join_params(start.policy, start.adapters))


@functools.lru_cache(maxsize=8)
def _layout_and_init(policy: functional.Model):
  """Returns the shardings of a policy's weights, and a program that draws them.

  Equal policies share the program.
  """
  assert policy.mesh is not None
  layout = sharding.param_shardings(policy.abstract_params, policy.mesh)
  return layout, jax.jit(policy.init, out_shardings=layout)


def load_frozen(
  config, path: str, policy: functional.Model
) -> functional.Params:
  """Loads weights that are not trained: a LoRA base, or the reference.

  The weights are kept in the dtype of the activations. If this dtype has fewer
  bits than the files, an export with merged adapters has fewer bits, too.
  """
  params = load_or_init(config, path, policy)
  return modules.cast_and_delete(params, policy.config.dtype)


def load_reference(
  config, path: str, policy: functional.Model
) -> functional.Params | None:
  """Returns the weights of the frozen reference.

  The weights are read from `model.reference_path`. If it is empty, they are the
  weights that the policy starts from. If the reference is the base under the
  adapters, the result is None, because the state contains the base.

  Args:
    config: the run's config.
    path: the directory of the start, see `load_or_init`.
    policy: the policy without adapters.
  """
  if not has_own_reference(config):
    return None
  return load_frozen(config, config.model.reference_path or path, policy)


def has_own_reference(config) -> bool:
  """Returns whether a run holds reference weights apart from its state."""
  model = config.model
  return bool(not model.lora.rank or model.reference_path)
