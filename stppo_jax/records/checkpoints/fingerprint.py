"""Describes the leaves of a state by name, shape, dtype and fingerprint."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ODD = np.uint32(0x9E3779B1)  # spreads the weights of positions over 32 bits


def fingerprints(arrays: list[jax.Array]) -> list[int]:
  """Returns a checksum in [0, 2^32) for each array, whatever its sharding is.

      sum_i weight(i) bits(x_i)  mod 2^32

  Here i is the row-major position of an element, and weight(i) is odd. A
  flipped bit changes the sum by an odd weight times a power of two, which is
  not 0 mod 2^32, so every single flipped bit is noticed. An integer sum does
  not depend on the order of its terms, and therefore not on the mesh.
  """
  return [int(number) for number in np.asarray(begin(arrays))]


# One program handles all arrays. Each sum over a sharded array is a collective.
# On CPU devices, many small programs with a collective each can block each
# other: they share threads, and each program holds some threads while it waits
# for more.
@jax.jit
def begin(arrays: list[jax.Array]) -> jax.Array:
  """Returns a fingerprint for each array, without waiting for the devices."""
  return jnp.stack([_fingerprint(x) for x in arrays])


def _fingerprint(x: jax.Array) -> jax.Array:
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  size = x.dtype.itemsize
  unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[size]
  # An element of eight bytes becomes two 32-bit words on a new last axis.
  words = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
  position = jnp.zeros(words.shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(words.ndim)):
    index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    position = position + index * np.uint32(stride % 2**32)
    stride *= words.shape[axis]
  return jnp.sum(words * (position * _ODD | np.uint32(1)), dtype=jnp.uint32)


def named(tree: Any) -> dict[str, Any]:
  """Returns a dict from the dotted path of each leaf of a pytree to the leaf.

  A dotted path is a text such as 'policy.norm'.
  """
  return {
    jax.tree_util.keystr(path, simple=True, separator='.') or 'state': leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def kind(leaf: Any) -> dict[str, Any]:
  """Returns the shape and dtype of a leaf as a manifest stores them."""
  return {'shape': list(leaf.shape), 'dtype': str(leaf.dtype)}


def difference(saved: dict[str, dict], wanted: dict[str, Any]) -> str:
  """Returns a message about the first leaf that differs; '' if none differs.

  The leaves are compared in the order of their names.

  Args:
    saved: name of a leaf to the result of `kind`, as in a manifest.
    wanted: name of a leaf to a leaf with the expected shape and dtype.
  """
  for name in sorted(saved.keys() | wanted.keys()):
    expected = _describe(kind(wanted[name])) if name in wanted else 'nothing'
    found = _describe(saved[name]) if name in saved else 'nothing'
    if found != expected:
      return f'leaf {name}: expected {expected}, found {found}'
  return ''


def _describe(kind: dict[str, Any]) -> str:
  """Returns a leaf's kind as text, such as float32[16,8]."""
  return f'{kind["dtype"]}[{",".join(map(str, kind["shape"]))}]'
