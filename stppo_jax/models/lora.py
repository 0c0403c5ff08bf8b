"""Adds low-rank adapters (LoRA) to frozen matrices.

    y = x W + (alpha / rank) (x A) B

with W [in, out], A [in, rank] and B [rank, out]. Source: Hu et al., 2021, arXiv
2106.09685.

There are two trees of weights with the same nesting: the frozen base, and the
adapters, whose leaves `lora_a` and `lora_b` have the place beside the `kernel`
that they adapt. `join` makes one tree of both, which is the input of a model.
`merge` makes a tree without adapters, in which they are added to the kernels. A
is random at first and B is zero, so that a model with fresh adapters computes
the same bits as its base.

Layers are stacked on the leading axis of every leaf.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import math
import re
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp

Array = jax.Array
Params = Mapping[str, Any]

A, B = 'lora_a', 'lora_b'


@dataclasses.dataclass(frozen=True)
class Lora:
  """Chooses the matrices that have adapters, and the size of these.

  Attributes:
    rank: columns of A, rows of B.
    alpha: the product is scaled by alpha / rank.
    targets: regular expression, searched for in names like 'layers/q_proj'.
  """

  rank: int
  alpha: float
  targets: str

  @property
  def scale(self) -> float:
    """The factor of A B."""
    return self.alpha / self.rank


def adapted(options: Lora, names: Iterable[str]) -> list[str]:
  """Returns the names of the linear layers that have adapters, sorted.

  Raises:
    ValueError: the expression matches no name.
  """
  names = sorted(names)
  found = [name for name in names if re.search(options.targets, name)]
  if not found:
    raise ValueError(
      f'lora targets={options.targets!r}: matches none of ' + ', '.join(names)
    )
  return found


def init(options: Lora, kernels: Mapping[str, Any], key: Array) -> Params:
  """Returns fresh adapters.

  A is uniform in ±1 / sqrt(in), as in the authors' code; B is zero.

  Args:
    options: rank and targets.
    kernels: name of a linear layer -> its stacked kernel [layers, in, out], or
      anything that has its shape.
    key: random key.

  Raises:
    ValueError: the targets match no name.
  """
  adapters = {}
  for number, name in enumerate(adapted(options, kernels)):
    # The key depends on the place among sorted names, not on the order in which
    # a module lists its layers.
    layers, din, dout = kernels[name].shape
    bound = 1 / math.sqrt(din)
    adapters[f'{name}/{A}'] = jax.random.uniform(
      jax.random.fold_in(key, number),
      (layers, din, options.rank),
      minval=-bound,
      maxval=bound,
    )
    adapters[f'{name}/{B}'] = jnp.zeros((layers, options.rank, dout))
  return traverse_util.unflatten_dict(adapters, sep='/')


def join(one: Params, other: Params) -> Params:
  """Returns both trees, which share no leaf, as one; no array is copied."""
  leaves = traverse_util.flatten_dict(one) | traverse_util.flatten_dict(other)
  return traverse_util.unflatten_dict(leaves)


def merge(options: Lora, params: Params) -> Params:
  """Returns weights without adapters that compute the same: W + alpha/rank A B.

  A merged kernel has the wider dtype of base and adapters, because rounding to
  a base in bfloat16 would lose small adapters in float32.

  Args:
    options: scale of the adapters.
    params: the result of `join`; a tree without adapters comes back as it is.
  """
  result = {
    name: merge(options, value) if isinstance(value, Mapping) else value
    for name, value in params.items()
    if name not in (A, B)
  }
  if A in params:
    product = jnp.matmul(
      params[A], params[B], precision=jax.lax.Precision.HIGHEST
    )
    kernel = params['kernel']
    result['kernel'] = kernel + options.scale * product
  return result


def split(params: Params) -> tuple[Params, dict[str, Params]]:
  """Returns the tree without adapters, and the adapters by layer name."""
  base, adapters = {}, {}
  for (*path, name), leaf in traverse_util.flatten_dict(params).items():
    if name in (A, B):
      adapters.setdefault('/'.join(path), {})[name] = leaf
    else:
      base[(*path, name)] = leaf
  return traverse_util.unflatten_dict(base), adapters
