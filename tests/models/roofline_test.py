"""Formulas of a step against programs that were compiled for TPU slices.

The table of docs/sharding.md has what the compiler has counted; nothing is
compiled here.
"""

import dataclasses
import functools
import pathlib
import re

import pytest

from benchmarks import slices
from stppo_jax.models import flops
from stppo_jax.models import roofline
from stppo_jax.parallel import topology
from stppo_jax.tools.plan import plan as plan_lib

_PAGE = pathlib.Path(slices.__file__).parents[1] / 'docs' / 'sharding.md'
_GIB = 2**30
_ROW = re.compile(
  r'\| (\w+) (v\S+) \| [\d, ]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (\d+) '
  r'\| (\d+) \|'
)
_VERDICT = re.compile(
  r'^\| (\w+) (v\S+) \|.*\| ([\d.]+) / ([\d.]+) \| ([a-z ]+) / ([a-z ]+) \|$',
  re.M,
)


def _table(row):
  """Returns what stands in rows of this form, for each model and slice."""
  rows = row.findall(_PAGE.read_text('utf-8'))
  return {f'{model}@{chips}': found for model, chips, *found in rows}


_COMPILED = _table(_ROW)
# GiB and verdict of the compiler, and of the formulas.
_VERDICTS = _table(_VERDICT)

# GiB at the peak of an update, with its arguments, by libtpu 0.0.42.
_PEAKS = {
  'qwen2_5_1_5b@v5e:2x4': 9.46,
  'qwen2_5_3b@v5e:4x4': 8.81,
  'qwen2_5_7b@v5e:8x8': 7.27,
}


@functools.cache
def _plan(name):
  return plan_lib.make(
    slices.config(name),
    length=4096,
    loss_fraction=0.5,
    topology=topology.find(name.partition('@')[2]),
  )


@pytest.mark.parametrize('name', _PEAKS)
def test_the_estimate_of_an_update_is_its_peak(name):
  plan = _plan(name)
  total = plan.held.learns - plan.held.sizes['reference']
  total += sum(plan.estimated.values())
  assert total / _GIB == pytest.approx(_PEAKS[name], rel=0.05)


@pytest.mark.parametrize('name', _COMPILED)
def test_formulas_agree_with_compiled_programs(name):
  state, _, _, sent, products = map(float, _COMPILED[name])
  plan = _plan(name)
  held = sum(x for n, x in plan.held.sizes.items() if 'engine' not in n)
  assert held / _GIB == pytest.approx(state, abs=0.06)  # as it is printed
  work, (part,) = plan.work, [plan.phases['update']]
  assert work.updates == 2  # of which the table has one
  # The compiled number leaves out attention: four passes of two models, and
  # one more of the policy.
  tokens = work.trajectories * work.length / plan.topology.num_devices
  attention = 9 * tokens * flops.attention_operations(work.shape, work.length)
  # Kernels of experts compute tiles with rows of two experts twice. On devices
  # with different experts they say what a full block takes.
  rel = 0.05 if work.shape.num_experts else 0.03
  computed = (part.computed - attention) / 2e12
  if work.axes['expert'] == 1:
    assert computed == pytest.approx(products, rel=rel)
  else:
    assert computed < products < 1.5 * computed
  formula = sum(part.traffic.values()) / 2 / _GIB
  assert 0.85 * sent < formula < 1.05 * sent


@pytest.mark.parametrize('name', _VERDICTS)
def test_formulas_and_the_compiler_agree_about_what_fits(name):
  compiled, formula, by_compiler, by_formula = _VERDICTS[name]
  plan = _plan(name)
  assert plan.total / _GIB == pytest.approx(float(formula), abs=0.06)  # printed
  assert by_compiler == by_formula == ('fits' if plan.fits else 'does not fit')
  if plan.fits:  # otherwise the compiler does not say how much a program needs
    assert float(formula) == pytest.approx(float(compiled), rel=0.1)


def test_the_table_has_a_verdict_of_every_pair():
  assert _VERDICTS.keys() == slices.SETTINGS.keys()


