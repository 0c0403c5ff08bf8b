"""Bytes and operations of programs, compared with counts by hand."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.tools.plan import hlo
from stppo_jax.tools.plan import hlo_cost

_TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %sum = f32[] add(%x, %y)
}

%body (arg: (s32[], f32[4,6])) -> (s32[], f32[4,6]) {
  %part = f32[4,6]{1,0:T(8,128)} get-tuple-element(%arg), index=1
  %both = (f32[4,6]{1,0}, /*index=1*/bf16[2]{0}) all-reduce(%part, %small), \
replica_groups=[2,4]<=[8], to_apply=%add
  %whole = f32[8,6]{1,0} all-gather(%part), replica_groups={{0,1},{2,3}}
}

%cond (arg: (s32[], f32[4,6])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[4,6]) -> f32[4,6] {
  %p = f32[4,6]{1,0} parameter(0)
  %loop = (s32[], f32[4,6]{1,0}) while(%p), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %piece = f32[1,6]{1,0} reduce-scatter(%p), \
replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}, use_ids=true
  %some = f32[4,6]{1,0} all-reduce(%p), \
replica_groups=mesh['axis_0'=8], device_ids=([2,4]T(1,0)) {'axis_0':(1)2}, \
to_apply=%add
  %begun = (f32[4,6]{1,0}, f32[32,6]{1,0}) all-gather-start(%p)
  ROOT %moved = f32[4,6]{1,0} collective-permute(%p), pairs={{0,1}}
}
"""


def test_collectives_of_a_program_are_counted_along_axes_of_the_mesh():
  mesh = {'data': 2, 'fsdp': 2, 'tensor': 2}
  found = [
    (c.kind, c.size, c.times, c.sent, ''.join(map(str, c.group)), *c.axes(mesh))
    for c in hlo_cost.collectives(hlo.read(_TEXT))
  ]
  everywhere = '01234567', 'data', 'fsdp', 'tensor'
  assert found == [
    ('all-reduce', 100, 5, 5 * 2 * 100 * 3 / 4, '0123', 'fsdp', 'tensor'),
    ('all-gather', 192, 5, 5 * 192 / 2, '01', 'tensor'),
    # Every second device of 4 x 1 x 2; half of [2, 4] transposed.
    ('reduce-scatter', 96, 1, 96 * 3 / 4, '0246', 'data', 'fsdp'),
    ('all-reduce', 96, 1, 96, '02', 'fsdp'),
    ('all-gather', 768, 1, 768 * 7 / 8, *everywhere),
    ('collective-permute', 96, 1, 96, *everywhere),
  ]


# The compiler for TPU does not tell how often a loop iterates; it divides a
# gather into kernels that run beside others; and it writes a reduce-scatter as
# a kernel with an all-reduce, whose channel another one may have too.
_TPU_TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=16

%begin (p: bf16[1,8]) -> (bf16[1,8], bf16[16,8]) {
  %part = bf16[1,8]{1,0} parameter(0)
  %all-gather.1 = bf16[16,8]{1,0} all-gather(%part), channel_id=7, \
replica_groups=[1,16]<=[16], dimensions={0}
  ROOT %begun = (bf16[1,8]{1,0}, bf16[16,8]{1,0}) custom-call(%all-gather.1)
}

%beside (p: bf16[1,8], x: bf16[4,16], w: bf16[16,8]) -> bf16[4,8] {
  %part.2 = bf16[1,8]{1,0} parameter(0)
  %all-gather.2 = bf16[16,8]{1,0} all-gather(%part.2), channel_id=7, \
replica_groups=[1,16]<=[16], dimensions={0}
  %x = bf16[4,16]{1,0} parameter(1)
  %w = bf16[16,8]{1,0} parameter(2)
  ROOT %product = bf16[4,8]{1,0} convolution(%x, %w), dim_labels=bf_io->bf
}

%all-reduce-scatter.3 (p: bf16[16,8]) -> bf16[1,8] {
  %whole = bf16[16,8]{1,0} parameter(0)
  %sum = bf16[16,8]{1,0} all-reduce(%whole), channel_id=9, \
replica_groups=[1,16]<=[16], to_apply=%add
  ROOT %piece = bf16[1,8]{1,0} dynamic-slice(%sum, %at, %zero)
}

%all-reduce-scatter.4 (p: bf16[32,8]) -> bf16[2,8] {
  %whole.2 = bf16[32,8]{1,0} parameter(0)
  %sum.2 = bf16[32,8]{1,0} all-reduce(%whole.2), channel_id=9, \
replica_groups=[1,16]<=[16], to_apply=%add
  ROOT %piece.2 = bf16[2,8]{1,0} dynamic-slice(%sum.2, %at, %zero)
}

%body (arg: (s32[], bf16[1,8])) -> (s32[], bf16[1,8]) {
  %start = (bf16[1,8]{1,0}, bf16[16,8]{1,0}) fusion(%mine), kind=kCustom, \
calls=%begin
  %fusion.1 = bf16[4,8]{1,0} fusion(%start, %a, %b), kind=kOutput, \
calls=%beside, backend_config={"window_config":{"estimated_cycles":"250"}}
  %fusion.2 = bf16[1,8]{1,0} fusion(%c), kind=kCustom, \
calls=%all-reduce-scatter.3
  %fusion.3 = bf16[2,8]{1,0} fusion(%d), kind=kCustom, \
calls=%all-reduce-scatter.4
}

