"""Finds the published limits of the devices of a mesh."""

import jax

from stppo_jax.parallel import topology

# The kind of a device, as jax names it. Numbers and sources: `topology`.
_KINDS = {
  'TPU v4': topology.TPUS['v4'],
  'TPU v5 lite': topology.TPUS['v5e'],
  'TPU v5e': topology.TPUS['v5e'],
  'TPU v5': topology.TPUS['v5p'],
  'TPU v5p': topology.TPUS['v5p'],
  'TPU v6 lite': topology.TPUS['v6e'],
  'TPU v6e': topology.TPUS['v6e'],
  'TPU7x': topology.TPUS['tpu7x'],
  'NVIDIA A100-SXM4-40GB': topology.GPUS['a100'],
  'NVIDIA A100-SXM4-80GB': topology.GPUS['a100'],
  'NVIDIA H100 80GB HBM3': topology.GPUS['h100'],
  'NVIDIA H200': topology.GPUS['h200'],
}


def peak(mesh: jax.sharding.Mesh) -> float | None:
  """Returns the bfloat16 operations per second of all devices of a mesh.

  None if the limits of one of them are not known, as of a CPU.
  """
  kinds = [device.device_kind for device in mesh.devices.flat]
  if any(kind not in _KINDS for kind in kinds):
    return None
  return sum(_KINDS[kind].operations for kind in kinds)