def _work(**changes):
  return dataclasses.replace(_plan('qwen2_5_1_5b@v5e:2x4').work, **changes)


def _phases(name='v5e:2x4', **changes):
  return roofline.phases(_work(**changes), topology.find(name))


def test_kernels_read_no_page_before_a_window():
  layers = _work().shape.num_layers
  window = 512
  windows = (window,) * (layers - 1) + (0,)

  def cached(attention):
    shape = dataclasses.replace(
      _work().shape, windows=windows, attention=attention
    )
    work = _work(shape=shape, length=4096, engine_length=8192)
    return (work.decode_bytes - work.engine_weights) / work.engine_cache

  assert cached('xla') == 0.25
  seen = sum(min(n, window) for n in range(4096)) / 4096
  expected = ((layers - 1) * seen + 2048) / layers / 8192
  for kernel in ('splash', 'cudnn'):
    assert cached(kernel) == pytest.approx(expected, rel=1e-2)


def test_what_updates_send_follows_from_the_weights():
  work = _work(
    axes={'data': 1, 'fsdp': 4, 'expert': 1, 'tensor': 1}, values='none'
  )
  work = dataclasses.replace(
    work, minibatch=8, microbatch=4, updates=3, statistics=False
  )
  width, tokens = work.shape.hidden_size, 1 * work.length  # a row per device
  # Two microbatches gather the layers twice and scatter their gradients once;
  # the output matrix is gathered once, and its gradient scattered each time.
  layers = 2 * (2 + 1) * work.weights
  head = (1 + 2) * work.output
  # Each microbatch exchanges embedded tokens forward and backward.
  exchanged = 2 * 2 * tokens * width
  numbers = layers + head + exchanged
  assert roofline.update_sent(work) == pytest.approx(
    3 * numbers * 3 / 4 * work.itemsize
  )


@pytest.mark.parametrize('dense_layers', [(), (1,)])
def test_tokens_go_to_experts_whose_weights_stay(dense_layers):
  axes = {'data': 1, 'fsdp': 2, 'expert': 4, 'tensor': 1}
  work = _work(axes=axes, values='none', minibatch=8, microbatch=8, updates=1)
  experts = work.weights // 2
  shape = dataclasses.replace(work.shape, dense_layers=dense_layers)
  if dense_layers:
    shape = dataclasses.replace(
      shape, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
    )
  work = dataclasses.replace(work, experts=experts, shape=shape)
  shape, tokens = work.shape, work.length  # a row per device
  # Weights are gathered twice, and scattered once. Those of experts are cut
  # over `fsdp` alone: a device has a quarter of them.
  others = 3 * (work.weights - experts) + 2 * work.output
  weights = others * 7 / 8 + 3 * experts / 4 / 2
  exchanged = 2 * tokens * shape.hidden_size * 7 / 8  # the embedding
  # Each layer gathers the tokens of three other devices forward, once more as
  # it is computed again, and the gradients of results; and it scatters twice.
  with_experts = shape.num_layers - len(dense_layers)
  visits = (3 + 2) * with_experts * tokens * shape.hidden_size * 3
  assert roofline.update_sent(work) == pytest.approx(
    (weights + exchanged + visits) * work.itemsize
  )


def test_axes_that_leave_a_host_are_slower():
  # 16 devices are two hosts of GPUs.
  inside = {'data': 2, 'fsdp': 8, 'expert': 1, 'tensor': 1}
  across = {'data': 8, 'fsdp': 2, 'expert': 1, 'tensor': 1}
  slow, fast = (
    _phases('gpu:h100:16', axes=axes, microbatch=16)['update']
    for axes in (across, inside)
  )
  sent = slow.traffic['all-reduce', 'data']
  limits = topology.find('gpu:h100:16').limits
  assert slow.bound >= sent / limits.network
  key = 'all-gather', 'fsdp'
  assert fast.traffic[key] / limits.links < fast.bound


def test_a_remote_engine_decodes_elsewhere():
  assert list(_phases(engine_tensor=0)) == ['annotate', 'update']
