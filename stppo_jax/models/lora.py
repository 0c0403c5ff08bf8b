"""Adds low-rank adapters (LoRA) to frozen matrices.

    y = x W + s (x A) B,    s = alpha / rank, or alpha / sqrt(rank) (rsLoRA)

with W [in, out], A [in, rank] and B [rank, out]. The matrices of experts have
an additional leading axis over experts. Sources: Hu et al., 2021, arXiv
2106.09685; Kalajdzievski, 2023, arXiv 2312.03732.

Weights are in two trees with the same nesting: the frozen base weights, and the
adapters. The leaves `lora_a` and `lora_b` of an adapter are at the path where
the base weights have the `kernel` that is adapted. `join` makes one tree of
both, which a model takes as its parameters. `merge` makes a tree without
adapters, in which the adapters are added to the kernels. At first A is random
and B is zero, so a model with fresh adapters computes the same bits as its
base.

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
EXPERTS = 'moe/'  # occurs in the names of the matrices of experts


@dataclasses.dataclass(frozen=True)
class Lora:
  """Chooses the matrices that have adapters, with their ranks and scales.

  Attributes:
    rank: the number of columns of A and of rows of B.
    alpha: the numerator of the scale s, see the module's docstring.
    targets: regular expression that is searched for in the names of matrices,
      such as 'layers/q_proj'. Matrices in the stack 'dense_layers' are named
      'layers/...' for this search too.
    rank_pattern, alpha_pattern: other ranks and alphas for some matrices, such
      as 'down_proj$=8'. The part before '=' is searched for in the name of a
      matrix. The first pattern that is found replaces `rank` or `alpha` by its
      number.
    rslora: whether the scale is alpha / sqrt(rank) and not alpha / rank.
  """

  rank: int
  alpha: float
  targets: str
  rank_pattern: tuple[str, ...] = ()
  alpha_pattern: tuple[str, ...] = ()
  rslora: bool = False

  def rank_of(self, name: str) -> int:
    """Returns the rank of the adapter of the layer with this name."""
    return int(_matching(self.rank_pattern, name, self.rank))

  def scale_of(self, name: str) -> float:
    """Returns the scale s of the adapter of the layer with this name."""
    rank = self.rank_of(name)
    alpha = _matching(self.alpha_pattern, name, self.alpha)
    return alpha / (math.sqrt(rank) if self.rslora else rank)

  def adapts(self, name: str) -> bool:
    """Returns whether the layer of this name has an adapter.

    A model has many experts, so the matrices of experts have adapters only if
    the text that `targets` matches contains 'moe/'. The expressions `moe/` and
    `.*` match such a text, and `gate_proj$` does not.
    """
    found = re.search(self.targets, _in_layers(name))
    return found is not None and (EXPERTS in found[0] or EXPERTS not in name)


def _matching(patterns: Iterable[str], name: str, default: float) -> float:
  """Returns the number of the first pattern that fits a name, or the default.

  A pattern is 'EXPRESSION=NUMBER'. A pattern fits a name if the regular
  expression is found in the name.
  """
  for pattern in patterns:
    expression, _, number = pattern.rpartition('=')
    if re.search(expression, _in_layers(name)):
      return float(number)
  return default


def _in_layers(name: str) -> str:
  """Returns a matrix's name, with 'dense_layers/' replaced by 'layers/'."""
  return name.removeprefix('dense_')


def adapted(options: Lora, names: Iterable[str]) -> list[str]:
  """Returns the names of the linear layers that have adapters, sorted.

  Args:
    options: the targets, and the patterns of ranks and alphas.
    names: the names of all linear layers of a model.

  Raises:
    ValueError: an expression is found in no name, so it may be misspelt.
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
  """Returns the error to raise if an expression is found in no name."""
  choices = ', '.join(names)
  return ValueError(
    f'config.model.lora.{key}={text!r}: matches none of {choices}'
  )


def init(options: Lora, kernels: Mapping[str, Any], key: Array) -> Params:
  """Returns fresh adapters.

  A is uniform between -1 / sqrt(in) and 1 / sqrt(in), as in the code of Hu et
  al.; B is zero.

  Args:
    options: the ranks and the targets.
    kernels: for each name of a linear layer, its stacked kernel [layers, in,
      out] or [layers, experts, in, out], or an object with the same `shape`.
    key: random key.

  Raises:
    ValueError: see `adapted`.
  """
  adapters = {}
  for number, name in enumerate(adapted(options, kernels)):
    # The random key depends on the index of the name among the sorted names,
    # and not on the order in which a module lists its layers.
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
  """Returns one tree with the leaves of both trees; no array is copied.

  The two trees share no leaf.
  """
  leaves = traverse_util.flatten_dict(one) | traverse_util.flatten_dict(other)
  return traverse_util.unflatten_dict(leaves)


def merge(options: Lora, params: Params, name: str = '') -> Params:
  """Returns weights without adapters, in which W + s A B takes the place of W.

  A merged kernel has the wider of the dtypes of base and adapters, because
  rounding to a bfloat16 base would lose small float32 adapters.

  Args:
    options: the scales of the adapters.
    params: the result of `join`. A tree without adapters is returned as it is.
    name: the name of the layer whose subtree is `params`; '' for the tree of a
      whole model.
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
