"""How many operations the known accelerators can do."""

import jax

# Dense operations per second in bfloat16 of one device of jax, by its kind.
# TPUs: the pages of the versions at cloud.google.com/tpu/docs (v4, v5e, v5p,
# v6e); a device of these is a whole chip. NVIDIA: the data sheets of A100,
# H100, H200 and L4, which quote twice as much for sparse matrices.
PEAKS = {
  'TPU v4': 275e12,
  'TPU v5 lite': 197e12,
  'TPU v5e': 197e12,
  'TPU v5': 459e12,
  'TPU v5p': 459e12,
  'TPU v6 lite': 918e12,
  'TPU v6e': 918e12,
  'NVIDIA A100-SXM4-40GB': 312e12,
  'NVIDIA A100-SXM4-80GB': 312e12,
  'NVIDIA A100 80GB PCIe': 312e12,
  'NVIDIA H100 80GB HBM3': 989e12,
  'NVIDIA H100 PCIe': 756e12,
  'NVIDIA H200': 989e12,
  'NVIDIA L4': 121e12,
}


def peak(mesh: jax.sharding.Mesh) -> float | None:
  """Returns the operations per second of all devices; None if not known."""
  kinds = [device.device_kind for device in mesh.devices.flat]
  if any(kind not in PEAKS for kind in kinds):
    return None
  return sum(PEAKS[kind] for kind in kinds)
