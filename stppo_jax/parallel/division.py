"""Checks that a mesh divides a model.

A mesh that does not is refused. Replicating the axis instead would silently
hold every parameter on every device, or compute every head there.
"""

from collections.abc import Mapping

import jax


def check(
  mesh: jax.sharding.Mesh,
  sharded: Mapping[str, Mapping[str, int]],
  *,
  num_kv_heads: int,
) -> None:
  """Raises ValueError unless the mesh divides what it shards.

  Fewer heads of keys and values than devices along `tensor` are shared: of 4
  heads on 8 devices, two devices each compute the same head.

  Args:
    mesh: the result of `make_mesh`.
    sharded: for each mesh axis, the sizes that it must divide, by name.
    num_kv_heads: number of key and value heads; the size of `tensor` must
      divide it or be a multiple of it.

  Raises:
    ValueError: one line with the sizes that an axis does not divide and the
      numbers of devices that would fit.
  """
  for axis, sizes in sharded.items():
    sharers = {'num_kv_heads': num_kv_heads} if axis == 'tensor' else {}
    devices = mesh.shape[axis]
    wrong = [
      f'{name}={size}' for name, size in sizes.items() if size % devices
    ] + [
      f'{name}={size} (nor is it a multiple)'
      for name, size in sharers.items()
      if not _shared(size, devices)
    ]
    if wrong:
      fitting = [
        str(n)
        for n in range(1, mesh.size + 1)
        if not any(size % n for size in sizes.values())
        and all(_shared(size, n) for size in sharers.values())
      ]
      raise ValueError(
        f'mesh {axis}={devices} does not divide {", ".join(wrong)}; of up to '
        f'{mesh.size} devices, {axis} may have {", ".join(fitting)}'
      )


def _shared(heads: int, devices: int) -> bool:
  """Returns whether every device can have whole heads, alone or shared."""
  return heads % devices == 0 or devices % heads == 0
