"""Adds low-rank adapters (LoRA) to frozen matrices.

    y = x W + s (x A) B,    s = alpha / rank, or alpha / sqrt(rank) (rsLoRA)

with W [in, out], A [in, rank] and B [rank, out]; the matrices of experts have
an axis of experts before these. Sources: Hu et al., 2021, arXiv 2106.09685;
Kalajdzievski, 2023, arXiv 2312.03732.

There are two trees of weights with the same nesting: the frozen base, and the
adapters, whose leaves `lora_a` and `lora_b` have the place beside the `kernel`
that they adapt. `join` makes one tree of both, which is the input of a model.
`merge` makes a tree without adapters, in which they are added to the kernels. A
is random at first and B is zero, so that a model with fresh adapters computes
the same bits as its base.

Layers are stacked on the leading axis of every leaf.
"""

from collections.abc import Iterable, Mapping
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
EXPERTS = 'moe/'  # in the names of the matrices of experts


@dataclasses.dataclass(frozen=True)
class Lora:
  """Chooses the matrices that have adapters, and the size of these.

  Attributes:
    rank: columns of A, rows of B.
    alpha: see the module's docstring.
    targets: regular expression, searched for in names like 'layers/q_proj',
      also of the layers that are stacked in 'dense_layers'.
    rank_pattern, alpha_pattern: ranks and alphas of some layers, such as
      'down_proj$=8': the number behind the first expression that is found in a
      name takes the place of `rank` or `alpha`.
    rslora: whether the scale falls with the root of the rank only.
  """

  rank: int
  alpha: float
  targets: str
  rank_pattern: tuple[str, ...] = ()
  alpha_pattern: tuple[str, ...] = ()
  rslora: bool = False

  def rank_of(self, name: str) -> int:
    """Returns the rank of the adapter of a layer, by its name."""
    return int(_matching(self.rank_pattern, name, self.rank))

  def scale_of(self, name: str) -> float:
    """Returns the factor of A B, by the name of the layer."""
    rank = self.rank_of(name)
    alpha = _matching(self.alpha_pattern, name, self.alpha)
    return alpha / (math.sqrt(rank) if self.rslora else rank)

  def adapts(self, name: str) -> bool:
    """Returns whether the layer of this name has an adapter.

    Experts are many, so an expression must name them on purpose, as `moe/` or
    `.*` does: `gate_proj$` is not enough.
    """
    found = re.search(self.targets, _in_layers(name))
    return found is not None and (EXPERTS in found[0] or EXPERTS not in name)


def _matching(patterns: Iterable[str], name: str, default: float) -> float:
  """Returns the number of the first pattern that is found in a name."""
  for pattern in patterns:
    expression, _, number = pattern.rpartition('=')
    if re.search(expression, _in_layers(name)):
      return float(number)
  return default


def _in_layers(name: str) -> str:
  """Returns the name by which expressions find a matrix of any stack."""
  return name.removeprefix('dense_')


def adapted(options: Lora, names: Iterable[str]) -> list[str]:
  """Returns the names of the linear layers that have adapters, sorted.

  Raises:
    ValueError: an expression matches none: it may be misspelt.
  """
  names = sorted(names)
  found = [name for name in names if options.adapts(name)]
  if not found:
    raise _matches_none('targets', options.targets, names)
  for key in ('rank_pattern', 'alpha_pattern'):
    for pattern in getattr(options, key):
      expression = pattern.rpartition('=')[0]
      if not any(re.search(expression, _in_layers(name)) for name in found):
        raise _matches_none(key, pattern, found)
  return found


def _matches_none(key: str, text: str, names: Iterable[str]) -> ValueError:
  """Returns the error of an expression that is found in no name."""
  choices = ', '.join(names)
  return ValueError(
    f'config.model.lora.{key}={text!r}: matches none of {choices}'
  )


def init(options: Lora, kernels: Mapping[str, Any], key: Array) -> Params:
  """Returns fresh adapters.

  A is uniform in ±1 / sqrt(in), as in the authors' code; B is zero.

  Args:
    options: rank and targets.
    kernels: name of a linear layer -> its stacked kernel [layers, in, out] or
      [layers, experts, in, out], or anything that has its shape.
    key: random key.

  Raises:
    ValueError: see `adapted`.
  """
  adapters = {}
  for number, name in enumerate(adapted(options, kernels)):
    # The key depends on the place among sorted names, not on the order in which
    # a module lists its layers.
    *outer, din, dout = kernels[name].shape
    rank = options.rank_of(name)
    bound = 1 / math.sqrt(din)
    adapters[f'{name}/{A}'] = jax.random.uniform(
      jax.random.fold_in(key, number),
      (*outer, din, rank),
      minval=-bound,
      maxval=bound,
    )
    adapters[f'{name}/{B}'] = jnp.zeros((*outer, rank, dout))
  return traverse_util.unflatten_dict(adapters, sep='/')


def join(one: Params, other: Params) -> Params:
  """Returns both trees, which share no leaf, as one; no array is copied."""
  leaves = traverse_util.flatten_dict(one) | traverse_util.flatten_dict(other)
  return traverse_util.unflatten_dict(leaves)


def merge(options: Lora, params: Params, name: str = '') -> Params:
  """Returns weights without adapters that compute the same: W + s A B.

  A merged kernel has the wider dtype of base and adapters, because rounding to
  a base in bfloat16 would lose small adapters in float32.

  Args:
    options: scale of the adapters.
    params: the result of `join`; a tree without adapters comes back as it is.
    name: the name of the layer that `params` are; '' for those of a model.
  """
  result = {
    key: merge(options, value, f'{name}/{key}'.lstrip('/'))
    if isinstance(value, Mapping)
    else value
    for key, value in params.items()
    if key not in (A, B)
  }
  if A in params:
    product = jnp.matmul(
      params[A], params[B], precision=jax.lax.Precision.HIGHEST
    )
    kernel = params['kernel']
    result['kernel'] = kernel + options.scale_of(name) * product
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