%condition (arg: (s32[], bf16[1,8])) -> pred[] {
  %constant.4 = s32[]{:T(128)} constant(28)
  ROOT %less = pred[] compare(%at, %constant.4), direction=LT
}

ENTRY %main (p: bf16[1,8]) -> bf16[1,8] {
  %p = bf16[1,8]{1,0} parameter(0)
  %loop = (s32[], bf16[1,8]{1,0}) while(%p), condition=%condition, body=%body
  %heads = bf16[4,2,3]{2,1,0} convolution(%q, %k), window={size=2 \
pad=1_1 rhs_reversal=1}, dim_labels=bf0_0oi->b0f
  %sum.3 = f32[8]{0} fusion(%p), kind=kCustom, calls=%scatter, \
backend_config={"estimated_cycles":"9223372036854775807"}
  ROOT %copy = bf16[1,8]{1,0} copy(%p), backend_config={"estimated_cycles":"5"}
}
"""


def test_programs_for_tpu_are_counted():
  collectives = hlo_cost.collectives(hlo.read(_TPU_TEXT))
  assert [(c.kind, c.size) for c in collectives] == [
    ('all-gather', 16 * 8 * 2),
    ('reduce-scatter', 16 * 8 * 2),
    ('reduce-scatter', 32 * 8 * 2),
  ]
  assert {(c.devices, c.times) for c in collectives} == {(16, 28)}
  # Of the scatter there is no estimate.
  assert hlo_cost.estimated_cycles(hlo.read(_TPU_TEXT)) == 28 * 250 + 5
  assert hlo_cost.estimated_cycles(hlo.read(_TEXT)) == 0


def test_convolutions_that_are_products_are_counted():
  loop = 28 * 2 * 4 * 16 * 8  # [4, 16] x [16, 8]
  (heads,) = re.findall('  %heads.*\n', _TPU_TEXT)
  q, k = (
    f'  %%{name} = bf16[%s]{{2,1,0}} parameter({n})\n'
    for n, name in enumerate('qk', 1)
  )
  # [4, 5] x [5, 3] for each of two heads, of which the window adds padding.
  text = _TPU_TEXT.replace(heads, q % '4,5,1' + k % '2,3,5' + heads)
  found = hlo_cost.operations(hlo.read(text)) - loop
  assert found == 2 * 4 * 5 * 3 * 2
  # Axis 0 is the batch: 16 products of [6, 128] x [128, 64]; 15 holes lie
  # between the entries, so that each window meets one of them.
  scores = (
    '  %scores = f32[16,6,64]{2,1,0} convolution(%q, %k), window={size=16 '
    'stride=15 lhs_dilate=16}, dim_labels=0bf_0oi->0bf\n'
  )
  text = _TPU_TEXT.replace(heads, q % '16,6,128' + k % '16,64,128' + scores)
  found = hlo_cost.operations(hlo.read(text)) - loop
  assert found == 16 * 2 * 6 * 128 * 64


def test_kernels_that_say_what_they_compute_are_counted():
  kernel = (
    '  %%y = bf16[4,8]{1,0} custom-call(%%x), custom_call_target='
    '"tpu_custom_call", backend_config={"custom_call_config":{%s}}\n'
  )
  cost = '"cost_estimate":{"flops":"70","transcendentals":"0"}'
  kernels = kernel % cost + kernel % '"body":""'
  text = _TEXT.replace('  %whole', kernels + '  %whole')
  assert hlo_cost.operations(hlo.read(text)) == 5 * 70


def _compiled(function, mesh, *arrays):
  columns, whole = (
    jax.sharding.NamedSharding(mesh, s) for s in (P(None, 'fsdp'), P())
  )
  jitted = jax.jit(function, in_shardings=(columns, whole), out_shardings=whole)
  return jitted.lower(*arrays).compile().as_text()


def test_products_in_a_loop_are_counted():
  mesh = mesh_lib.make_mesh(data=1, fsdp=8, tensor=1)

  def seven_products(x_AB, w_BC):
    step = lambda _, w_BC: (None, x_AB @ w_BC)
    return jax.lax.scan(step, None, w_BC + np.zeros((7, 1, 1)))[1]

  arrays = np.ones((5, 16), np.float32), np.ones((1, 16, 6), np.float32)
  text = _compiled(seven_products, mesh, *arrays)
  (found,) = hlo_cost.collectives(hlo.read(text))
  assert (found.kind, found.devices) == ('all-reduce', 8)
  # [5, 6] float32 are 120 bytes: each device has one term of every sum.
  assert found.sent == 7 * 2 * 120 * 7 / 8
  # Two of the sixteen columns are on a device.
  assert hlo_cost.operations(hlo.read(text)) == 7 * 2 * 5 * 2 * 6


# A loop of 3 whose end may come earlier: it moves `w` into fast memory, takes a
# product with it, and stores a row of the result in place.
_LOOP_TEXT = """HloModule jit_f, is_scheduled=true

