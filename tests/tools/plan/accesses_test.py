"""Bytes that programs move, compared with counts by hand."""

import jax
import jax.numpy as jnp

from stppo_jax.tools.plan import accesses

# A loop of 3 whose end may come earlier: it moves `w` into fast memory, takes a
# product with it, and stores a row of the result in place.
_TEXT = """HloModule jit_f, is_scheduled=true

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
  assert accesses.count(_TEXT) == 3 * per_turn + 16 + 2 * 16


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
    assert accesses.count(text) == 4 * (48 + results)


def test_a_compiled_product_reads_its_factors_and_writes_its_result():
  x_AD, w_DV = jnp.zeros((64, 32)), jnp.zeros((32, 256))
  text = jax.jit(jnp.dot).lower(x_AD, w_DV).compile().as_text()
  least = x_AD.nbytes + w_DV.nbytes + 4 * 64 * 256
  assert least <= accesses.count(text) <= 1.01 * least
