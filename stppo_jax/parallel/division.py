"""Which meshes a model can be cut by.

What the user asked to cut is cut, or the mesh is refused: an axis left whole in
silence would hold every parameter on every device, or compute every head there.
"""

from collections.abc import Mapping

import jax


def check(
  mesh: jax.sharding.Mesh,
  cut: Mapping[str, Mapping[str, int]],
  *,
  num_kv_heads: int,
) -> None:
  """Whether a mesh divides what it cuts.

  Key and value heads that are fewer than the devices of `tensor` are shared: of
  4 heads on 8 devices, two devices compute the same one.

  Args:
    mesh: from `make_mesh`.
    cut: axis to the sizes it must divide, by name.
    num_kv_heads: `tensor` divides them, or is a multiple of them.

  Raises:
    ValueError: it does not; the sizes it fails, and what would do. One line.
  """
  for axis, sizes in cut.items():
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
  return heads % devices == 0 or devices % heads == 0
