"""Makes the Flax module of a model, and fills it with parameters.

A module is made once for each shape, without arrays. A program that computes
with it fills a copy with the arrays of a parameter tree, see `functional`.
"""

from collections.abc import Mapping
import functools
import re
from typing import Any

import chex
from flax import nnx
import jax
import jax.numpy as jnp

from stppo_jax.models import config as model_config
from stppo_jax.models import layers as layers_lib
from stppo_jax.models import lora as lora_lib
from stppo_jax.models import transformer

Array = jax.Array
Params = Mapping[str, Any]

# Routers compute in float32 whatever the rest does: rounding their logits could
# change which experts a token visits.
_FLOAT32 = re.compile(r'(^|/)router/')


def init(config: model_config.ModelConfig, head: str, key: Array) -> Params:
  """Returns random weights, float32, without adapters.

  Args:
    config: the shape.
    head: see `functional.Model`.
    key: the random key.
  """
  module = transformer.Transformer(config, head=head, rngs=nnx.Rngs(params=key))
  return nnx.to_pure_dict(nnx.state(module))


def abstract_params(config: model_config.ModelConfig, head: str) -> Params:
  """Returns the shapes and dtypes of the weights of `init`."""
  leaves, tree = _abstract_params(config, head)
  return jax.tree.unflatten(tree, leaves)


def kernels(
  config: model_config.ModelConfig, head: str, mesh: jax.sharding.Mesh | None
) -> dict[str, Any]:
  """Returns the shapes of the kernels that may have adapters, by layer."""
  graph, abstract = _abstract(config, head, mesh)
  linear = _linear_layers(nnx.merge(graph, abstract))
  return {name: layer.kernel for name, layer in linear.items()}


def filled(
  config: model_config.ModelConfig,
  head: str,
  mesh: jax.sharding.Mesh | None,
  params: Params,
  *,
  lora: lora_lib.Lora | None,
) -> transformer.Transformer:
  """Returns the module with these parameters, adapters included.

  Args:
    config, head, mesh: see `functional.Model`.
    params: the parameters; layers are stacked.
    lora: options of adapters, which the parameters may contain.

  Raises:
    AssertionError: parameters do not fit the shape; the message names them.
  """
  adapters = {}
  if lora is not None:
    params, adapters = lora_lib.split(params)
  # Shapes are checked before anything is filled in. jax clamps indices beyond
  # the end of an array, so a program with an embedding that is too short would
  # run and return wrong results.
  graph, abstract = _abstract(config, head, mesh)
  chex.assert_trees_all_equal_shapes(params, nnx.to_pure_dict(abstract))
  state = jax.tree.map(lambda x: x, abstract)  # a copy, which is filled below
  nnx.replace_by_pure_dict(state, dict(params))
  module = nnx.merge(graph, state)
  _adapt(module, adapters, lora)
  return module


def filled_by_layer(
  config: model_config.ModelConfig,
  head: str,
  mesh: jax.sharding.Mesh | None,
  params: Params,
  *,
  lora: lora_lib.Lora | None,
) -> tuple[transformer.Transformer, list[Any]]:
  """Returns the module with abstract layers, and a module for each layer.

  Args:
    config, head, mesh, lora: see `filled`.
    params: the parameters, with a tree for each layer.
  """
  graph, abstract = _abstract(config, head, mesh)
  state = jax.tree.map(lambda x: x, abstract)
  # The stacked layers stay abstract: each layer is a module of its own.
  whole = nnx.to_pure_dict(abstract)
  top = {**params, **{name: whole[name] for name in config.stacks}}
  nnx.replace_by_pure_dict(state, top)
  module = nnx.merge(graph, state)
  graphs = {name: nnx.graphdef(getattr(module, name)) for name in config.stacks}
  layers = []
  for (name, _), tree in zip(config.places, params['layers'], strict=True):
    base, adapters = lora_lib.split(tree)
    layer_state = jax.tree.map(lambda x: x, abstract[name])
    nnx.replace_by_pure_dict(layer_state, dict(base))
    layer = nnx.merge(graphs[name], layer_state)
    _adapt(layer, adapters, lora, inside=f'{name}/')
    layers.append(layer)
  return module, layers


def _adapt(
  module: nnx.Module,
  adapters: Mapping[str, Params],
  lora: lora_lib.Lora | None,
  *,
  inside: str = '',
) -> None:
  """Puts adapters beside linear layers of a module, by their names.

  Args:
    module: the module.
    adapters: the adapters by the names of their layers in the module.
    lora: the options of adapters.
    inside: the prefix that these names have in a whole model.
  """
  linear = _linear_layers(module)
  for name, pair in adapters.items():
    assert lora is not None
    scale = lora.scale_of(f'{inside}{name}')
    linear[name].adapt(pair[lora_lib.A], pair[lora_lib.B], scale=scale)


def _linear_layers(
  module: nnx.Module,
) -> dict[str, layers_lib.Linear | layers_lib.Experts]:
  """Returns the layers that may have adapters, named like 'layers/q_proj'."""
  return {
    '/'.join(map(str, path)): child
    for path, child in nnx.iter_modules(module)
    if isinstance(child, layers_lib.Linear | layers_lib.Experts)
  }


# Tracing `init` takes longer than all else that a caller does with the shapes.
@functools.lru_cache(maxsize=32)
def _abstract_params(config: model_config.ModelConfig, head: str):
  """Returns shapes and structure of the weights of `init`."""
  make = functools.partial(init, config, head)
  return jax.tree.flatten(jax.eval_shape(make, jax.random.key(0)))


@functools.lru_cache(maxsize=32)
def _abstract(
  config: model_config.ModelConfig,
  head: str,
  mesh: jax.sharding.Mesh | None,
):
  """Returns graph and abstract state of the module, made without arrays.

  The result is cached, because every program asks for it several times and it
  takes long to make. So callers must fill copies of the state.
  """
  make = lambda: transformer.Transformer(
    config, head=head, mesh=mesh, rngs=nnx.Rngs(0)
  )
  return nnx.split(nnx.eval_shape(make))


def cast(params: Any, dtype: str) -> Any:
  """Returns the weights in `dtype`; those of routers stay float32.

  A model casts weights where it uses them, so its results are the same with and
  without this cast. But with it, a loop over microbatches or tokens reads the
  weights, and moves them between devices, in the smaller dtype.

  Args:
    params: float32 weights, or their shapes under `jax.eval_shape`.
    dtype: name of the activations' dtype.
  """

  def cast_leaf(path, leaf):
    return leaf if _stays_float32(path) else leaf.astype(jnp.dtype(dtype))

  return jax.tree_util.tree_map_with_path(cast_leaf, params)


def cast_and_delete(params: Any, dtype: str) -> Any:
  """Returns `cast(params, dtype)` and deletes the arrays that it was given.

  It is meant for weights that are not trained. They are replaced one after the
  other, so that devices never hold all of them twice.

  Args:
    params: arrays on devices; the new ones have the same shardings.
    dtype: name of the activations' dtype.
  """

  def replace(path, leaf):
    if _stays_float32(path) or leaf.dtype == jnp.dtype(dtype):
      return leaf
    smaller = jax.device_put(leaf.astype(jnp.dtype(dtype)), leaf.sharding)
    smaller.block_until_ready()  # the old array is read until then
    leaf.delete()
    return smaller

  return jax.tree_util.tree_map_with_path(replace, params)


def _stays_float32(path) -> bool:
  name = jax.tree_util.keystr(path, simple=True, separator='/')
  return _FLOAT32.search(name) is not None
