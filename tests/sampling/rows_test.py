"""Pages are given to rows and taken back."""

import dataclasses

import numpy as np
import pytest

from stppo_jax.sampling import rows as rows_lib

_SIZE = 4


@dataclasses.dataclass(eq=False)
class _Row:
  wanted: int  # tokens at its end
  length: int = 0
  pages: list[int] = dataclasses.field(default_factory=list)


def _pool(num_pages, most):
  return rows_lib.PagePool(num_pages, page_size=_SIZE, pages_per_row=most)


def test_a_page_has_one_row_until_it_ends():
  pool, rows = _pool(6, 3), [_Row(12), _Row(12)]
  for row in rows:
    pool.add(row)
    assert pool.grow(row, 5) and len(row.pages) == 2
    assert pool.grow(row, 8) and len(row.pages) == 2
    assert pool.grow(row, 9)
  assert sorted(rows[0].pages + rows[1].pages) == list(range(6))
  late = _Row(1)
  pool.add(late)
  assert not pool.grow(late, 1) and not late.pages
  pool.remove(rows[1])
  assert pool.grow(late, 1)


def test_shared_pages_are_free_after_the_last_row_that_has_them():
  pool, rows = _pool(4, 3), [_Row(12), _Row(12)]
  for row in rows:
    pool.add(row)
  assert pool.grow(rows[0], 10)
  pool.share(rows[1], rows[0], 10)  # the third page is not full
  assert rows[1].pages == rows[0].pages[:2]
  pool.remove(rows[0])
  assert pool.grow(rows[1], 12)
  late = _Row(8)
  pool.add(late)
  assert not pool.fits(late, 8)
  pool.remove(rows[1])
  assert pool.grow(late, 12) and len(late.pages) == 3


@pytest.mark.parametrize('num_pages', [5, 7, 20])
def test_all_rows_end_however_few_pages_there_are(num_pages):
  rng = np.random.default_rng(num_pages)
  for _ in range(20):
    pool = _pool(num_pages, 5)
    waiting = [_Row(int(rng.integers(1, 21))) for _ in range(30)]
    live: list[_Row] = []
    while waiting or live:
      if waiting and len(live) < 6:
        live.append(waiting.pop())
        pool.add(live[-1])
      grown = []
      for n in rng.permutation(len(live)):
        row = live[n]
        if pool.grow(row, min(row.length + 3, row.wanted)):
          row.length = min(row.length + 3, row.wanted)
          grown.append(row)
      held = [page for row in live for page in row.pages]
      assert len(held) == len(set(held)) <= num_pages
      assert live[0] in grown
      for row in [row for row in live if row.length == row.wanted]:
        pool.remove(row)
        live.remove(row)
