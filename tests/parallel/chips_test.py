"""The peak of a mesh is known where that of all its devices is."""

import jax

from stppo_jax.parallel import topology


class _Device:
  def __init__(self, kind):
    self.device_kind = kind


class _Mesh:
  def __init__(self, *kinds):
    self.devices = self
    self.flat = [_Device(kind) for kind in kinds]


def test_the_peak_is_that_of_all_devices():
  assert (
    topology.peak_operations(_Mesh('TPU v5 lite', 'TPU v5 lite')) == 2 * 197e12
  )
  assert topology.peak_operations(_Mesh('TPU v4', 'abacus')) is None
  assert (
    topology.peak_operations(jax.sharding.Mesh(jax.devices(), ('data',)))
    is None
  )
