"""Makes the Flax module of a model, and fills it with parameters.

A module is made once for each config, without arrays. A program that computes
with a model fills a copy of the module with the arrays of a parameter tree, see
`functional`.
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

# Routers always compute in float32, because rounding their logits could change
# the experts that a token visits.
_FLOAT32 = re.compile(r'(^|/)router/')


def init(config: model_config.ModelConfig, head: str, key: Array) -> Params:
  """Returns random weights, float32, without adapters.

  Args:
    config: the model's config.
    head: see `functional.Model`.
    key: the random key.
  """
  module = transformer.Transformer(config, head=head, rngs=nnx.Rngs(params=key))
  return nnx.to_pure_dict(nnx.state(module))


def abstract_params(config: model_config.ModelConfig, head: str) -> Params:
  """Returns the result of `init` with shapes and dtypes in place of arrays."""
  leaves, tree = _abstract_params(config, head)
  return jax.tree.unflatten(tree, leaves)


def kernels(
  config: model_config.ModelConfig, head: str, mesh: jax.sharding.Mesh | None
) -> dict[str, Any]:
  """Returns the shape and dtype of each kernel that may have an adapter.

  The keys are the names of the layers that hold the kernels.
  """
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
    params: the parameters, with stacked layers.
    lora: options of the adapters that the parameters may contain; None: the
      parameters contain no adapters.

  Raises:
    AssertionError: the shapes of some parameters do not fit the config; the
      message names these parameters.
  """
  adapters = {}
  if lora is not None:
    params, adapters = lora_lib.split(params)
  # Shapes are checked before the module is filled. JAX clamps indices beyond
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
  """Returns the module of the model, and a separate module for each layer.

  Args:
    config, head, mesh, lora: see `filled`.
    params: the parameters, with a separate tree for each layer.

  Returns:
    The module of the model, whose own layers have no arrays, and the list of
    the filled modules of the layers.
  """
  graph, abstract = _abstract(config, head, mesh)
  state = jax.tree.map(lambda x: x, abstract)
  # The stacked layers of this module stay abstract, because each layer gets a
  # module of its own.
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
  """Adds adapters to the linear layers of a module.

  Args:
    module: the module, which is changed in place.
    adapters: name of a linear layer in the module -> the adapter of the layer.
    lora: the options of adapters, which give the scales.
    inside: the path of the module in a whole model, ending with '/'; '' for a
      whole model. `lora` needs the name of a linear layer in a whole model,
      which is this path followed by the name of the layer in the module.
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


# The result is cached, because tracing `init` takes longer than everything that
# a caller does with the shapes.
@functools.lru_cache(maxsize=32)
def _abstract_params(config: model_config.ModelConfig, head: str):
  """Returns the leaves of `abstract_params`, and the structure of the tree."""
  make = functools.partial(init, config, head)
  return jax.tree.flatten(jax.eval_shape(make, jax.random.key(0)))


@functools.lru_cache(maxsize=32)
def _abstract(
  config: model_config.ModelConfig,
  head: str,
  mesh: jax.sharding.Mesh | None,
):
  """Returns the module's graph, and its state with shapes in place of arrays.

  The result takes long to make, and every program needs it several times, so it
  is cached. Callers must fill copies of the state, not the cached state.
  """
  make = lambda: transformer.Transformer(
    config, head=head, mesh=mesh, rngs=nnx.Rngs(0)
  )
  return nnx.split(nnx.eval_shape(make))


def cast(params: Any, dtype: str) -> Any:
  """Returns the weights cast to `dtype`; weights of routers stay float32.

  A model also casts each weight where it uses the weight, so casting all
  weights before does not change the results. But a loop over microbatches or
  tokens then reads the weights, and moves them between devices, in the smaller
  dtype.

  Args:
    params: float32 weights, or their shapes under `jax.eval_shape`.
    dtype: name of the activations' dtype.
  """

  def cast_leaf(path, leaf):
    return leaf if _stays_float32(path) else leaf.astype(jnp.dtype(dtype))

  return jax.tree_util.tree_map_with_path(cast_leaf, params)


def cast_and_delete(params: Any, dtype: str) -> Any:
  """Returns `cast(params, dtype)`, and deletes each array that was cast.

  Use this function for weights that are not trained. The arrays are cast and
  deleted one after another, so that devices never hold all weights twice.

  Args:
    params: arrays on devices; the new arrays have the same shardings.
    dtype: name of the activations' dtype.
  """

  def replace(path, leaf):
    if _stays_float32(path) or leaf.dtype == jnp.dtype(dtype):
      return leaf
    smaller = jax.device_put(leaf.astype(jnp.dtype(dtype)), leaf.sharding)
    smaller.block_until_ready()  # until then the cast may read the old array
    leaf.delete()
    return smaller

  return jax.tree_util.tree_map_with_path(replace, params)


def _stays_float32(path) -> bool:
  name = jax.tree_util.keystr(path, simple=True, separator='/')
  return _FLOAT32.search(name) is not None
