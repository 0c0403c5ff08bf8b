"""Whether each host decodes by itself, or all of a slice together."""

import concurrent.futures
import multiprocessing
import os
import types

import jax
import pytest

from stppo_jax.parallel import connected_hosts
from stppo_jax.parallel import topology
from stppo_jax.training import components
from stppo_jax.training import engines
from stppo_jax.training import metrics
from stppo_jax.training import model_files
from stppo_jax.training import span
from tests.parallel import tpu_compiler
from tests.training import runs


def _resolved(try_it, **changes):
  """Returns the span that each of two hosts chooses."""
  address = runs.free_address()

  def one(index):
    hosts = connected_hosts.ConnectedHosts(
      address, index, 2, jax_port=1, start_timeout=30, patience=30
    )
    chosen = span.resolved(
      runs.config(**changes), hosts, try_it=lambda _: try_it(index)
    )
    hosts.leave()
    hosts.close()
    return chosen.rollout.span

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    return list(pool.map(one, range(2)))


@pytest.mark.parametrize('failing', [0, 1])
def test_a_host_that_cannot_compile_makes_all_decode_together(failing):
  problem = lambda index: 'the compiler fails' if index == failing else ''
  assert _resolved(problem) == ['slice', 'slice']


def test_hosts_that_can_compile_decode_alone():
  assert _resolved(lambda _: '') == ['host', 'host']
  assert _resolved(lambda _: 'unused', rollout__span='host') == ['host', 'host']


def test_one_host_decodes_alone():
  placement = components.build(runs.config(rollout__span='slice')).placement
  assert placement is not None and not placement.spans_slice


def test_a_host_tries_the_programs_of_its_own_chips(monkeypatch):
  chips = [
    types.SimpleNamespace(
      platform='tpu', device_kind='TPU v5 lite', coords=[x, y, 0]
    )
    for x in range(4, 8)
    for y in range(4)
  ]
  monkeypatch.setattr(jax, 'devices', lambda: chips)
  monkeypatch.setattr(jax, 'local_devices', lambda: chips[-4:])
  monkeypatch.setattr(span, 'try_host', lambda _, *place: place)
  assert span.try_here(runs.config()) == ('v5e:4x4', (3, 0, 0))
  # What hosts cannot do together, they do alone.
  assert span.try_here(runs.config(rollout__lanes=2)) == ''


class _Abort:
  """Ends the process that it is sent to, as the compiler may."""

  def __reduce__(self):
    return os.abort, ()


def test_a_compiler_that_ends_its_process_is_a_reason(monkeypatch):
  monkeypatch.setattr(span, '_try', print)  # which is there at once
  problem = span.try_host(_Abort(), 'v5e:4x4', (0, 0, 0))
  assert problem == 'the compiler ends its process'


def test_a_compiler_that_hangs_is_a_reason():
  problem = span.try_host(runs.config(), 'v5e:4x4', (0, 0, 0), limit=0)
  assert problem == 'the compiler does not end within 0 s'
  assert not multiprocessing.active_children()


def test_the_plan_of_a_host_is_the_same_alone_and_together():
  held = []
  for chosen in ('host', 'slice'):
    config = _of_slice(4, rollout__span=chosen, rollout__deterministic=False)
    devices = topology.virtual(topology.find('v5e:4x4'))
    mesh = components.build_mesh(config, devices)
    shape = model_files.build_model_config(config, None, mesh)
    learner, placement = components.build_learner(config, shape, mesh, devices)
    assert placement.mesh.size == (4 if chosen == 'host' else 16)
    held.append(
      (
        engines.sizes(config, learner.policy, placement),
        engines.slot_memory(config, learner.policy, placement),
        metrics.work(config, learner, placement, length=4096, losses=2048),
      )
    )
  assert held[0] == held[1]


# The compiler ends the process for the first host with weights on 4 chips.
@pytest.mark.parametrize(
  ('tensor', 'problem'),
  [(1, 'the compiler rejects it: '), (4, 'the compiler ends its process')],
)
@tpu_compiler.marked
def test_the_first_host_of_a_slice_cannot_compile_and_others_can(
  tensor, problem
):
  config = _of_slice(tensor)
  assert span.try_host(config, 'v5e:4x4', (0, 0, 0)).startswith(problem)
  assert span.try_host(config, 'v5e:4x4', (2, 2, 0)) == ''


@pytest.mark.parametrize('tensor', [1, 4])
@tpu_compiler.marked
def test_all_hosts_of_a_slice_can_compile_together(tensor):
  """Each of them, the first one included, compiles the same programs."""
  config = _of_slice(tensor, rollout__span='slice')
  for x, y in ((0, 0), (2, 0), (0, 2), (2, 2)):
    assert span.try_host(config, 'v5e:4x4', (x, y, 0)) == ''


def _of_slice(tensor, **changes):
  return runs.config(
    model__path=str(runs.REPO / 'tests/models/published/qwen2_5_1_5b'),
    model__dtype='bfloat16',
    env__max_length=4096,
    mesh__data=2,
    mesh__fsdp=8,
    updates__minibatch_size=16,
    rollout__tensor=tensor,
    **changes,
  )


@pytest.mark.parametrize('name', ['v5e:4x4', 'v5p:2x2x4', 'v6e:4x8'])
@tpu_compiler.marked
def test_a_slice_is_named_by_its_devices(name):
  assert topology.slice_of(topology.devices(topology.find(name))) == name
