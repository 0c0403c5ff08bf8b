"""The bytes on one device of the engine, and of an update's temporaries."""

from collections.abc import Mapping
import functools
import math
from typing import Any

import jax

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import functional
from stppo_jax.models import operations
from stppo_jax.models import precision
from stppo_jax.models import roofline
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import publish
from stppo_jax.parallel import sharding
from stppo_jax.training.building import engines

Tree = Any

WEIGHTS, CACHE = 'weights of the engine', 'keys and values of the engine'


def engine_sizes(
  config,
  policy: functional.Model,
  placement: publish.Placement,
) -> dict[str, int]:
  """Returns the bytes of the engine on one device, by name.

  These are its part of the weights, in the dtype of the computation, and its
  part of the keys and values of the slots of a host.
  """
  weights = jax.eval_shape(
    functools.partial(precision.cast, dtype=policy.config.dtype),
    policy.abstract_params,
  )
  options = engines.options(config, mesh_lib.num_hosts(placement.training))
  cache = jax.eval_shape(
    lambda: cache_lib.empty(policy.config, options.slots, options.blocks)
  )
  layouts = {
    WEIGHTS: (
      weights,
      sharding.param_shardings(weights, placement.mesh),
    ),
    CACHE: (
      cache,
      cache_lib.shardings(policy.config, placement.mesh, options.cache_blocks),
    ),
  }
  return {
    name: bytes_per_device(jax.tree.map(_with_layout, *tree_and_layout))
    for name, tree_and_layout in layouts.items()
  }


def copied(
  config,
  policy: functional.Model,
  placement: publish.Placement,
  cache: int,
  *,
  is_compiled: bool,
) -> int:
  """Returns the bytes of keys and values that a device copies to decode.

  With rollout.deterministic=False, a call on at most half of the slots reads
  theirs from a copy. While all slots are active there is none. If
  rollout.batch_rows is less than all, every call is on fewer; then the compiled
  program has the copy among its temporaries, and 0 is returned for it.

  Args:
    config: the config of the run.
    policy: the policy.
    placement: the devices that decode.
    cache: the bytes of the keys and values of all slots of the device.
    is_compiled: whether decode is compiled, so that its temporaries are known.
  """
  options = engines.options(config, mesh_lib.num_hosts(placement.training))
  shards = cache_lib.row_shards(policy.config, placement.mesh)
  slots = options.slots_per_lane // shards
  if is_compiled and options.most_rows < slots:
    return 0
  return cache * options.most_copied(shards) // slots


def collecting(config, engine: Mapping[str, int]) -> dict[str, int]:
  """Returns the bytes of a device that only collects, by name.

  It holds the policy that collects, and those of the steps that come next.
  Policies that differ in their adapters share the base, so the later ones are
  not counted.

  Args:
    config: the config of the run.
    engine: from `engine_sizes`.
  """
  sizes = dict(engine)
  if not config.model.lora.rank:
    ahead = config.rollout.steps_ahead
    sizes['weights of the next steps'] = ahead * sizes[WEIGHTS]
  return sizes


def estimate_temporaries(
  work: roofline.Work, trained: int, *, head_chunk: int
) -> dict[str, int]:
  """Returns the bytes of an update's temporaries on one device, by formula.

  They are within a quarter of what the compiler for TPU plans.

  Args:
    work: the sizes of a step.
    trained: the bytes of the trained float32 weights on one device.
    head_chunk: tokens whose logits are held at once; 0: all.
  """
  shape, tensor = work.shape, work.axes['tensor']
  size, rows = work.itemsize, work.rows_per_device
  tokens = rows * work.length
  queries = shape.num_heads * shape.head_dim
  keys = 2 * shape.num_kv_heads * shape.head_dim
  mlp = shape.intermediate_size
  if shape.num_experts:
    mlp = shape.num_experts_per_tok * shape.moe_intermediate_size
  # Of a token and layer: its input, results of products, and all the rest.
  width = shape.hidden_size
  kept: dict[str, float] = {'full': width}
  kept['dots'] = width + (2 * queries + keys + width + 3 * mlp) / tensor
  kept['all_dots'] = kept['dots']
  kept['none'] = kept['dots'] + 4 * width + (queries + keys + 2 * mlp) / tensor
  if shape.attention == 'xla' and shape.remat in ('all_dots', 'none'):
    kept[shape.remat] += shape.num_heads * work.length / tensor
  # The gradients of a layer, and its weights, of which the next are gathered
  # while it is computed. Attention has queries, keys, values and results, and
  # their gradients; norms of queries and keys are in float32.
  layer = tokens * (6 * width + 6 * mlp / tensor) * size
  layer += tokens * 2 * (2 * queries + keys) / tensor * size
  if shape.qk_norm:
    layer += tokens * 2 * (queries + keys / 2) / tensor * 4
  layer += 2 * sum(operations.layer_weights(shape)) * size / tensor
  losses = rows * work.losses
  chunk = min(head_chunk, losses) if head_chunk else losses
  # Logits and their gradient in float32, the gathered matrix and its gradient.
  vocabulary = shape.vocab_size / tensor
  # The compiler computes both models forward before it goes back.
  models = 2 if work.values == 'own' else 1
  estimated = {
    'gradients': trained,
    f'weights in {shape.dtype}': trained * size // 4 if size < 4 else 0,
    # The kernel's gradients of all layers are in the dtype of the computation.
    f'gradients of experts in {shape.dtype}': (
      trained * size // 4 if shape.num_experts and size < 4 else 0
    ),
    'kept for the backward pass': (
      models * shape.num_layers * tokens * kept[shape.remat] * size
    ),
    'a layer': layer,
    'logits and the output matrix': (
      2 * 4 * chunk * vocabulary + vocabulary * width * (size + 4)
    ),
  }
  return {name: int(x) for name, x in estimated.items() if x}


def _with_layout(leaf: Any, layout: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout)


def bytes_per_device(tree: Tree) -> int:
  """Returns the bytes on one device of a tree of shapes with layouts."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )
