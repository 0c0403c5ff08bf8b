"""The models that a run trains, and their weights."""

import dataclasses
from typing import Any, NamedTuple

import jax

from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.models import lora
from stppo_jax.models import modules
from stppo_jax.models.hf import load
from stppo_jax.parallel import memory
from stppo_jax.parallel import sharding


class Trained(NamedTuple):
  """The trained weights of both models, or their gradients.

  Attributes:
    policy: all weights of the policy or, with LoRA, its adapters and heads;
      None in the gradient of a value model that learns alone.
    value: all weights of the value model or, with LoRA, its adapters and heads;
      None without a value model.
  """

  policy: Any
  value: functional.Params | None


class Params(NamedTuple):
  """All weights that the models of a run compute with.

  Attributes:
    trained: the weights that updates change.
    frozen: the base under the adapters of both models, in the dtype of the
      activations; {} without adapters.
  """

  trained: Trained
  frozen: functional.Params


class Models(NamedTuple):
  """The models of a run.

  Attributes:
    policy: the policy; with a shared backbone it has the value head too.
    value: a value model with layers, or adapters, of its own; None with a
      shared backbone, and for an algorithm that uses no values.
    value_path: the directory whose weights the value model starts from; with ''
      the value model starts from the policy's layers.
    gathers_base: whether a program gathers the frozen base over the mesh axis
      fsdp once, and holds the result, instead of gathering each layer in every
      pass. The embedding stays sharded.
  """

  policy: functional.Model
  value: functional.Model | None
  gathers_base: bool = False
  value_path: str = ''

  def cast(self, params: Params) -> Params:
    """Returns weights in the dtype of the activations.

    Call this function once in a program, outside the loop over microbatches.
    Then the weights are cast once, the devices gather the smaller dtype, and
    with `gathers_base` the base is gathered once.
    """
    params = modules.cast(params, self.policy.config.dtype)
    # Only the frozen base may be gathered. Trained weights stay sharded,
    # because their gradients are summed in the same shards.
    if not self.gathers_base or not params.frozen:
      return params
    layout = self._gathered_layout(params.frozen)
    frozen = jax.lax.with_sharding_constraint(params.frozen, layout)
    return params._replace(frozen=frozen)

  @property
  def value_range(self) -> tuple[float, float] | None:
    """The smallest and the largest value; None if values have no bounds."""
    return (self.value or self.policy).value_range

  @property
  def abstract_value_start(self) -> functional.Params | None:
    """The shapes of the weights in `value_path`; None without such a path."""
    if not self.value_path:
      return None
    assert self.value is not None
    return self.value.plain_policy.abstract_params

  @property
  def gathered_bytes(self) -> int:
    """The bytes of the gathered base on a device; 0 without `gathers_base`."""
    if not self.gathers_base:
      return 0
    base = jax.eval_shape(
      lambda params: modules.cast(params, self.policy.config.dtype),
      self.policy.plain_policy.abstract_params,
    )
    layout = self._gathered_layout(base)
    return memory.bytes_per_device(sharding.with_layout(base, layout))

  def _gathered_layout(self, base: functional.Params) -> Any:
    assert self.policy.mesh is not None  # a model in training has a mesh
    layout = sharding.param_shardings(base, self.policy.mesh)
    # The embedding stays sharded, because each device looks tokens up in its
    # own shard of the embedding. If the embedding is also the output matrix,
    # the head gathers it once anyway.
    return sharding.gathered(layout) | {'embedding': layout['embedding']}

  def policy_weights(self, params: Params) -> functional.Params:
    """Returns the weights of `policy` as one tree; no array is copied."""
    return self.policy.join_params(params.frozen, params.trained.policy)

  def merged(self, params: Params) -> functional.Params:
    """Returns the policy's weights with merged adapters.

    Without adapters no array is copied.
    """
    return self.policy.merge_adapters(self.policy_weights(params))

  def value_weights(self, params: Params) -> functional.Params:
    """Returns the weights of `value` as one tree; no array is copied."""
    assert self.value is not None and params.trained.value is not None
    return self.value.join_params(params.frozen, params.trained.value)


def build(
  config,
  shape: model_config.ModelConfig,
  mesh: jax.sharding.Mesh,
  *,
  uses_values: bool,
  gathers_base: bool = False,
) -> Models:
  """Builds the models of a config.

  Args:
    config: the run's config.
    shape: the config of the policy's layers, and of the layers of a value model
      that starts from the policy.
    mesh: the mesh on which both models are laid out.
    uses_values: whether the algorithm's advantages need values.
    gathers_base: see `Models`.

  Raises:
    ValueError: the adapter options do not fit each other or the model, or the
      value model has another vocabulary.
  """
  # Two bins need one output, whose sigmoid is that of the upper bin.
  bins = config.loss.value_bins
  outputs = 1 if bins == 2 else bins
  options = config.model.lora.to_dict()
  del options['path']
  adapters = lora.Lora(**options) if options['rank'] else None

  def model(head: str) -> functional.Model:
    chunk = config.updates.head_chunk
    bounds = tuple(config.loss.value_range) or None
    has_values = head != 'vocabulary'
    its_shape = dataclasses.replace(
      shape, value_outputs=outputs if has_values else 1
    )
    return functional.Model(its_shape, head, mesh, adapters, chunk, bounds)

  # One model has both heads, and its forward pass returns the values, too.
  if uses_values and config.model.value_backbone == 'shared':
    return Models(model('both'), None, gathers_base)
  # The policy is built first. If the mesh divides neither model, the error then
  # names the policy, which users know.
  policy, path = model('vocabulary'), config.model.value_path
  if not uses_values:
    return Models(policy, None, gathers_base)
  value = model('scalar')
  if path:
    its_shape = _value_shape(path, value.config, config.env.max_length)
    value = dataclasses.replace(value, config=its_shape)
  return Models(policy, value, gathers_base, path)


def _value_shape(
  path: str, default: model_config.ModelConfig, longest: int
) -> model_config.ModelConfig:
  """Returns the config of the layers of a value model in a directory.

  Args:
    path: the directory.
    default: the config of a value model with the policy's layers. It says how
      layers compute, and how many outputs the head has.
    longest: the largest number of tokens of a trajectory.
  """
  shape = load.read_config(path, longest=longest)
  shape = model_config.computed_as(shape, default)
  shape = dataclasses.replace(shape, value_outputs=default.value_outputs)
  if shape.vocab_size != default.vocab_size:
    raise ValueError(
      f'model.value_path={path}: its vocab_size={shape.vocab_size} must equal '
      f"the policy's vocab_size={default.vocab_size}"
    )
  return shape
