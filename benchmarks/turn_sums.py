"""Compares five implementations of sums over turns in one table.

    python -m benchmarks.turn_sums

B trajectories, L tokens, T turns. `segment_sum`, `unrolled` and `broadcast` are
in `rl/segments.py`, which names the advantage of each. Two other common forms
are written here:

  one_hot      x @ one_hot(ids), a product at highest precision. An infinity in
               one turn reaches all others: 0 * inf is nan.
  prefix_sums  differences of one running sum. A small turn after a large one
               is lost in the rounding of the running sum.

Columns: time of the sums, and of a loss of the sums with its gradient; compile
time; the greatest error against exact sums, relative to the sum of the
magnitudes; the relative error of a turn that sums to 1e-3 after one that sums
to 1e4; whether repeated calls and permuted rows give the same bits; whether
an infinity stays in its turn.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import batches
from benchmarks import measure
from stppo_jax.rl import segments as segments_lib

Array = jax.Array

LARGE, SMALL = 1e4, 1e-3
PARITY = 1e-6  # error of a turn's sum, relative to the sum of its magnitudes
HEADER = (
  'form',
  'sums, ms',
  'with gradient, ms',
  'compile, s',
  'error',
  '1e-3 after 1e4',
  'same bits',
  'inf stays',
)


def one_hot(x_BL: Array, ids_BL: Array, num_turns: int) -> Array:
  """Returns the sums as a product with 0 and 1."""
  own_BLT = jax.nn.one_hot(ids_BL - 1, num_turns, dtype=x_BL.dtype)
  return jnp.einsum(
    'bl,blt->bt',
    jnp.where(ids_BL > 0, x_BL, 0),
    own_BLT,
    precision=jax.lax.Precision.HIGHEST,
  )


def prefix_sums(x_BL: Array, ids_BL: Array, num_turns: int) -> Array:
  """Returns differences of a running sum; ids must not decrease in a row."""
  running_BL = jnp.cumsum(jnp.where(ids_BL > 0, x_BL, 0), axis=1)
  running_BL = jnp.pad(running_BL, ((0, 0), (1, 0)))
  # Tokens between turns get the id of the turn before, so that the row is
  # sorted.
  sorted_BL = jax.lax.cummax(ids_BL, axis=1)
  bounds_B = jax.vmap(
    lambda row_L: jnp.searchsorted(row_L, jnp.arange(1, num_turns + 2))
  )(sorted_BL)
  return jnp.diff(jnp.take_along_axis(running_BL, bounds_B, axis=1), axis=1)


def _ours(totals, x_BL, ids_BL, num_turns):
  return totals(x_BL, ids_BL, num_turns)


FORMS: dict[str, Callable[[Array, Array, int], Array]] = {
  name: functools.partial(_ours, form.totals)
  for name, form in segments_lib.IMPLEMENTATIONS.items()
} | {'one_hot': one_hot, 'prefix_sums': prefix_sums}


def exact_sums(x_BL: np.ndarray, ids_BL: np.ndarray, num_turns: int):
  """Returns float64 [B, T], where each sum is rounded once."""
  sums_BT = [
    [math.fsum(x_L[ids_L == turn]) for turn in range(1, num_turns + 1)]
    for x_L, ids_L in zip(x_BL, ids_BL, strict=True)
  ]
  return np.array(sums_BT)


def large_then_small(ids_BL: np.ndarray) -> np.ndarray:
  """Returns float32 [B, L]: turn 1 sums to 1e4, turn 2 to 1e-3."""
  x_BL = np.zeros(ids_BL.shape)
  for turn, total in ((1, LARGE), (2, SMALL)):
    own_BL = ids_BL == turn
    x_BL += np.where(own_BL, total / own_BL.sum(axis=1, keepdims=True), 0)
  return x_BL.astype(np.float32)


def _relative(sums_BT, exact_BT, scale_BT):
  return float(np.max(np.abs(np.asarray(sums_BT) - exact_BT) / scale_BT))


def _same_bits(form, x_BL, ids_BL) -> bool:
  """Returns whether repeated calls and permuted rows give the same bits."""
  sums_BT = np.asarray(form(x_BL, ids_BL))
  again = all(np.array_equal(form(x_BL, ids_BL), sums_BT) for _ in range(10))
  order_B = np.random.default_rng(1).permutation(len(x_BL))
  permuted_BT = np.asarray(form(x_BL[order_B], ids_BL[order_B]))
  return again and np.array_equal(permuted_BT, sums_BT[order_B])


def _infinity_stays(form, x_BL, ids_BL) -> bool:
  x_BL = np.where(ids_BL == 1, np.float32(np.inf), x_BL)
  return bool(np.isfinite(np.asarray(form(x_BL, ids_BL))[:, 1:]).all())


def small_turn_error(form, ids_BL: np.ndarray, num_turns: int) -> float:
  """Returns the relative error of the turn that sums to 1e-3."""
  x_BL = large_then_small(ids_BL)
  exact_B = exact_sums(x_BL, ids_BL, num_turns)[:, 1]
  return _relative(np.asarray(form(x_BL, ids_BL))[:, 1], exact_B, exact_B)


def run(rows: int, length: int, num_turns: int, *, repeats: int) -> str:
  """Returns the table, and whether it can be trusted.

  Raises:
    AssertionError: if a form's sums are wrong; nothing is timed then.
  """
  rng = np.random.default_rng(0)
  ids_BL = batches.turn_ids(rng, rows, length, num_turns)
  x_BL = rng.normal(size=ids_BL.shape).astype(np.float32)
  weights_BT = rng.normal(size=(rows, num_turns)).astype(np.float32)
  exact_BT = exact_sums(x_BL, ids_BL, num_turns)
  scale_BT = exact_sums(np.abs(x_BL), ids_BL, num_turns)
  exact_gradient_BL = np.pad(2 * weights_BT * exact_BT, ((0, 0), (1, 0)))
  exact_gradient_BL = np.take_along_axis(exact_gradient_BL, ids_BL, axis=1)

  sums, gradients, results = {}, {}, {}
  for name, function in FORMS.items():
    form = functools.partial(function, num_turns=num_turns)

    def loss(x_BL, ids_BL, weights_BT, form=form):
      # Squared, so that the gradient depends on the sums.
      return jnp.sum(weights_BT * jnp.square(form(x_BL, ids_BL)))

    forward = measure.compiled(form, x_BL, ids_BL)
    backward = measure.compiled(
      jax.value_and_grad(loss), x_BL, ids_BL, weights_BT
    )
    error = _relative(forward.program(x_BL, ids_BL), exact_BT, scale_BT)
    # A running sum rounds over the whole row; `small` below shows the cost.
    parity = PARITY * (length if name == 'prefix_sums' else 1)
    assert error <= parity, f'{name}: error {error:.1e}'
    _, gradient_BL = backward.program(x_BL, ids_BL, weights_BT)
    np.testing.assert_allclose(
      gradient_BL,
      exact_gradient_BL,
      rtol=0,
      atol=parity * np.abs(exact_gradient_BL).max(),
      err_msg=name,
    )
    small = small_turn_error(forward.program, ids_BL, num_turns)
    results[name] = (
      f'{forward.seconds + backward.seconds:.2f}',
      f'{error:.0e}',
      f'{small:.0e}',
      'yes' if _same_bits(forward.program, x_BL, ids_BL) else 'no',
      'yes' if _infinity_stays(forward.program, x_BL, ids_BL) else 'no',
    )
    arguments = jax.device_put((x_BL, ids_BL, weights_BT))
    sums[name] = forward.case(*arguments[:2])
    gradients[name] = backward.case(*arguments)
  sums = measure.interleave(sums, repeats=repeats)
  gradients = measure.interleave(gradients, repeats=repeats)
  lines = [
    (
      name,
      measure.milliseconds(sums[name]),
      measure.milliseconds(gradients[name]),
      *results[name],
    )
    for name in FORMS
  ]
  timed = sums | {f'{name} with gradient': x for name, x in gradients.items()}
  return measure.table(HEADER, lines) + '\n\n' + measure.verdict(timed)


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and on which machine."""
  parser = measure.parser(
    'turn_sums', rows=64, length=4096, turns=16, repeats=9
  )
  flags = measure.start(parser, arguments)
  print(
    f'turn sums of float32 [{flags.rows}, {flags.length}], {flags.turns} '
    f'turns; median (least-greatest) of {flags.repeats}\n'
  )
  print(run(flags.rows, flags.length, flags.turns, repeats=flags.repeats))


if __name__ == '__main__':
  main()
