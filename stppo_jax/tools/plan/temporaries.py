"""The bytes of an update's temporaries on one device, by formula."""

from stppo_jax.models import operations
from stppo_jax.models import roofline


def estimate(
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