%inner (p0: bf16[8,4]) -> bf16[8,4] {
  %p0 = bf16[8,4]{1,0} parameter(0)
  ROOT %same = bf16[8,4]{1,0} bitcast(%p0)
}

%product (p1: bf16[8,4], p2: bf16[4,4], p3: s32[]) -> bf16[8,4] {
  %p1 = bf16[8,4]{1,0} parameter(0)
  %p2 = bf16[4,4]{1,0} parameter(1)
  %p3 = s32[] parameter(2)
  %nested = bf16[8,4]{1,0} fusion(%p1), kind=kLoop, calls=%inner
  %row = bf16[1,4]{1,0} dynamic-slice(%nested, %p3, %p3)
  %mixed = bf16[1,4]{1,0} convolution(%row, %p2), dim_labels=bf_io->bf
  ROOT %stored = bf16[8,4]{1,0} dynamic-update-slice(%p1, %mixed, %p3, %p3)
}

%body (arg: (bf16[8,4], bf16[4,4], s32[])) -> (bf16[8,4], bf16[4,4], s32[]) {
  %arg = (bf16[8,4]{1,0}, bf16[4,4]{1,0}, s32[]) parameter(0)
  %x = bf16[8,4]{1,0} get-tuple-element(%arg), index=0
  %w = bf16[4,4]{1,0} get-tuple-element(%arg), index=1
  %i = s32[]{:S(6)} get-tuple-element(%arg), index=2
  %begun = (bf16[4,4]{1,0:T(8)S(1)}, bf16[4,4]{1,0}, u32[]{:S(2)}) \
copy-start(%w)
  %moved = bf16[4,4]{1,0:T(8)S(1)} copy-done(%begun)
  %y = bf16[8,4]{1,0} fusion(%x, %moved, %i), kind=kOutput, calls=%product
  ROOT %out = (bf16[8,4]{1,0}, bf16[4,4]{1,0}, s32[]) tuple(%y, %w, %i)
}

%cond (arg: (bf16[8,4], bf16[4,4], s32[])) -> pred[] {
  %three = s32[]{:S(6)} constant(3)
  %zero = s32[]{:S(6)} constant(0)
  %j = s32[]{:S(6)} get-tuple-element(%arg), index=2
  %less = pred[]{:S(6)} compare(%j, %three), direction=LT
  %more = pred[]{:S(6)} compare(%j, %zero), direction=GT
  ROOT %both = pred[]{:S(6)} and(%less, %more)
}

ENTRY %main (p: (bf16[8,4], bf16[4,4], s32[])) -> bf16[2,4] {
  %p = (bf16[8,4]{1,0}, bf16[4,4]{1,0}, s32[]) parameter(0)
  %loop = (bf16[8,4]{1,0}, bf16[4,4]{1,0}, s32[]) while(%p), \
condition=%cond, body=%body
  %result = bf16[8,4]{1,0} get-tuple-element(%loop), index=0
  %piece = ((bf16[8,4]{1,0}), bf16[2,4]{1,0:T(8)S(1)}, s32[]{:S(2)}) \
slice-start(%result), slice={[0:2], [0:4]}
  ROOT %sliced = bf16[2,4]{1,0} slice(%result), slice={[0:2], [0:4]}
}
"""


def test_what_a_loop_moves_is_counted_as_often_as_it_runs():
  # All of `w` and of `x`, which the nested kernel hands on whole, and the row
  # that is written.
  per_turn = 32 + 64 + 8
  # Two rows go to fast memory, and two are copied in memory.
  assert hlo_cost.accessed(hlo.read(_LOOP_TEXT)) == 3 * per_turn + 16 + 2 * 16


def test_a_collective_moves_all_of_its_arrays():
  two = '(f32[16]{0}, f32[32]{0})'
  for opcode, shape in (
    ('all-reduce', two),
    ('all-gather', f'({two}, (f32[64]{{0}}, f32[128]{{0}}))'),
  ):
    text = f"""
HloModule collective

ENTRY %main (a: f32[16], b: f32[32]) -> {two} {{
  %a = f32[16]{{0}} parameter(0)
  %b = f32[32]{{0}} parameter(1)
  %begun = {shape} {opcode}-start(%a, %b)
  ROOT %ended = {two} {opcode}-done(%begun)
}}
"""
    results = 48 if opcode == 'all-reduce' else 192
    assert hlo_cost.accessed(hlo.read(text)) == 4 * (48 + results)


def test_a_compiled_product_reads_its_factors_and_writes_its_result():
  x_AD, w_DV = jnp.zeros((64, 32)), jnp.zeros((32, 256))
  text = jax.jit(jnp.dot).lower(x_AD, w_DV).compile().as_text()
  least = x_AD.nbytes + w_DV.nbytes + 4 * 64 * 256
  assert least <= hlo_cost.accessed(hlo.read(text)) <= 1.01 * least
